"""Qwen3-Next as GGUF: transformers' weights by llama.cpp's names, adapters, quantized blocks, and rejected files.

Round trips, llama.cpp's logits and its formats are compared in test_gguf_writer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gguf_writer import QWEN3_NEXT, TOKENS, bpe_tokeniser, lively, logits, new_model, open_llama_cpp, rewritten
from tiny_models import enliven_adapter
from transformers_families import checkpoint_arrays, difference, hf_logits, randomize_weights

from tricycle.finetuning.lora import LoRAConfig
from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.adapters import load_adapter, new_adapter, save_gguf_adapter
from tricycle.pretrained.gguf import read_gguf
from tricycle.pretrained.gguf_file import read_gguf_header
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.state_spaces.delta_net import DeltaNetConfig

gguf = pytest.importorskip("gguf")

HF: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 24}
HF |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
HF |= {"linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HF |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
HF |= {"tie_word_embeddings": False, "linear_conv_kernel_dim": 3}


@pytest.fixture(scope="module")
def hf_model() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("qwen3_next", **HF)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **eager).float().eval()
    randomize_weights(model)
    return model


def converted(hf_model: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a model as llama.cpp's converter writes them, with the names of its package."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3NEXT, HF["num_hidden_layers"])
    arrays, tensors = checkpoint_arrays(hf_model), {}
    for key in [key for key in arrays if ".experts.0." in key]:
        experts = [arrays.pop(key.replace(".experts.0.", f".experts.{i}.")) for i in range(HF["num_experts"])]
        arrays[key.replace(".experts.0.", ".experts.")] = np.stack(experts)
    for key, values in arrays.items():
        if key.endswith("in_proj_qkvz.weight"):  # by key head: its query, its key, and the values and gates of 3 heads
            parts = np.split(values.reshape(2, 64, -1), [8, 16, 40], axis=1)
            q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
            layer = f"blk.{key.split('.')[2]}"
            tensors |= {f"{layer}.attn_qkv.weight": np.concatenate([q, k, v]), f"{layer}.attn_gate.weight": z}
            continue
        if key.endswith("norm.weight") and "linear_attn" not in key:
            values = values + 1
        values = -np.exp(values) if key.endswith("A_log") else values
        name = names.get_name(key.replace("dt_bias", "dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        assert name, key
        tensors[name] = values.squeeze()
    return tensors


@pytest.mark.slow
def test_tensors_are_those_of_llama_cpps_converter(hf_model: Any, tmp_path: Path) -> None:
    """A written file has the names and values of the converter, and a converted file is read."""
    hf_model.save_pretrained(tmp_path / "folder")
    model, expected = load(tmp_path / "folder").model, converted(hf_model)
    assert export_gguf(model, None, tmp_path / "a.gguf") == "qwen3next"
    file = read_gguf_header(tmp_path / "a.gguf")
    assert set(file.tensors) == set(expected)
    for name, info in file.tensors.items():
        np.testing.assert_allclose(file.read(info), expected[name], rtol=3e-7, atol=3e-7, err_msg=name)
    back = load(rewritten(tmp_path / "a.gguf", {}, expected)).model
    assert difference(logits(back, TOKENS), logits(model, TOKENS)) < 1e-5
    assert difference(logits(back, TOKENS), hf_logits(hf_model, TOKENS)) < 2e-4  # test_delta_net compares in float64
    metadata = {key.removeprefix("qwen3next."): value for key, value in file.metadata.items()}
    assert metadata["full_attention_interval"] == 4 and metadata["rope.dimension_count"] == 4
    sizes = {"state_size": 8, "group_count": 2, "time_step_rank": 6, "inner_size": 48, "conv_kernel": 3}
    assert {name: metadata[f"ssm.{name}"] for name in sizes} == sizes
    assert metadata["expert_shared_feed_forward_length"] == 40 and metadata["expert_feed_forward_length"] == 24


def test_other_layers_with_attention_are_a_list(tmp_path: Path) -> None:
    export_gguf(new_model("qwen3next, tied, other layers, yarn"), None, tmp_path / "a.gguf")
    metadata = read_gguf_header(tmp_path / "a.gguf").metadata
    assert metadata["qwen3next.attention.recurrent_layers"] == [True, False, False, True]
    assert "qwen3next.full_attention_interval" not in metadata


def test_quantized_blocks_of_linear_attention_stay_as_they_are(tmp_path: Path) -> None:
    sizes = {"embedding_dim": 256, "n_layers": 2, "attention_layers": (1,)}
    model = lively(GPT(DeltaNetConfig(**{**QWEN3_NEXT, **sizes})))
    export_gguf(model, None, tmp_path / "a.gguf", "Q4_K_M")
    stored, exact = (load(tmp_path / "a.gguf", weights).model for weights in ("stored", "exact"))
    blocks = stored.blocks[0].attention.input.weights.array
    assert isinstance(blocks, BlockMatrix)
    np.testing.assert_array_equal(np.asarray(blocks), exact.blocks[0].attention.input.weights.numpy())


def test_adapters_of_a_file_round_trip(tmp_path: Path) -> None:
    export_gguf(new_model("qwen3next"), None, tmp_path / "base.gguf")
    loaded = load(tmp_path / "base.gguf")
    before = logits(loaded.model, TOKENS)
    targets = ("q_proj", "in_proj_qkv", "in_proj_z", "in_proj_ba", "out_proj", "shared_expert_gate")
    adapter = enliven_adapter(new_adapter(loaded, LoRAConfig(rank=2, targets=targets)))
    expected = logits(loaded.model, TOKENS)
    assert difference(expected, before) > 0.01
    assert save_gguf_adapter(adapter, loaded, tmp_path / "adapter.gguf") == "qwen3next"
    adapter.detach()
    load_adapter(loaded, tmp_path / "adapter.gguf")
    np.testing.assert_array_equal(logits(loaded.model, TOKENS), expected)


@pytest.mark.parametrize("in_llama_cpp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_that_predict_further_tokens_are_ignored(tmp_path: Path, in_llama_cpp: bool) -> None:
    export_gguf(new_model("qwen3next"), bpe_tokeniser(), tmp_path / "a.gguf")
    file = read_gguf_header(tmp_path / "a.gguf")
    further = {
        name.replace("blk.3.", "blk.4."): file.read(file.tensors[name]) for name in file.tensors if ".3." in name
    }
    further |= {f"blk.4.nextn.{name}.weight": np.ones(64, np.float32) for name in ("enorm", "hnorm")}
    further["blk.4.nextn.eh_proj.weight"] = np.ones((64, 128), np.float32)
    keys = {"block_count": 5, "nextn_predict_layers": 1}
    path = rewritten(tmp_path / "a.gguf", keys, further, with_tokenizer=True)
    expected = logits(load(tmp_path / "a.gguf").model, TOKENS)
    np.testing.assert_array_equal(logits(load(path).model, TOKENS), expected)
    if in_llama_cpp:
        theirs = open_llama_cpp(path, logits_all=True)
        theirs.eval(TOKENS[0].tolist())
        assert difference(theirs.scores[: len(expected[0])], expected[0]) < 3e-5
        theirs.close()


# -------------------------------------------------------------------- rejected files
WRONG_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "values of another width": ({"ssm.inner_size": 128}, r"inner_size to be that of 4 heads of .*16 channels, got 128"),
    "heads that do not divide": ({"ssm.time_step_rank": 7}, "inner_size to be a multiple of the 7 heads, got 64"),
    "no key heads": ({"ssm.group_count": None}, r"expected a key qwen3next\.ssm\.group_count, which is missing"),
    "no kernel": ({"ssm.conv_kernel": 0}, r"ssm\.conv_kernel to be a whole number above 0"),
    "another eps": ({"attention.layer_norm_rms_epsilon": 1e-5}, "epsilon to be 1e-06, that of norms of keys, got"),
    "a scale of scores": ({"attention.scale": 0.5}, r"attention\.scale to be missing or 0\.0, got 0\.5"),
    "only layers of further tokens": ({"nextn_predict_layers": 4}, "to be below block_count, 4, got 4"),
    "attention everywhere": ({"full_attention_interval": 1}, "some layers with full attention and some with linear"),
    "linear attention everywhere": ({"full_attention_interval": 5}, "some layers with full attention and some with"),
    "no interval": ({"full_attention_interval": 0}, "full_attention_interval to be a whole number above 0"),
    "kinds of two layers": ({"attention.recurrent_layers": [True, False]}, "4 times true or false, got"),
    "scaled experts": ({"expert_weights_scale": 2.5}, r"expert_weights_scale to be missing or 1\.0, got 2\.5"),
    "no active experts": ({"expert_used_count": None}, "expert_used_count, which is missing"),
}


@pytest.mark.parametrize(("keys", "message"), WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_invalid_metadata_is_rejected(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    export_gguf(new_model("qwen3next"), None, tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf(rewritten(tmp_path / "a.gguf", keys))
    assert str(caught.value).startswith(f"{tmp_path / 'b.gguf'}: ") and "\n" not in str(caught.value)


WRONG_TENSORS: dict[str, tuple[dict[str, Any], str, str]] = {
    "other layers": ({"full_attention_interval": 2}, "", r"missing .*self_attn\.q_proj"),
    "another kernel": ({"ssm.conv_kernel": 3}, "", r"conv1d\.weight: expected shape \(128, 1, 3\), got \(128, 1, 4\)"),
    "too wide a kernel": ({"ssm.conv_kernel": 2**30}, "", "at least .* parameters"),
    "other key heads": ({"ssm.group_count": 1}, "", r"in_proj_qkv\.weight: expected shape \(96, 64\), got \(128, 64\)"),
    "biases of attention": ({}, "blk.3.attn_q.bias", r"unexpected .*q_proj\.bias"),
    "the matrix of older files": ({}, "blk.0.ssm_in.weight", r"'blk\.0\.ssm_in\.weight' is unknown"),
    "the shared expert's width": (
        {"expert_shared_feed_forward_length": None},
        "",
        r"shared_expert\..*_proj\.weight: expected shape",
    ),
}


@pytest.mark.parametrize(("keys", "tensor", "message"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_rejected(tmp_path: Path, keys: dict[str, Any], tensor: str, message: str) -> None:
    export_gguf(new_model("qwen3next"), None, tmp_path / "a.gguf")
    path = rewritten(tmp_path / "a.gguf", keys, {tensor: np.zeros(192, np.float32)} if tensor else {})
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
