"""Gemma 3n's text model as GGUF: round trips, transformers' weights, llama.cpp's logits, and what it cannot compute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gguf_writer import (
    LLAMA,
    QK_NORM,
    TOKENS,
    bpe_tokeniser,
    check_against_llama_cpp,
    check_logits_and_tokens,
    logits,
    rewritten,
)
from tiny_models import add_noise
from transformers_families import difference, hf_logits, randomize_weights

from tricycle.models import GPT
from tricycle.multi_stream.decoder import MultiStreamConfig
from tricycle.pretrained import gguf_metadata_writer, load
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.gguf import read_gguf
from tricycle.pretrained.gguf_file import read_gguf_header
from tricycle.pretrained.gguf_writer import export_gguf

pytest.importorskip("gguf")

GEMMA3N: dict[str, Any] = {**LLAMA, **QK_NORM, "norm_placement": "both", "activation": "gelu", "embedding_scale": 8.0}
GEMMA3N |= {"head_size": 24, "score_scale": 1.0, "logit_cap": 30.0, "window": 8, "rotary_base": 1e6}
GEMMA3N |= {"rotary_local_base": 1e4, "n_shared_layers": 0, "per_layer_rows": LLAMA["vocab_size"]}
THREE = {**GEMMA3N, "n_layers": 3, "full_layers": (2,), "sparsity": (0.95,) * 3}
SHARED = {**GEMMA3N, "n_layers": 23, "full_layers": (4, 9, 14, 19), "n_shared_layers": 3}
SHARED |= {"sparsity": (0.95,) * 10 + (0.0,) * 13, "per_layer_rows": 290}
SCALED = {"rotary_scaling": "linear", "rotary_factor": 8.0, "tied": False}
ALL = {"full_layers": (), "n_heads": 8, "n_key_heads": 1}
MODELS = {"three layers": THREE, "scaled, untied": {**THREE, **SCALED}, "windows in all layers": {**THREE, **ALL}}
MODELS |= {"shared keys": SHARED}
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MLPs be narrow, where the difference of the variances is larger."""
    monkeypatch.setattr(gguf_metadata_writer, "MIN_SPARSE_WIDTH", 1)


def new_model(fields: dict[str, Any]) -> GPT:
    """Return a model with random weights, so that every part affects the logits."""
    model = add_noise(GPT(MultiStreamConfig(**fields)), 0.05)
    model.token_embedding.weights.array /= 8
    return model


@each_model
def test_exported_model_round_trips(tmp_path: Path, name: str) -> None:
    model = new_model(MODELS[name])
    assert export_gguf(model, bpe_tokeniser(), tmp_path / "a.gguf") == "gemma3n"
    loaded = load(tmp_path / "a.gguf")
    # llama.cpp has a row of per-layer inputs for each token, also for those with the first one.
    n_rows = model.config.per_layer_rows
    assert differing_fields(model.config, loaded.model.config) == ["per_layer_rows"] * (n_rows == 290)
    expected = dict(loaded.model.named_parameters())
    for key, parameter in model.named_parameters():
        theirs = expected.pop(key).numpy()
        if "per_layer.embedding" in key:
            assert len(theirs) == 300 and np.all(theirs[n_rows:] == theirs[0])
            theirs = theirs[:n_rows]
        np.testing.assert_array_equal(theirs, parameter.numpy(), err_msg=key)
    assert not expected
    # BLAS may add up in another order for weights in columns
    np.testing.assert_allclose(logits(loaded.model, TOKENS), logits(model, TOKENS), 1e-4, 1e-5)
    assert loaded.tokeniser.encode("the thing") == bpe_tokeniser().encode("the thing").tolist()
    names = read_gguf_header(tmp_path / "a.gguf").tensors
    assert all(f"blk.{layer}.attn_k_norm.weight" in names for layer in range(model.config.n_layers))


@pytest.mark.slow
@each_model
def test_llama_cpp_computes_equal_logits_and_tokens(tmp_path: Path, name: str) -> None:
    """With llama.cpp's deviation of gates, and gates outside of its table of GELU in 16 bits, which is up to 10."""
    model = new_model({**MODELS[name], "hidden_size": 1024})
    for block in model.blocks:
        up, gate = block.mlp.up.weights.array, block.per_layer.gate.weights.array
        up[:, up.shape[1] // 2 :] *= 1e4
        gate *= 1e4
    export_gguf(model, bpe_tokeniser(), tmp_path / "a.gguf")
    for block in model.blocks[:10]:
        block.mlp.activation.n_deviations *= (1024 / 1023) ** 0.5
    # A relative change of the embeddings by 1e-7 changes the logits of 23 random layers by 1e-4.
    check_logits_and_tokens(model, tmp_path / "a.gguf", 3e-4 if name == "shared keys" else 1e-5)


@pytest.mark.slow
def test_quantized_files_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    model = new_model({**SHARED, "embedding_dim": 256, "hidden_size": 512, "embedding_scale": 16.0})
    check_against_llama_cpp(model, bpe_tokeniser(), tmp_path, ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q8_0", "F16"))


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "streams": ({"n_streams": 3}, "n_streams=3"),
    "rank": ({"residual_rank": 8, "per_layer_size": 16}, "per_layer_size=16, residual_rank=8|residual_rank=8, per_lay"),
    "sparsity": ({"sparsity": (0.5,) * 3}, r"sparsity=\(0\.5, 0\.5, 0\.5\)"),
    "no sparsity": ({"sparsity": ()}, r"sparsity=\(\)"),
    "shared layers": ({"n_shared_layers": 1, "full_layers": (1,)}, "n_shared_layers=1"),
    "widths by layer": ({"hidden_sizes": (96, 48, 96)}, r"hidden_sizes=\(96, 48, 96\)"),
    "layers": ({"full_layers": (1, 2)}, r"full_layers=\(1, 2\)"),
    "soft-cap": ({"logit_cap": 20.0}, r"logit_cap=20\.0"),
    "biases": ({"qkv_bias": True}, "qkv_bias=True"),
    "activation": ({"activation": "swish"}, "activation='swish'"),
    "scores": ({"score_scale": 0.5}, r"score_scale=0\.5"),
    "period": ({**SHARED, "full_layers": tuple(range(2, 23, 3))}, "pattern to be above 1, and a divisor of 20 .*got 3"),
    "no window": ({"window": 0, "full_layers": ()}, "pattern to be above 1, .*got 1"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_that_llama_cpp_computes_otherwise_are_rejected(tmp_path: Path, name: str) -> None:
    changes, pattern = UNSUPPORTED[name]
    with pytest.raises(ValueError, match=f"^export_gguf: llama.cpp cannot run this model: gemma3n.*{pattern}"):
        export_gguf(GPT(MultiStreamConfig(**{**THREE, **changes})), None, tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_narrow_mlps_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"gemma3n: .*hidden_size .*8192.*got 96"):
        export_gguf(new_model(THREE), None, tmp_path / "a.gguf")


WRONG: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "streams": ({"altup.num_inputs": 3}, {}, r"gemma3n\.altup\.num_inputs to be missing or 4, got 3"),
    "shared layers": ({"attention.shared_kv_layers": 1}, {}, "shared_kv_layers to be missing or 0, got 1"),
    "sparsity": ({"activation_sparsity_scale": [1.5, 1.5, 0.0]}, {}, "activation_sparsity_scale .*first 10 layers"),
    "one sparsity": ({"activation_sparsity_scale": 1.5}, {}, "activation_sparsity_scale .*first 10 layers"),
    "sparsity of other layers": ({"activation_sparsity_scale": [1.5]}, {}, "activation_sparsity_scale"),
    "pattern": ({"attention.sliding_window_pattern": [True, False, True]}, {}, "full attention in each 5th layer"),
    "no window": ({"attention.sliding_window": None}, {}, r"a key gemma3n\.attention\.sliding_window"),
    "two projections": ({}, {"altup_proj.weight": np.zeros((2, 64, 64))}, r"missing model\.altup_projections\.2\.w"),
    "a matrix": ({}, {"altup_proj.weight": np.zeros((64, 64))}, r"'altup_proj\.weight' of 64 matrices, got shape"),
    "rank": ({}, {"blk.1.laurel_l.weight": np.zeros((8, 64))}, r"linear_left.weight: expected shape \(64, 64\)"),
    "table": ({}, {"per_layer_token_embd.weight": np.zeros(300)}, "a matrix per_layer_token_embd"),
    "rows": ({}, {"per_layer_token_embd.weight": np.zeros((300, 700))}, r"per_layer.weight: expected shape \(300, 768"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_files_are_rejected(tmp_path: Path, name: str) -> None:
    keys, tensors, message = WRONG[name]
    export_gguf(new_model(THREE), None, tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=message):
        load(rewritten(tmp_path / "a.gguf", keys, tensors))


HF = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 22, "num_attention_heads": 4}
HF |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-3}
HF |= {"pad_token_id": None, "sliding_window": 5, "vocab_size_per_layer_input": 61, "num_kv_shared_layers": 2}


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_files_of_the_converter_load(tmp_path: Path, kind: str) -> None:
    """With the keys and values of llama.cpp's converter, and the names of tensors in the package gguf."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import gguf
    import gguf_models

    config = transformers.AutoConfig.for_model("gemma3n_text", **HF)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    randomize_weights(model)
    names, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3N, 22), {}
    state = {name: values.numpy() for name, values in model.state_dict().items() if name != "lm_head.weight"}
    for name in list(state):
        if match := re.fullmatch(r"(model\.altup\w*_projections)\.\d\.weight", name):
            state.setdefault(f"{match[1]}.weight", np.stack([state[f"{match[1]}.{i}.weight"] for i in range(3)]))
            if name.endswith(".2.weight"):
                for i in range(3):
                    del state[f"{match[1]}.{i}.weight"]
    for name, values in state.items():
        full = f"{name}.weight" if name.endswith("_scale") else name
        tensors[names.get_name(full, try_suffixes=(".weight",))] = values
    scale = [1.6448534, float("-inf")]
    keys = {
        **{"block_count": 22, "context_length": 128, "embedding_length": 24, "feed_forward_length": [40] * 22},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-3},
        **{"attention.key_length": 8, "attention.value_length": 8, "rope.freq_base": 1e6},
        **{"attention.sliding_window": 5, "altup.active_idx": 0, "altup.num_inputs": 4},
        **{"embedding_length_per_layer_input": 256, "attention.shared_kv_layers": 2},
        "activation_sparsity_scale": [scale[0]] * 10 + [scale[1]] * 12,
        "attention.sliding_window_pattern": [(layer + 1) % 5 > 0 for layer in range(22)],
    }
    path = gguf_models.write(tmp_path / "a.gguf", "gemma3n", keys, tensors, kind)
    ids = TOKENS % 61
    tolerance = 1e-4 if kind == "F32" else 0.2
    assert difference(load(path, "float32").model(ids).array, hf_logits(model, ids)) < tolerance
    assert read_gguf(path).fields["num_kv_shared_layers"] == 2
