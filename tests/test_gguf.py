"""Models from GGUF files: config fields, tensors by Hugging Face's names, and rejected files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers_families import checkpoint_arrays, difference

from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle.pretrained import gguf
from tricycle.pretrained.families import build_model
from tricycle.pretrained.gguf import read_gguf
from tricycle.pretrained.gguf_file import GGUFFile
from tricycle.pretrained.gguf_model_metadata import ModelMetadata, llama3_scaling
from tricycle.tensor import no_grad

pytest.importorskip("gguf")
pytest.importorskip("ml_dtypes")
torch = pytest.importorskip("torch")
gguf_models = pytest.importorskip("gguf_models")
transformers = pytest.importorskip("transformers")

NAMES = [*gguf_models.ARCHITECTURES, *gguf_models.ENCODERS]
OTHER_TENSORS = ("gpt-oss", "Granite-MoE", "Falcon", "Falcon, 40B")  # than checkpoints: gates or QKV in another order
each_model = pytest.mark.parametrize("name", NAMES)
each_model_with_equal_tensors = pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER_TENSORS])


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, tuple[Path, object]]:
    folder = tmp_path_factory.mktemp("gguf")
    models = {name: gguf_models.new_model(name) for name in gguf_models.ARCHITECTURES}
    models |= {name: new_encoder() for name, (_, new_encoder) in gguf_models.ENCODERS.items()}
    paths = {name: folder / f"{name.replace(' ', '_')}.gguf" for name in models}
    return {name: (gguf_models.write_model(paths[name], name, model), model) for name, model in models.items()}


@pytest.fixture
def write(files, tmp_path) -> Callable[..., Path]:
    """Return a function that writes a model with other keys or tensors (None removes one), and returns the path."""

    def write(name: str, keys=None, tensors=None, architecture: str = "") -> Path:
        architecture, (_, model) = architecture or gguf_models.ARCHITECTURES[name], files[name]
        all_keys = gguf_models.metadata_of(architecture, model.config) | (keys or {})
        all_tensors = gguf_models.convert_tensors(architecture, model) | (tensors or {})
        parts = ({key: value for key, value in part.items() if value is not None} for part in (all_keys, all_tensors))
        return gguf_models.write(tmp_path / "a.gguf", architecture, *parts)

    return write


# -------------------------------------------------------------------- models
@each_model_with_equal_tensors
def test_tensors_equal_transformers(files, name):
    path, model = files[name]
    source = read_gguf(path)
    expected = checkpoint_arrays(model)
    assert set(source.tensors) == set(expected)
    rounding = 3e-7 if name.startswith("Gemma") else 0  # 1 + gain, and back
    for key, tensor in source.tensors.items():
        values = tensor.read()
        assert tensor.dtype_name == "F32" and values.dtype == np.float32
        assert values.shape == tensor.shape == expected[key].shape
        np.testing.assert_allclose(values, expected[key], rtol=0, atol=rounding, err_msg=key)


@each_model
def test_outputs_match_transformers(files, name):
    path, model = files[name]
    tokens = np.random.default_rng(7).integers(0, 61, (2, 24))
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens))[0].numpy()  # logits, or BERT's hidden states
    source = read_gguf(path)
    assert source.fields["model_type"] == model.config.model_type
    with no_grad():
        outputs = build_model(source)(tokens).numpy()
    assert difference(outputs, expected) < 2e-5


@each_model_with_equal_tensors
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_16_bit_tensors_keep_their_dtype(files, tmp_path, name, kind):
    _, model = files[name]
    source = read_gguf(gguf_models.write_model(tmp_path / "a.gguf", name, model, kind))
    originals = checkpoint_arrays(model)
    dtype = np.dtype({"F16": "float16", "BF16": "bfloat16"}[kind])  # ml_dtypes gives NumPy the second
    for key, tensor in source.tensors.items():
        values = tensor.read()
        matrix = values.ndim > 1
        assert (values.dtype, tensor.dtype_name) == ((dtype, kind) if matrix else (np.float32, "F32")), key
        if matrix:
            original = originals.get(key, originals.get("lm_head.weight"))
            np.testing.assert_array_equal(values, original.astype(dtype))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantized_blocks_dequantize_as_in_transformers(tmp_path, kind):
    """Rows of queries and keys are permuted as whole rows of blocks."""
    pytest.importorskip("accelerate")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": None}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    parts = gguf_models.metadata_of("llama", model.config), gguf_models.convert_tensors("llama", model)
    path = gguf_models.write(tmp_path / "a.gguf", "llama", *parts, kind)
    state = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).state_dict()
    source = read_gguf(path)
    assert {tensor.dtype_name for tensor in source.tensors.values()} == {kind, "F32"}
    for key, tensor in source.tensors.items():
        np.testing.assert_array_equal(tensor.read(), state[key].numpy(), err_msg=key)


def test_output_layer_equal_to_the_embedding_is_tied(files, write):
    _, model = files["GPT-2"]
    embedding = gguf_models.convert_tensors("gpt2", model)["token_embd.weight"]
    copied = read_gguf(write("GPT-2", tensors={"output.weight": embedding}))
    assert copied.fields["tie_word_embeddings"] and "lm_head.weight" not in copied.tensors
    converted = read_gguf(write("GPT-2", tensors={"output.weight": 2 * embedding}))
    assert not converted.fields["tie_word_embeddings"]
    np.testing.assert_array_equal(converted.tensors["lm_head.weight"].read(), 2 * embedding)


def test_fused_qkv_matrix_is_split(files, write):
    _, model = files["Phi"]
    tensors, fused = gguf_models.convert_tensors("phi2", model), {}
    for block in range(2):
        for suffix in ("weight", "bias"):
            parts = [f"blk.{block}.attn_{part}.{suffix}" for part in "qkv"]
            fused |= dict.fromkeys(parts)
            fused[f"blk.{block}.attn_qkv.{suffix}"] = np.concatenate([tensors[part] for part in parts])
    source = read_gguf(write("Phi", tensors=fused))
    for key, expected in model.state_dict().items():
        assert source.tensors[key].shape == expected.shape
        np.testing.assert_array_equal(source.tensors[key].read(), expected.numpy())


def test_llama_with_sliding_window_becomes_mistral(write):
    fields = read_gguf(write("Llama", {"attention.sliding_window": 7})).fields
    assert (fields["model_type"], fields["sliding_window"]) == ("mistral", 7)


def test_llama_with_only_qkv_biases_becomes_qwen2(files, write):
    """Hugging Face's Llama has no biases of Q, K and V alone; its Qwen2 does, and is equal otherwise."""
    _, model = files["Qwen2"]
    source = read_gguf(write("Qwen2", architecture="llama"))
    assert source.fields["model_type"] == "qwen2"
    for key, tensor in source.tensors.items():
        np.testing.assert_array_equal(tensor.read(), model.state_dict()[key].numpy(), err_msg=key)
    build_model(source)


def test_models_that_llama_cpp_does_not_compute_are_rejected(write):
    refused(write("OLMo 2", {"attention.sliding_window": 9}), "OLMo 3, which is not supported")
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        build_model(read_gguf(write("OLMo 2", tensors={"output.weight": None})))
    divisors = {"rope_freqs.weight": np.ones(8, np.float32)}
    refused(write("Qwen3", tensors=divisors), r"rope_freqs\.weight.*unknown.*qwen3")


def test_gemma_3_without_a_window_has_full_attention(write):
    assert build_model(read_gguf(write("Gemma 3", {"attention.sliding_window": None}))).config.window == 0


def test_special_tokens_and_sampling_settings_are_read(write):
    keys = {f":tokenizer.ggml.{name}_token_id": i for i, name in enumerate(["bos", "eos", "eot", "padding"], 1)}
    keys |= {":general.sampling.temp": 0.5, ":general.sampling.top_k": 20, ":tokenizer.ggml.eom_token_id": 2**31}
    source = read_gguf(write("Llama", keys))
    ids = {key: value for key, value in source.fields.items() if key.endswith("token_id")}
    assert ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 4}
    assert source.generation == {"eos_token_id": [2, 3], "temperature": 0.5, "top_k": 20, "do_sample": True}


def test_per_layer_values_must_be_equal(write):
    """A key may be a list with one value per layer; equal values are read as one."""
    fields = read_gguf(write("Llama", {"attention.head_count_kv": [3, 3]})).fields
    assert fields["num_key_value_heads"] == 3
    refused(write("Llama", {"attention.head_count_kv": [3, 9]}), r"llama\.attention\.head_count_kv.*the same in all")


# -------------------------------------------------------------------- llama3's scaling from its divisors
LLAMA_3 = [(128, 500_000.0, 8.0, 1.0, 4.0, 8192), (64, 500_000.0, 32.0, 1.0, 4.0, 8192)]


@pytest.mark.parametrize("case", [*LLAMA_3, (64, 1e5, 8.0, 1.5, 5.0, 64), (96, 1e6, 16.0, 1.0, 8.0, 4096)], ids=str)
def test_llama3_scaling_is_recovered(tmp_path, case):
    size, base, factor, low, high, window = case
    scaling = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    scaling["original_max_position_embeddings"] = window
    divisors = gguf_models.llama3_divisors(size, base, scaling)
    keys = ModelMetadata(GGUFFile(tmp_path, {"llama.rope.freq_base": base}, {}), "llama")
    fields = llama3_scaling(keys, divisors)["rope_scaling"]
    assert fields.pop("rope_type") == "llama3"
    if case in LLAMA_3:
        assert fields == scaling
    np.testing.assert_allclose(gguf_models.llama3_divisors(size, base, fields), divisors, rtol=1e-5)


def test_other_rope_divisors_are_recovered_or_rejected(tmp_path):
    keys = ModelMetadata(GGUFFile(tmp_path, {}, {}), "llama")
    assert llama3_scaling(keys, np.ones(32, np.float32)) == {}
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert llama3_scaling(keys, np.full(32, 4, np.float32)) == linear
    not_numbers, zeros = np.full(32, np.nan), np.r_[np.zeros(16), np.ones(16)]
    for strange in (np.linspace(1, 8, 32), np.linspace(8, 1, 32), not_numbers, zeros):
        with pytest.raises(ValueError, match=r"rope_freqs.weight.*llama3"):
            llama3_scaling(keys, strange.astype(np.float32))


# -------------------------------------------------------------------- keys and tensors that contradict each other
WRONG_KEYS = {
    "no number of layers": ({"block_count": None}, r"expected.*llama\.block_count"),
    "a number of layers that is text": ({"block_count": "2"}, r"llama\.block_count.*whole number"),
    "too many layers": ({"block_count": 2**31 - 1}, r"llama\.block_count.*2147483647.* 2"),
    "no layer": ({"block_count": 0}, r"llama\.block_count.*above 0"),
    "too wide": ({"embedding_length": 2**30}, r"llama\.embedding_length.*1073741824.*36"),
    "too wide inside": ({"feed_forward_length": 48}, r"llama\.feed_forward_length.*48.*40"),
    "other heads": ({"attention.head_count": 6}, r"'blk\.0\.attn_.*'.*6 query heads"),
    "other key heads": ({"attention.head_count_kv": 9}, r"'blk\.0\.attn_k\.weight'.*\(192, 36\)"),
    "no eps": ({"attention.layer_norm_rms_epsilon": 0.0}, r"layer_norm_rms_epsilon.*got 0\.0"),
    "an eps that is none": ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon.*got nan"),
    "experts without tensors": ({"expert_count": 8}, r"3 dimensions of blk\.0\.ffn_up_exps\.weight, got none"),
    "partial rotary": ({"rope.dimension_count": 32}, "64 channels.*got 32"),
    "values of another size": ({"attention.value_length": 32}, "value_length.*64.*got 32"),
    "longrope": ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, r"scaling\.type.*yarn.*'longrope'"),
    "yarn's factors": (
        {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5},
        r"no key llama\.rope\.scaling\.yarn_ext_factor",
    ),
    "one of two": ({":split.count": 2}, "one of 2 files"),
    "an adapter": ({":general.type": "adapter"}, r"general\.type.*'adapter'"),
}


@pytest.mark.parametrize(("wrong", "pattern"), WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_invalid_metadata_is_rejected(write, wrong, pattern):
    refused(write("Llama", wrong), pattern)


WRONG_EXPERTS = {
    "another number": ({"expert_count": 5}, r"expert_count is 5, but the tensors have 6"),
    "none": ({"expert_count": 0}, r"expected a matrix blk\.0\.ffn_up\.weight"),
    "no number of active ones": ({"expert_used_count": None}, r"expected a key qwen3moe\.expert_used_count"),
    "another width": ({"expert_feed_forward_length": 16}, r"expert_feed_forward_length is 16.* 12"),
    "shared ones": ({"expert_shared_count": 1}, r"expert_shared_count to be missing or 0, got 1"),
    "sigmoid": ({"expert_gating_func": 2}, r"expert_gating_func to be missing or 1, got 2"),
    "scaled weights": ({"expert_weights_scale": 2.5}, r"expert_weights_scale to be missing or 1\.0, got 2\.5"),
}


@pytest.mark.parametrize(("wrong", "pattern"), WRONG_EXPERTS.values(), ids=WRONG_EXPERTS)
def test_invalid_metadata_of_experts_is_rejected(write, wrong, pattern):
    refused(write("Qwen3-MoE", wrong), pattern)


WRONG_LATENTS: dict[str, tuple[dict[str, object], dict[str, np.ndarray | None], str]] = {
    "experts in the first layer": ({"leading_dense_block_count": 0}, {}, r"3 dimensions of blk\.0\.ffn_up_exps"),
    "a negative number of dense layers": (
        {"leading_dense_block_count": [1, 2]},
        {},
        "leading_dense.*same in all layers",
    ),
    "an unknown router": ({"expert_gating_func": 3}, {}, r"1 \(softmax\) or 2 \(sigmoid\), got 3"),
    "groups of a softmax": ({"expert_gating_func": 1}, {}, "3 groups of 6 experts, expert_gating_func 1"),
    "linear scaling": ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {}, "yarn, got linear"),
    "another eps": ({"attention.layer_norm_rms_epsilon": 1e-5}, {}, "epsilon to be 1e-06, .*got 9.99"),
    "no rank of queries": ({"attention.q_lora_rank": None}, {}, r"expected a key deepseek2\.attention\.q_lora_rank"),
    "values of other heads": ({}, {"blk.1.attn_v_b.weight": np.zeros((3, 10, 14))}, r"\(H, E, L\), got \(\(4, 14, 8\)"),
    "keys in two dimensions": ({}, {"blk.1.attn_k_b.weight": np.zeros((56, 8))}, r"\(H, L, D\).*got \(\(56, 8\)"),
}


@pytest.mark.parametrize(("keys", "tensors", "pattern"), WRONG_LATENTS.values(), ids=WRONG_LATENTS)
def test_invalid_latent_attention_is_rejected(write, keys, tensors, pattern):
    refused(write("DeepSeek-V3", keys, tensors), pattern)


def test_missing_parts_of_an_expansion_are_named(write):
    path = write("DeepSeek-V3", tensors={"blk.2.attn_v_b.weight": None})
    with pytest.raises(ValueError, match=r"missing model\.layers\.2\.self_attn\.kv_b_proj.*unexpected .*2.*k_b_proj"):
        build_model(read_gguf(path))


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_parts_of_an_expansion_are_joined_in_any_format(tmp_path, kind):
    """Rows of the part for keys are columns of the expansion, so quantized blocks are converted to floats."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16, "hidden_size": 32, "q_lora_rank": 32}
    experts = {"intermediate_size": 32, "moe_intermediate_size": 32}
    model = gguf_models.new_model("DeepSeek-V3", **sizes, **experts)
    path = gguf_models.write_model(tmp_path / "a.gguf", "DeepSeek-V3", model, kind)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    values = read_gguf(path).tensors[name].read()
    assert 0 < difference(values, model.state_dict()[name].numpy()) < 0.01
    for weights in ("stored", "int8", "float32"):
        loaded = build_model(read_gguf(path), weights)
        error = 0 if weights == "float32" else 0.02
        array = np.asarray(loaded.blocks[1].attention.expansion.weights.array, np.float32)
        np.testing.assert_allclose(array.T, values, rtol=0, atol=error * np.abs(values).max())


def test_invalid_tensors_of_experts_are_rejected(write, monkeypatch):
    name = "blk.1.ffn_down_exps.weight"
    for shape in ((5, 24, 12), (24, 12)):
        path = write("Qwen3-MoE", tensors={name: np.zeros(shape, np.float32)})
        refused(path, rf"'blk\.1\.ffn_down_exps\.weight' of 6 matrices, got shape \({shape[0]}, ")
    monkeypatch.setattr(gguf, "_MAX_EXPERT_TENSORS", 35)
    refused(write("Qwen3-MoE"), "expected at most 35 matrices of experts, got 36")
    experts = {"blk.0.ffn_up_exps.weight": np.zeros((2, 40, 24), np.float32)}
    refused(write("Qwen3", {"expert_count": 2}, experts), "is a mixture of 2 experts, which is not supported")


def test_quantized_blocks_of_experts_stay_as_they_are(tmp_path):
    """Each expert is a view of the file, whose blocks are those of the whole tensor."""
    model = gguf_models.new_model("Mixtral", hidden_size=32, intermediate_size=64)
    path = gguf_models.write_model(tmp_path / "a.gguf", "Mixtral", model, "Q8_0")
    loaded = build_model(read_gguf(path), "stored")
    expert = loaded.blocks[1].mlp.experts[3]
    assert isinstance(expert.up.weights.array, BlockMatrix)
    values = read_gguf(path).tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"].read()
    np.testing.assert_array_equal(np.asarray(expert.projection.weights.array), values.T)
    expected = checkpoint_arrays(model)["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    assert difference(values, expected) < 0.01


def refused(path: Path, pattern: str) -> None:
    """Check that the error is one line that begins with the path."""
    with pytest.raises(ValueError, match=pattern) as caught:
        read_gguf(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_unknown_and_missing_tensors_are_rejected(write):
    vector = np.zeros(32, np.float32)
    wrong = {
        "blk.0.attn_sinks.weight": r"'blk\.0\.attn_sinks\.weight'.*unknown.*llama",
        "blk.00.attn_q.weight": r"'blk\.00\.attn_q\.weight'.*unknown",
        "output.scale": r"'output\.scale'.*unknown",
        "rope_factors_long.weight": r"rope_factors_long\.weight.*longrope",
    }
    for name, pattern in wrong.items():
        refused(write("Llama", tensors={name: vector}), pattern)
    for name in ("token_embd.weight", "blk.0.ffn_up.weight"):
        refused(write("Llama", tensors={name: None}), f"matrix {name}.*none")
    path = write("Llama", tensors={"blk.1.attn_norm.weight": None})
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.input_layernorm\.weight$"):
        build_model(read_gguf(path))
