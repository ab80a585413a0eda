"""The format of each tensor of a file type, compared with files of llama.cpp's quantizer."""

import pytest

from tricycle.configs import ModelConfig
from tricycle.pretrained.gguf_file_types import FILE_TYPES, Mixture

# From files that llama-cpp-python 0.3.36 quantized: SmolLM2-135M, 30 layers with rows of 576 and 1536 (ffn_down); a
# random llama, untied, 9 layers with rows of 512 and 768; a random GPT-2, tied, 11 layers with rows of 256 and 1024.
MODELS = {
    "smollm2": (ModelConfig(embedding_dim=576, n_heads=9, n_key_heads=3, hidden_size=1536, n_layers=30), 576, 1536),
    "llama": (ModelConfig(embedding_dim=512, n_heads=8, n_key_heads=2, n_layers=9, tied=False), 512, 768),
    "gpt2": (ModelConfig(embedding_dim=256, n_heads=8, n_layers=11), 256, 1024),
    "narrow": (ModelConfig(embedding_dim=80, n_heads=4, n_layers=3), 80, 96),
}
SOME_LAYERS = (0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29)  # of 30, with more bits
MANY = {"smollm2": SOME_LAYERS, "llama": (0, 3, 6, 7, 8), "gpt2": (0, 3, 6, 9, 10), "narrow": (2,)}
# File type and model: the format of the output layer (or tied embedding), of most matrices, of ffn_down; then the
# formats of the value (or QKV) matrices and of ffn_down in the layers that differ, and which these are.
EXPECTED = {
    ("Q4_K_M", "smollm2"): ("Q8_0", "Q5_0", "Q4_K", "Q8_0", "Q6_K", SOME_LAYERS, SOME_LAYERS),
    ("Q4_K_S", "smollm2"): ("Q8_0", "Q5_0", "Q4_K", "Q5_1", "Q5_K", range(4), range(3)),
    ("Q5_K_M", "smollm2"): ("Q8_0", "Q5_1", "Q5_K", "Q8_0", "Q6_K", SOME_LAYERS, SOME_LAYERS),
    ("Q5_K_S", "smollm2"): ("Q8_0", "Q5_1", "Q5_K", "", "", (), ()),
    ("Q6_K", "smollm2"): ("Q8_0", "Q8_0", "Q6_K", "", "", (), ()),
    ("Q4_0", "smollm2"): ("Q8_0", "Q4_0", "Q4_0", "", "", (), ()),
    ("Q5_1", "smollm2"): ("Q8_0", "Q5_1", "Q5_1", "", "", (), ()),
    ("Q8_0", "smollm2"): ("Q8_0", "Q8_0", "Q8_0", "", "", (), ()),
    ("BF16", "smollm2"): ("BF16", "BF16", "BF16", "", "", (), ()),
    ("Q4_K_M", "llama"): ("Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K", MANY["llama"], MANY["llama"]),
    ("Q4_K_S", "llama"): ("Q6_K", "Q4_K", "Q4_K", "Q5_K", "Q5_K", range(4), range(1)),
    ("Q5_0", "llama"): ("Q6_K", "Q5_0", "Q5_0", "", "", (), ()),
    ("Q8_0", "llama"): ("Q8_0", "Q8_0", "Q8_0", "", "", (), ()),
    ("Q5_K_M", "gpt2"): ("Q6_K", "Q5_K", "Q5_K", "Q6_K", "Q6_K", MANY["gpt2"], MANY["gpt2"]),
    ("Q4_1", "gpt2"): ("Q6_K", "Q4_1", "Q4_1", "", "", (), ()),
    ("Q4_K_M", "narrow"): ("F16", "F16", "Q5_0", "F16", "Q8_0", MANY["narrow"], MANY["narrow"]),
    ("Q6_K", "narrow"): ("F16", "F16", "Q8_0", "", "", (), ()),
}


@pytest.mark.parametrize("case", EXPECTED, ids=" ".join)
def test_formats_equal_those_of_llama_cpp(case):
    file_type, model = case
    config, row_size, hidden_size = MODELS[model]
    output, most, down, more_values, more_down, value_layers, down_layers = EXPECTED[case]
    mixture = Mixture(file_type, config)
    assert mixture.format_of("token_embd.weight", (61, row_size)) == (output if config.tied else most)
    assert mixture.format_of("output.weight", (61, row_size)) == output
    value = "attn_qkv" if model == "gpt2" else "attn_v"
    for layer in range(config.n_layers):
        for name in ("attn_q", "attn_k", "attn_output", "ffn_up", "ffn_gate"):
            assert mixture.format_of(f"blk.{layer}.{name}.weight", (64, row_size)) == most
        expected = more_values if layer in value_layers else most
        assert mixture.format_of(f"blk.{layer}.{value}.weight", (64, row_size)) == expected, layer
        expected = more_down if layer in down_layers else down
        assert mixture.format_of(f"blk.{layer}.ffn_down.weight", (64, hidden_size)) == expected, layer


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_vectors_and_positions_are_float32(file_type):
    mixture = Mixture(file_type, MODELS["gpt2"][0])
    for name, shape in {
        "blk.0.attn_v.bias": (256,),
        "output_norm.weight": (256,),
        "position_embd.weight": (64, 256),
    }.items():
        assert mixture.format_of(name, shape) == "F32"


def test_first_layers_have_more_bits_with_importances():
    config = MODELS["smollm2"][0]
    for file_type, more in {"Q4_0": "Q4_1", "Q5_0": "Q5_1", "Q4_1": "Q4_1"}.items():
        formats = [Mixture(file_type, config, True).format_of(f"blk.{i}.ffn_down.weight", (8, 1536)) for i in range(30)]
        assert formats == [more] * 3 + [file_type] * 27


def test_value_matrices_of_70b_models_have_more_bits():
    config = ModelConfig(n_layers=80, embedding_dim=512, n_heads=8, n_key_heads=1)
    assert Mixture("Q4_K_S", config).format_of("blk.40.attn_v.weight", (8, 256)) == "Q5_K"
    assert Mixture("Q4_K_S", config).format_of("blk.40.ffn_down.weight", (8, 256)) == "Q4_K"
