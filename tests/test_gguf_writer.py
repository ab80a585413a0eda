"""Export to GGUF: round trips, reading by transformers and llama.cpp, and rejected models."""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import add_noise, smollm2_file, write_pooling
from transformers_families import LIKE_LLAMA

from tricycle.configs import EncoderConfig, ModelConfig
from tricycle.configs.encoder_decoder import EncoderDecoderConfig
from tricycle.configs.mamba import MambaConfig
from tricycle.decoding.encoder_decoder import generate_target
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS, dequantize_blocks
from tricycle.latent_attention import LatentConfig
from tricycle.models import GPT
from tricycle.pretrained import Pretrained, load, tokenizer_json
from tricycle.pretrained.adapters import new_adapter
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.export import NEUTRAL_FIELDS, export_folder
from tricycle.pretrained.generation_settings import GenerationSettings
from tricycle.pretrained.ggml_quantization import quantize_blocks
from tricycle.pretrained.gguf import GGUFModel, read_gguf
from tricycle.pretrained.gguf_file import read_gguf_header
from tricycle.pretrained.gguf_file_types import FILE_TYPES, Mixture
from tricycle.pretrained.gguf_tokenizer_reader import GGUFTokenizer
from tricycle.pretrained.gguf_tokenizer_writer import _unigrams
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.pretrained.importance import measure_importance
from tricycle.pretrained.sentence_encoder import SentenceEncoder, load_sentence_encoder, source_pooling
from tricycle.pretrained.tokenisers import PretrainedTokeniser
from tricycle.pretrained.tokenizer_json import metaspace, unigram_parts
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.sequences.text_encoder import SentencePooling, TextEncoder
from tricycle.state_spaces.delta_net import DeltaNetConfig
from tricycle.tensor import no_grad
from tricycle.tokeniser import BPETokeniser
from tricycle.weights import set_memory_order
from tricycle_cli.export import main as export_main

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

VOCABULARY = 300
GPT2 = {"vocab_size": VOCABULARY, "context_window": 64, "embedding_dim": 64, "n_layers": 2, "n_heads": 4}
LLAMA = {**GPT2, **LIKE_LLAMA, "hidden_size": 96, "n_key_heads": 2}
QK_NORM = {"qk_norm": True, "qk_norm_gain": True, "qk_norm_eps": 1e-5, "norm_eps": 1e-5}
OLMO2 = {**LLAMA, **QK_NORM, "qk_norm_per_head": False, "norm_placement": "output", "tied": False}
GEMMA = {**LLAMA, "norm_unit_offset": True, "norm_placement": "both", "activation": "gelu", "embedding_scale": 8.0}
GEMMA |= {"head_size": 24, "n_layers": 4, "window": 8}
GEMMA2 = {**GEMMA, "full_layers": (1, 3), "score_cap": 1.5, "logit_cap": 20.0}
GEMMA3 = {**GEMMA, **QK_NORM, "full_layers": (2,), "rotary_base": 1e6, "rotary_local_base": 1e4}
NEOX = {**GPT2, "positions": "rotary", "rotary_fraction": 0.3, "activation": "gelu_exact", "tied": False}
PHI = {**GPT2, "positions": "rotary", "rotary_fraction": 0.5, "parallel": True, "shared_norm": True, "tied": False}
PHI3 = {**LLAMA, "rotary_scaling": "longrope", "rotary_original_window": 4, "rotary_attention_factor": 1.25}
PHI3 |= {"rotary_fraction": 0.75, "rotary_divisors": (*(1, 1.25, 1.5, 2, 2.5, 3), *(2, 4, 6, 8, 10, 12))}
STABLELM = {**PHI, "activation": "swish", "gated": True, "hidden_size": 96, "n_key_heads": 2}
STABLELM |= dict.fromkeys(("output_bias", "mlp_bias"), False)
FALCON = {**PHI, "rotary_fraction": 1.0, "activation": "gelu_exact", "n_key_heads": 1, "tied": True}
FALCON |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False)
LLAMA_3 = {"rotary_scaling": "llama3", "rotary_factor": 8.0, "rotary_original_window": 32, "rotary_base": 1000.0}
YARN = {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_window": 16, "rotary_base": 100.0}
YARN |= {"rotary_low_frequency": 1.0, "rotary_high_frequency": 32.0}
YARN |= {"rotary_attention_factor": 1.25 * (1 + 0.1 * np.log(4.0))}
MIXTURE = {**LLAMA, "n_experts": 6, "n_active_experts": 2, "router_loss": 0.02, "tied": False}
GPT_OSS = {**MIXTURE, **YARN, "activation": "clamped_swiglu", "gated": False, "softmax": "sink", "bias": True}
GPT_OSS |= {"router_bias": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
GPT_OSS |= {"head_size": 24, "window": 8, "full_layers": (1,)}
GRANITE = {"embedding_scale": 6.0, "residual_scale": 0.25, "score_scale": 0.2, "logit_scale": 0.125}
UNNORMALIZED = {**MIXTURE, **QK_NORM, "normalize_experts": False, "qk_norm_per_head": False}
DEEPSEEK = {**GPT2, "n_layers": 3, "hidden_size": 96, "latent_size": 24, "rotary_size": 8, "head_size": 16}
DEEPSEEK |= {"value_size": 12, "n_experts": 6, "n_active_experts": 2, "expert_size": 32}
DEEPSEEK_V3 = {**DEEPSEEK, "query_rank": 20, "sigmoid_router": True, "normalize_experts": True, "expert_scale": 2.5}
DEEPSEEK_V3 |= {"n_groups": 3, "n_active_groups": 2, "n_dense_layers": 2, "tied": False}
MAMBA = {**GPT2, "n_layers": 3, "state_size": 16, "n_groups": 2, "chunk_size": 8, "tied": False}
MAMBA |= {"context_window": 2**20, "n_heads": 8, "head_size": 16}
HYBRID = {**LLAMA, **GRANITE, "n_layers": 3, "state_size": 16, "n_groups": 2, "chunk_size": 8, "attention_layers": (1,)}
HYBRID |= {"n_mamba_heads": 8, "mamba_head_size": 16, "head_size": 0, "mamba_mlp": True, "positions": "none"}
HYBRID_MIXTURE = {**HYBRID, "n_experts": 6, "n_active_experts": 2, "shared_size": 48, "attention_layers": (0, 2)}
QWEN3_NEXT = {**MIXTURE, **QK_NORM, **dict.fromkeys(("norm_eps", "qk_norm_eps"), 1e-6), "norm_unit_offset": True}
QWEN3_NEXT |= {"n_layers": 4, "head_size": 24, "rotary_fraction": 0.5, "attention_layers": (3,), "shared_size": 48}
QWEN3_NEXT |= {"n_linear_heads": 4, "n_linear_key_heads": 2, "linear_head_size": 16, "linear_key_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama, as swiglu": ("llama", {**LLAMA, "activation": "swiglu", "gated": False}),
    "llama, untied, other base and eps": ("llama", {**LLAMA, "tied": False, "rotary_base": 5e5, "norm_eps": 1e-6}),
    "llama, wide heads": ("llama", {**LLAMA, "head_size": 24, "n_key_heads": 1}),
    "llama, biases": ("llama", {**LLAMA, "qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    "llama, biases of some": ("llama", {**LLAMA, "output_bias": True}),
    "llama, linear": ("llama", {**LLAMA, "rotary_scaling": "linear", "rotary_factor": 4.0}),
    "llama, yarn": ("llama", {**LLAMA, **YARN}),
    "llama 3": ("llama", {**LLAMA, "embedding_dim": 128, **LLAMA_3}),
    "qwen2": ("qwen2", {**LLAMA, "qkv_bias": True, "rotary_scaling": "linear", "rotary_factor": 2.0}),
    "qwen2, untied": ("qwen2", {**LLAMA, "qkv_bias": True, "tied": False}),
    "qwen2 with wide heads": ("llama", {**LLAMA, "qkv_bias": True, "head_size": 24}),
    "qwen3": ("qwen3", {**LLAMA, **QK_NORM, "head_size": 24}),
    "qwen3, norms without gains": ("qwen3", {**LLAMA, **QK_NORM, "qk_norm_gain": False}),
    "mixtral": ("llama", MIXTURE),
    "qwen3moe": ("qwen3moe", {**MIXTURE, **QK_NORM, "head_size": 24}),
    "olmoe": ("olmoe", {**UNNORMALIZED, "n_key_heads": 4}),
    "granitemoe": ("granitemoe", {**MIXTURE, **GRANITE, "tied": True}),
    "gpt-oss": ("gpt-oss", GPT_OSS),
    "gpt-oss, other layers": ("gpt-oss", {**GPT_OSS, "rotary_scaling": "none", "n_layers": 3}),
    "smollm3": ("smollm3", {**LLAMA, "n_layers": 5, "unrotated_layers": (3,), **YARN}),
    "smollm3, untied": ("smollm3", {**LLAMA, "n_layers": 9, "unrotated_layers": (3, 7), "tied": False}),
    "olmo2": ("olmo2", OLMO2),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2, linear": ("gemma2", {**GEMMA2, "rotary_scaling": "linear", "rotary_factor": 3.0}),
    "gemma3": ("gemma3", {**GEMMA3, "rotary_scaling": "linear", "rotary_factor": 8.0}),
    "gemma3, capped, untied": ("gemma3", {**GEMMA3, "logit_cap": 20.0, "tied": False}),
    "gemma3, windows in all layers": ("gemma3", {**GEMMA3, "full_layers": ()}),
    "gemma3, no window": ("gemma3", {**GEMMA3, "full_layers": (), "window": 0}),
    "gemma3, windows in no layer": ("gemma3", {**GEMMA3, "full_layers": (0, 1, 2, 3)}),
    "gptneox": ("gptneox", {**NEOX, "parallel": True}),
    "falcon": ("falcon", FALCON),
    "falcon, two norms": ("falcon", {**FALCON, "shared_norm": False, "n_key_heads": 2, "tied": False, **YARN}),
    "phi3": ("phi3", PHI3),
    "phi3, short texts": ("phi3", {**PHI3, "rotary_original_window": 512, "context_window": 1024}),
    "phi3, untied": ("phi3", {**LLAMA, "rotary_fraction": 0.5, "tied": False}),
    "stablelm": ("stablelm", {**STABLELM, "parallel": False, "shared_norm": False}),
    "stablelm, parallel": ("stablelm", {**STABLELM, "qkv_bias": False, **YARN}),
    "gptneox, yarn": ("gptneox", {**NEOX, **YARN}),
    "gptneox, one after the other": ("gptneox", {**NEOX, "qkv_bias": False, "output_bias": False}),
    "phi2": ("phi2", {**PHI, "head_bias": True}),
    "phi2, fewer keys, no biases": ("phi2", {**PHI, "n_key_heads": 2, "bias": False}),
    "gpt2": ("gpt2", GPT2),
    "gpt2, untied, without biases": ("gpt2", {**GPT2, "tied": False, "qkv_bias": False, "output_bias": False}),
    "deepseek2": ("deepseek2", {**DEEPSEEK, **YARN, "rotary_attention_factor": 1.0, "yarn_mscale": 0.707}),
    "deepseek2, groups of experts": ("deepseek2", DEEPSEEK_V3),
    "deepseek2, no dense layer": (
        "deepseek2",
        {**DEEPSEEK_V3, "n_dense_layers": 0, "n_groups": 1, "n_active_groups": 1},
    ),
    "deepseek2, 27 layers": ("deepseek2", {**DEEPSEEK, "n_layers": 27, "n_experts": 2, "n_dense_layers": 25}),
    "deepseek2, dense": ("deepseek2", {**DEEPSEEK, "n_dense_layers": 3}),
    "mamba2": ("mamba2", MAMBA),
    "mamba2, tied, wide, one group, no bias": (
        "mamba2",
        {**MAMBA, "tied": True, "n_heads": 12, "n_groups": 1, "conv_width": 3, "conv_bias": False},
    ),
    "granitehybrid": ("granitehybrid", HYBRID),
    "granitehybrid, rotary, biases": (
        "granitehybrid",
        {**HYBRID, **YARN, "positions": "rotary", "qkv_bias": True, "output_bias": True, "tied": False},
    ),
    "granitehybrid, experts": ("granitehybrid", HYBRID_MIXTURE),
    "qwen3next": ("qwen3next", QWEN3_NEXT),
    "qwen3next, tied, other layers, yarn": (
        "qwen3next",
        {**QWEN3_NEXT, **YARN, "tied": True, "attention_layers": (1, 2), "conv_width": 3, "n_linear_heads": 6},
    ),
    "granitehybrid, as the preset mamba": (
        "granitehybrid",
        {**HYBRID, "positions": "rotary", "head_size": 24, "mamba_mlp": False},
    ),
    "granite, wide heads": ("granite", {**LLAMA, **GRANITE, "head_size": 32}),
    "gpt2, narrow": ("gpt2", {**GPT2, "embedding_dim": 48, "hidden_size": 100, "n_heads": 3}),
}
each_model = pytest.mark.parametrize("name", MODELS)
TEXTS = ("the thing in the wind", " sing\n\n  12345 don't", "Grüße, 世界 🙂", "", "the<|endoftext|>thing")


def new_model(name: str) -> GPT:
    fields = MODELS[name][1]
    kinds = {"latent_size": LatentConfig, "state_size": MambaConfig, "n_linear_heads": DeltaNetConfig}
    kind: Any = next((kind for field, kind in kinds.items() if field in fields), ModelConfig)
    return lively(GPT(kind(**fields)))


def lively(model: Any) -> Any:
    """Return the model with random weights, so that every part affects the logits."""
    model = add_noise(model, 0.15)
    # Embeddings that are scaled up hide what the blocks add to them.
    model.token_embedding.weights.array /= np.float32(model.config.embedding_scale)
    return model


def bpe_tokeniser(split: str = "gpt2") -> BPETokeniser:
    words = [b"th", b"the", b" the", b"in", b"ing", b" w", b"12"]
    return BPETokeniser.from_tokens([bytes([value]) for value in range(256)] + words, split)


def logits(model: GPT, tokens: np.ndarray) -> np.ndarray:
    with no_grad():
        return model(tokens).numpy()


TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (2, 40))


# -------------------------------------------------------------------- round trips
@pytest.mark.nightly_except(2)
@each_model
def test_exported_model_round_trips(tmp_path, name):
    architecture, _ = MODELS[name]
    model = new_model(name)
    assert export_gguf(model, bpe_tokeniser(), tmp_path / "a.gguf") == architecture
    assert read_gguf_header(tmp_path / "a.gguf").metadata["general.architecture"] == architecture
    back = load(tmp_path / "a.gguf").model
    # An architecture has biases or MLPs in all layers of a kind: those that the model lacks are 0, and gains 1.
    assert set(differing_fields(model.config, back.config)) <= set(NEUTRAL_FIELDS)
    # 1 + gain, or the exponential of a rate, and back
    rounding = 3e-7 if architecture.startswith(("gemma", "mamba", "granitehybrid", "qwen3next")) else 0
    expected = dict(back.named_parameters())
    for key, parameter in model.named_parameters():
        np.testing.assert_allclose(expected.pop(key).numpy(), parameter.numpy(), rtol=0, atol=rounding, err_msg=key)
    for key, extra in expected.items():
        assert np.all(extra.numpy() == (0 if "bias" in key or extra.ndim == 2 else 1)), key
    set_memory_order(back, "C")  # sums are made in the order in which matrices lie
    if name != "llama 3" and not rounding:
        np.testing.assert_array_equal(logits(back, TOKENS), logits(model, TOKENS))
    np.testing.assert_allclose(logits(back, TOKENS), logits(model, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("window", [16, 64, 8192])
@pytest.mark.parametrize("factor", [2.0, 8.0, 32.0])
def test_llama3_scaling_of_small_heads_round_trips(tmp_path, factor, window):
    """At most one of the eight pairs of channels is between the frequency bounds."""
    scaling = {"rotary_scaling": "llama3", "rotary_factor": factor, "rotary_original_window": window}
    model = lively(GPT(ModelConfig(**{**LLAMA, **scaling})))
    export_gguf(model, None, tmp_path / "a.gguf")
    back = load(tmp_path / "a.gguf").model
    np.testing.assert_allclose(logits(back, TOKENS), logits(model, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.nightly_except(5)
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@each_model
def test_f16_and_q8_0_export_round_matrices_once(tmp_path, name, kind):
    """Matrices are rounded once; norms, biases and positions are unchanged."""
    model = new_model(name)
    for bits in ("F32", kind):
        export_gguf(model, None, tmp_path / f"{bits}.gguf", bits)
    exact = read_gguf(tmp_path / "F32.gguf").tensors
    for key, tensor in read_gguf(tmp_path / f"{kind}.gguf").tensors.items():
        values = exact[key].read()
        # Lies transposed in the file, and is rounded along its rows there.
        conv = MODELS[name][0] == "gpt2" and "transformer.h" in key
        if (
            values.ndim == 1
            or "wpe" in key
            or "conv1d" in key
            or re.search(r"\.(gate|shared_expert_gate|router|router\.layer)\.weight$", key)
        ):
            expected, expected_kind = values, "F32"
        elif kind == "F16" or tensor.shape[:: -1 if conv else 1][-1] % 32:
            expected, expected_kind = values.astype(np.float16), "F16"
        else:
            rows = np.ascontiguousarray(values.T if conv else values)
            expected, expected_kind = dequantize_blocks(quantize_blocks(rows, "Q8_0"), "Q8_0"), "Q8_0"
            expected = expected.T if conv else expected
        assert tensor.dtype_name == expected_kind, key
        # rows of queries and keys change places as wholes, so that rounding does not see it
        np.testing.assert_array_equal(tensor.read(), expected, err_msg=key)
    back = load(tmp_path / f"{kind}.gguf").model
    largest = np.median if model.config.n_experts else np.max  # rounding may select other experts
    difference = largest(np.abs(logits(back, TOKENS) - logits(model, TOKENS)))
    assert 0 < difference < {"F16": 0.02, "Q8_0": 0.2}[kind] * np.abs(logits(model, TOKENS)).max()


# -------------------------------------------------------------------- models with a state
WRONG_STATES: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads that do not divide": ("mamba2", {"ssm.time_step_rank": 7}, r"mamba2\.ssm\.inner_size .*7 heads, got 128"),
    "no groups": ("mamba2", {"ssm.group_count": None}, r"a key mamba2\.ssm\.group_count"),
    "other groups": ("mamba2", {"ssm.group_count": 4}, r"in_proj\.weight: expected shape \(392, 64\)"),
    "too wide a kernel": ("mamba2", {"ssm.conv_kernel": 2**30}, "at least .* parameters"),
    "too large a state": ("mamba2", {"ssm.state_size": 2**30}, "at least .* parameters"),
    "too many layers": ("mamba2", {"block_count": 2**30}, r"block_count is 1073741824, but the tensors have 3"),
    "layers with attention": ("granitehybrid", {"attention.head_count_kv": [2]}, "to have 3 values, got 1"),
    "attention everywhere": ("granitehybrid", {"attention.head_count_kv": 2}, "some layers with attention"),
    "other key heads": ("granitehybrid", {"attention.head_count_kv": [0, 3, 0]}, "4 query heads and 3 key heads"),
    "not twice the width": ("granitehybrid", {"ssm.inner_size": 192}, "twice the width, 128, got 192"),
    "no width of the shared MLP": (
        "granitehybrid, experts",
        {"expert_shared_feed_forward_length": None},
        r"a key granitehybrid\.expert_shared_feed_forward_length",
    ),
}


def rewritten(
    path: Path,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    with_tokenizer: bool = False,
) -> Path:
    """Write a file with other metadata (None removes a key) and tensors beside the file, and return its path."""
    import gguf_models

    file = read_gguf_header(path)
    architecture = file.metadata["general.architecture"]
    values = {name: file.read(info) for name, info in file.tensors.items()}
    prefixes = (architecture, "tokenizer") if with_tokenizer else architecture
    old = {name: value for name, value in file.metadata.items() if name.startswith(prefixes)}
    new = old | {f"{architecture}.{name}": value for name, value in (keys or {}).items()}
    metadata = {f":{name}": value for name, value in new.items() if value is not None}
    return gguf_models.write(path.with_name("b.gguf"), architecture, metadata, values | (tensors or {}))


@pytest.mark.parametrize(("name", "keys", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_invalid_metadata_of_states_is_rejected(tmp_path, name, keys, message):
    export_gguf(new_model(name), None, tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=message):
        load(rewritten(tmp_path / "a.gguf", keys))


@pytest.mark.parametrize("rate", [0.0, 0.5, -np.inf, np.nan])
def test_rates_of_decay_are_negative(tmp_path, rate):
    export_gguf(new_model("mamba2"), None, tmp_path / "a.gguf")
    rates = np.full((8, 1), -1, np.float32)
    load(rewritten(tmp_path / "a.gguf", tensors={"blk.1.ssm_a": rates}))
    rates[3] = rate
    with pytest.raises(ValueError, match=r"ssm_a.*finite.*below 0"):
        load(rewritten(tmp_path / "a.gguf", tensors={"blk.1.ssm_a": rates}))


# -------------------------------------------------------------------- quantized files
WIDE: dict[str, Any] = {"embedding_dim": 256, "hidden_size": 512, "n_layers": 4}  # whole blocks of 256 values
LOGIT_ERRORS = {"Q4": 0.5, "Q5": 0.25, "Q6": 0.13, "Q8": 0.04, "F1": 2e-3, "BF": 0.02, "F3": 1e-5}


def wide_model(base: dict[str, Any] = LLAMA) -> GPT:
    """Return a model with initialized weights and random biases and gains."""
    return add_noise(GPT(ModelConfig(**{**base, **WIDE})), 0.05)


def relative_error(values: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(values - expected) / np.linalg.norm(expected))


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_files_of_each_type_load(tmp_path, file_type):
    model = wide_model()
    export_gguf(model, None, tmp_path / "a.gguf", file_type)
    header = read_gguf_header(tmp_path / "a.gguf")
    assert header.metadata["general.file_type"] == FILE_TYPES[file_type].number
    assert header.metadata["general.quantization_version"] == 2
    mixture = Mixture(file_type, model.config)
    assert all(tensor.dtype_name == mixture.format_of(name, tensor.shape) for name, tensor in header.tensors.items())
    expected = logits(model, TOKENS)
    loaded, exact = (load(tmp_path / "a.gguf", weights).model for weights in ("float32", "exact"))
    assert relative_error(logits(loaded, TOKENS), expected) < LOGIT_ERRORS[file_type[:2]]
    assert relative_error(logits(exact, TOKENS), logits(loaded, TOKENS)) < 1e-5


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("base", [LLAMA, {**LLAMA, "tied": False}, GPT2], ids=["llama", "untied", "gpt2"])
def test_importance_is_that_of_the_inputs_of_each_matrix(tmp_path, base):
    model = wide_model(base)
    importance = measure_importance(model, np.random.default_rng(2).integers(0, VOCABULARY, 600))
    for name in importance:  # differences between channels, as in trained models
        importance[name] *= np.random.default_rng(len(name)).gamma(0.3, 1, importance[name].shape)
    files = tmp_path / "a.gguf", tmp_path / "b.gguf"
    export_gguf(model, None, files[0], "F32")
    export_gguf(model, None, files[1], "Q4_K_M", importance)
    values, blocks = map(read_gguf_header, files)
    by_suffix = {
        "attn_qkv": "attention.qkv",
        "attn_q": "attention.qkv",
        "attn_k": "attention.qkv",
        "attn_v": "attention.qkv",
        "attn_output": "attention.projection",
        "ffn_up": "mlp.up",
        "ffn_gate": "mlp.up",
        "ffn_down": "mlp.projection",
    }
    output = "token_embd" if base.get("tied", True) else "output"
    for name, info in values.tensors.items():
        stored = blocks.tensors[name]
        if stored.dtype_name not in BLOCK_FORMATS:
            continue
        _, number, layer, _ = name.split(".") if name.startswith("blk") else ("", "", name.split(".")[0], "")
        if number:
            vector = importance[f"blocks.{number}.{by_suffix[layer]}.weights"]
        elif layer == output:
            vector = importance["token_embedding.weights" if output == "token_embd" else "head.weights"]
        else:
            vector = None  # the rows of an embedding are looked up
        packed = blocks.read_blocks(stored, slice(None)).packed
        expected = quantize_blocks(values.read(info, slice(None)), stored.dtype_name, vector)
        np.testing.assert_array_equal(packed.reshape(expected.shape), expected, err_msg=name)


def test_values_too_large_for_blocks_name_the_tensor(tmp_path):
    model = wide_model()
    model.blocks[0].mlp.projection.weights.array[3, 4] = 1e12
    with pytest.raises(ValueError, match=r"^export_gguf: blk\.0\.ffn_down\.weight: .*range of Q6_K.*1e\+?12|9{3}"):
        export_gguf(model, None, tmp_path / "a.gguf", "Q4_K_M")
    model.blocks[0].mlp.projection.weights.array[3, 4] = 3.4e38
    with pytest.raises(ValueError, match=r"range of BF16, blk\.0\.ffn_down\.weight"):
        export_gguf(model, None, tmp_path / "a.gguf", "BF16")
    assert not list(tmp_path.iterdir())


# What transformers looks for in such files: no scaled angles, no biases of attention in a llama, no GPT-2 of another
# window than 1024 tokens or another width of its MLPs.
READ_BY_TRANSFORMERS = {
    **{name: MODELS[name][1] for name in ("llama", "llama, as swiglu", "llama, untied, other base and eps")},
    "gpt2": {**GPT2, "context_window": 1024},
    "gpt2, untied": {**GPT2, "context_window": 1024, "tied": False},
}


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_exported_files(tmp_path, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = lively(GPT(ModelConfig(**READ_BY_TRANSFORMERS[name])))
    export_gguf(model, bpe_tokeniser(), tmp_path / "a.gguf")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="a.gguf", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = hf_model(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(model, TOKENS), expected, rtol=0, atol=1e-4)


def test_export_replaces_the_file_atomically(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"what was there")
    model = new_model("llama")
    next(iter(model.parameters())).array[0, 0] = np.nan
    with pytest.raises(ValueError, match=r"finite weights.*token_embedding\.weights.*NaN"):
        export_gguf(model, bpe_tokeniser(), path)
    next(iter(model.parameters())).array[0, 0] = 70_000
    with pytest.raises(ValueError, match=r"F16.*token_embd.weight"):
        export_gguf(model, bpe_tokeniser(), path, "F16")
    assert path.read_bytes() == b"what was there" and [entry.name for entry in tmp_path.iterdir()] == ["a.gguf"]
    export_gguf(model, bpe_tokeniser(), path)
    assert path.read_bytes()[:4] == b"GGUF" and [entry.name for entry in tmp_path.iterdir()] == ["a.gguf"]


# -------------------------------------------------------------------- encoders
BERT_WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the ##se thing in wind , ! é ##s".split()


def new_encoder(**fields: Any) -> TextEncoder:
    sizes = {"vocab_size": 20, "context_window": 32, "embedding_dim": 64, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5}
    return lively(TextEncoder(EncoderConfig(**{**sizes, **fields})))


def wordpiece() -> PretrainedTokeniser:
    vocab = {text: i for i, text in enumerate(BERT_WORDS)}
    document = tokenizer_json.wordpiece_document(vocab, True, "[CLS]", "[SEP]", "[UNK]")
    return PretrainedTokeniser(json.dumps(document), {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})


ENCODER_TEXTS = ["The thing in THE wind", "these things, in!", "", "another thing"]


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_exported_encoder_round_trips(tmp_path, pooling):
    model, tokeniser = new_encoder(bias=True), wordpiece()
    assert export_gguf(model, tokeniser, tmp_path / "a.gguf", pooling=pooling) == "bert"
    back = load_sentence_encoder(tmp_path / "a.gguf")
    assert back.model.config.token_types == 2 and back.pooling.mode == pooling
    np.testing.assert_equal(back.model.state_dict(), model.state_dict())
    expected = SentenceEncoder(model, tokeniser, SentencePooling(pooling, normalize=False)).encode(ENCODER_TEXTS)
    np.testing.assert_allclose(back.encode(ENCODER_TEXTS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_encoder_without_a_tokeniser(tmp_path, kind):
    export_gguf(new_encoder(), None, tmp_path / "a.gguf", kind)
    tensors = read_gguf(tmp_path / "a.gguf").tensors
    kinds = {name: tensor.dtype_name for name, tensor in tensors.items() if len(tensor.shape) == 2}
    f32 = {f"embeddings.{name}_embeddings.weight" for name in ("position", "token_type")}
    assert {name for name, dtype_name in kinds.items() if dtype_name == "F32"} == f32
    assert set(kinds.values()) == {"F32", kind}


@pytest.mark.parametrize(("value", "mode"), [(0, "mean"), (2, "first"), (3, None), ([1], None)])
def test_pooling_type_of_a_gguf_file(tmp_path, value, mode):
    source = GGUFModel(tmp_path, {}, {}, metadata={"general.architecture": "bert", "bert.pooling_type": value})
    if mode is not None:
        assert source_pooling(source).mode == mode
        return
    with pytest.raises(ValueError, match=r"bert\.pooling_type to be 0 or 1 or 2"):
        source_pooling(source)


def test_export_command_writes_the_pooling_of_an_encoder(tmp_path):
    export_folder(new_encoder(), wordpiece(), tmp_path / "encoder")
    write_pooling(tmp_path / "encoder", {"pooling_mode": "cls"}, ["Transformer", "Pooling"])
    export_main([str(tmp_path / "encoder"), "--gguf", str(tmp_path / "a.gguf"), "--type", "F32"])
    back, expected = load_sentence_encoder(tmp_path / "a.gguf"), load_sentence_encoder(tmp_path / "encoder")
    assert back.pooling.mode == "first"
    np.testing.assert_allclose(back.encode(ENCODER_TEXTS), expected.encode(ENCODER_TEXTS), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_llama_cpp_computes_equal_sentence_embeddings(tmp_path, pooling):
    """llama.cpp approximates GELU with tanh and a table of 16 bits."""
    model, tokeniser = new_encoder(), wordpiece()
    export_gguf(model, tokeniser, tmp_path / "a.gguf", pooling=pooling)
    theirs = open_llama_cpp(tmp_path / "a.gguf", embedding=True)
    vectors = [theirs.embed(text, normalize=True) for text in ENCODER_TEXTS]
    expected = SentenceEncoder(model, tokeniser, SentencePooling(pooling)).encode(ENCODER_TEXTS)
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-3)
    for text in ENCODER_TEXTS:
        assert theirs.tokenize(text.encode(), special=True) == tokeniser.encode(text)
    theirs.close()


# -------------------------------------------------------------------- encoder-decoders
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "context_window": 2**15, "embedding_dim": 64, "head_size": 12}
T5 |= {"n_heads": 4, "n_layers": 3, "n_decoder_layers": 2, "hidden_size": 96, "relative_buckets": 32}
T5 |= {"norm": "rms_norm", "norm_eps": 1e-6, "activation": "relu", "positions": "none", "score_scale": 1.0}
T5 |= {"bias": False, "tied": False, "start_token": 3, "relative_distance": 128}
FLAN_T5 = {**T5, "n_layers": 2, "activation": "gelu", "gated": True, "start_token": 0}
T5_MODELS = {"relu": T5, "gelu": FLAN_T5, "20 buckets": {**FLAN_T5, "relative_buckets": 20}}
each_t5 = pytest.mark.parametrize("fields", T5_MODELS.values(), ids=T5_MODELS)


def new_t5(fields: dict[str, Any], std: float = 0.15) -> EncoderDecoderTransformer:
    return add_noise(EncoderDecoderTransformer(EncoderDecoderConfig(**fields)), std)


@each_t5
def test_exported_encoder_decoder_round_trips(tmp_path, fields):
    model = new_t5(fields)
    assert export_gguf(model, bpe_tokeniser(), tmp_path / "a.gguf") == "t5"
    back = load(tmp_path / "a.gguf").model
    assert differing_fields(model.config, back.config) == []
    np.testing.assert_equal(back.state_dict(), model.state_dict())
    export_gguf(model, None, tmp_path / "b.gguf", "Q8_0")
    kinds = dtype_names(tmp_path / "b.gguf")
    assert kinds["enc.blk.0.attn_q.weight"] == "Q8_0" and kinds["dec.blk.0.attn_rel_b.weight"] == "F32"


def test_encoder_decoder_files_with_other_tensors(tmp_path):
    """The number of decoder layers may be missing, and tied files have no output matrix."""
    export_gguf(new_t5(FLAN_T5), None, tmp_path / "a.gguf")
    file = read_gguf_header(tmp_path / "a.gguf")
    keys = {f":{name}": value for name, value in file.metadata.items() if name != "general.architecture"}
    tensors = {name: np.array(file.read(info)) for name, info in file.tensors.items()}
    del keys[":t5.decoder_block_count"], tensors["output.weight"]
    tensors["dec.blk.0.cross_attn_rel_b.weight"] = np.zeros((32, 4), np.float32)  # which no computation uses
    gguf_models = pytest.importorskip("gguf_models")
    loaded = load(gguf_models.write(tmp_path / "b.gguf", "t5", keys, tensors))
    assert loaded.model.config.tied and loaded.model.config.output_scale == 64**-0.5
    for key, value, pattern in (
        ("decoder_block_count", 1, "decoder_block_count is 1, but the tensors have 2"),
        ("block_count", 9, "block_count is 9, but the tensors have 2"),
        ("feed_forward_length", 95, "feed_forward_length is 95, but the tensors have 96"),
    ):
        path = gguf_models.write(tmp_path / "c.gguf", "t5", {**keys, f":t5.{key}": value}, tensors)
        with pytest.raises(ValueError, match=pattern):
            read_gguf(path)


def new_batch(tokens: list[int], start: int = 0) -> Any:
    """Return llama.cpp's batch of one text, whose first token is at position `start`, with outputs of all tokens."""
    batch = pytest.importorskip("llama_cpp").llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, start + i, 1, 1
        batch.seq_id[i][0] = 0
    return batch


class LlamaCppT5:
    """An encoder-decoder in llama.cpp with an encoded source, through the C functions: `llama_cpp.Llama` has none."""

    def __init__(self, path: Path, source: list[int]) -> None:
        self.api = api = pytest.importorskip("llama_cpp")
        self.model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 128
        options.type_k = options.type_v = options.flash_attn_type = 0
        options.n_threads = options.n_threads_batch = 1
        self.context = api.llama_init_from_model(self.model, options)
        assert api.llama_encode(self.context, new_batch(source)) == 0

    def logits(self, target: list[int], start: int = 0) -> np.ndarray:
        """Return the logits after each token of the target, whose first one is at position `start`."""
        assert self.api.llama_decode(self.context, new_batch(target, start)) == 0
        shape = len(target), VOCABULARY
        return np.ctypeslib.as_array(self.api.llama_get_logits(self.context), shape).copy()

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


@pytest.mark.slow
@each_t5
def test_llama_cpp_computes_equal_logits_and_tokens_of_encoder_decoders(tmp_path, fields):
    is_gelu = fields["activation"] == "gelu"  # which is a table of 16 bits in llama.cpp
    model = new_t5(fields, 0.06 if is_gelu else 0.15)
    export_gguf(model, bpe_tokeniser(), tmp_path / "a.gguf")
    source, start = TOKENS[0].tolist(), fields["start_token"]
    target = [start, *TOKENS[1].tolist()]
    with no_grad():
        expected = model(np.array([source]), np.array([target])).numpy()[0]
    theirs = LlamaCppT5(tmp_path / "a.gguf", source)
    assert theirs.api.llama_model_decoder_start_token(theirs.model) == start
    tolerance = (5e-3 if is_gelu else 1e-5) * np.abs(expected).max()
    np.testing.assert_allclose(theirs.logits(target), expected, rtol=0, atol=tolerance)
    theirs.close()
    theirs, tokens = LlamaCppT5(tmp_path / "a.gguf", source), [start]
    for position in range(32):
        tokens.append(int(theirs.logits(tokens[-1:], position)[0].argmax()))
    theirs.close()
    sampling = PenalizedSamplingParams(temperature=0, stop_tokens=(VOCABULARY - 1,))
    generated = [int(token) for token in generate_target(model, source, 32, sampling)]
    assert tokens[1:] == generated and len(set(generated)) > 2


# -------------------------------------------------------------------- tokenisers
def other_tokeniser(**changes: Any) -> PretrainedTokeniser:
    """Return a tokeniser like SmolLM2's, with a chat template and added tokens."""
    document = json.loads(tokenizer_json.to_tokenizer_json(bpe_tokeniser()))
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    document["model"]["ignore_merges"] = False
    n = len(document["model"]["vocab"]) + 1
    for i, text in enumerate(["<|im_start|>", "<|im_end|>", "<tool>"]):
        document["added_tokens"].append(tokenizer_json.added_token(n + i, text, special=text != "<tool>"))
    document |= changes
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    templates = {"default": "{{ messages[0]['content'] }}", "tool": "{{ tools }}"}
    return PretrainedTokeniser(json.dumps(document), special, templates)


def test_bpe_tokeniser_is_exported(tmp_path):
    tokeniser = bpe_tokeniser()
    export_gguf(new_model("llama"), tokeniser, tmp_path / "a.gguf")
    metadata = read_gguf_header(tmp_path / "a.gguf").metadata
    assert metadata["tokenizer.ggml.pre"] == "gpt-2"
    assert len(metadata["tokenizer.ggml.tokens"]) == VOCABULARY  # llama.cpp wants as many as rows
    assert metadata["tokenizer.ggml.tokens"][-1] == "[PAD299]" and metadata["tokenizer.ggml.token_type"][-1] == 5
    loaded = load(tmp_path / "a.gguf")
    for text in TEXTS:
        assert loaded.tokeniser.encode(text) == tokeniser.encode(text, allowed_special=True).tolist()
    assert loaded.tokeniser.eos == loaded.tokeniser.bos == tokeniser.end_of_text
    assert loaded.generation.stop_tokens == (tokeniser.end_of_text,)


@functools.cache
def learned_tokeniser() -> BPETokeniser:
    """Return a BPE tokeniser trained on a text with GPT-2's pattern."""
    return BPETokeniser(400, split="gpt2").train(Path(argparse.__file__).read_text(encoding="utf-8"), progress=False)


def runs_of_characters() -> list[str]:
    """Return texts with repeated characters, which depend on the order of merges."""
    rng = np.random.default_rng(2)
    pieces = [*"a=- \n\t#_.1é", "the", "self"]
    return ["".join(str(rng.choice(pieces)) * rng.integers(1, 20) for _ in range(4)) for _ in range(300)]


def test_trained_tokeniser_is_exported(tmp_path):
    tokeniser = learned_tokeniser()
    export_gguf(GPT(ModelConfig(**{**LLAMA, "vocab_size": 512})), tokeniser, tmp_path / "a.gguf")
    back = load(tmp_path / "a.gguf").tokeniser
    for text in [*TEXTS, *runs_of_characters()]:
        assert back.encode(text) == tokeniser.encode(text, allowed_special=True).tolist(), text


def test_pretrained_tokeniser_is_exported(tmp_path):
    tokeniser = other_tokeniser()
    export_gguf(new_model("llama"), tokeniser, tmp_path / "a.gguf")
    metadata = read_gguf_header(tmp_path / "a.gguf").metadata
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert metadata["tokenizer.ggml.add_bos_token"] is False and metadata["tokenizer.ggml.add_eos_token"] is False
    kinds = metadata["tokenizer.ggml.token_type"][tokeniser.n_vocab - 3 : tokeniser.n_vocab + 1]
    assert kinds == [3, 3, 4, 5]
    back = load(tmp_path / "a.gguf").tokeniser
    for text in (*TEXTS, "<|im_start|>in<|im_end|><tool>in"):
        assert back.encode(text) == tokeniser.encode(text)
    assert back.special == tokeniser.special and back.chat_templates == tokeniser.chat_templates


def unigrams(**changes: Any) -> PretrainedTokeniser:
    """Return a tokeniser of unigrams as T5's, with three special tokens before the pieces."""
    pieces = ["<pad>", "</s>", "<unk>", *"\u2581abcdefghijklmnopqrstuvwxyz."]
    pieces += ["\u2581the", "\u2581th", "ing", "er", "in"]
    vocab = [[piece, -20.0 / (1 + len(piece)) - i / 64 if i > 2 else 0.0] for i, piece in enumerate(pieces)]
    model = {"type": "Unigram", "unk_id": 2, "vocab": vocab, "byte_fallback": False}
    added = [tokenizer_json.added_token(i, pieces[i]) for i in range(3)]
    parts = {**unigram_parts(b""), "decoder": metaspace(), **changes}
    parts["post_processor"] = tokenizer_json.template_processing({}, {"</s>": 1})
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PretrainedTokeniser(json.dumps(tokenizer_json.new_document(model, added, **parts)), special)


UNIGRAM_TEXTS = ("the thing in the wind", "  sing   a  song. ", "", "the</s>ring", "Gr\u00fc\u00dfe \u4e16\u754c the")


def test_names_of_special_tokens_are_text_for_unigrams():
    tokeniser = unigrams()
    ids = tokeniser.encode("the</s>ring<pad>", allowed_special=False)
    assert ids[-1] == 1 and not {0, 1} & {*ids[:-1]}
    assert tokeniser.encode_plain("the ring").tolist() == tokeniser.encode("the ring")[:-1]


def test_unigrams_are_exported(tmp_path):
    tokeniser = unigrams()
    export_gguf(new_t5(FLAN_T5), tokeniser, tmp_path / "a.gguf")
    metadata = read_gguf_header(tmp_path / "a.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "t5" and metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 2, 1]
    assert (metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.ggml.add_eos_token"]) == (False, True)
    back = load(tmp_path / "a.gguf").tokeniser
    for text in UNIGRAM_TEXTS:
        assert back.encode(text) == tokeniser.encode(text), text
        assert back.decode(back.encode(text)) == tokeniser.decode(tokeniser.encode(text))
    assert back.special.items() >= tokeniser.special.items()


def test_replaced_characters_of_unigrams_are_exported(tmp_path):
    """T5 divides texts at spaces after the replacement, and its file has the bytes of the replacements."""
    charsmap = bytes([0] * 4)  # no replacement
    words = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace()]}
    normalizer = unigram_parts(charsmap)["normalizer"]["normalizers"][0]
    document = json.loads(unigrams().to_tokenizer_json()) | {"normalizer": normalizer, "pre_tokenizer": words}
    metadata = _unigrams(document, VOCABULARY)
    assert metadata["tokenizer.ggml.precompiled_charsmap"] == charsmap
    read = {**metadata, "tokenizer.ggml.precompiled_charsmap": list(charsmap), "tokenizer.ggml.eos_token_id": 1}
    assert GGUFTokenizer(read).to_tokenizer_json()["normalizer"] == unigram_parts(charsmap)["normalizer"]
    for name, value, pattern in (
        ("precompiled_charsmap", [300], "expected bytes"),
        ("scores", [0.0], "expected 300 numbers in tokenizer.ggml.scores, got 1"),
        ("remove_extra_whitespaces", False, "remove_extra_whitespaces to be missing or true"),
        ("unknown_token_id", -1, "unknown_token_id, which is missing"),
    ):
        with pytest.raises(ValueError, match=pattern):
            GGUFTokenizer({**read, f"tokenizer.ggml.{name}": value}).to_tokenizer_json()


@pytest.mark.slow
def test_llama_cpp_splits_texts_into_equal_unigrams(tmp_path):
    tokeniser = unigrams()
    export_gguf(new_t5(FLAN_T5), tokeniser, tmp_path / "a.gguf")
    model = open_llama_cpp(tmp_path / "a.gguf", vocab_only=True)
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice([*"abeginrst. "], rng.integers(1, 30))) for _ in range(200)]
    for text in [*UNIGRAM_TEXTS, *words]:
        assert model.tokenize(text.encode(), special=True) == tokeniser.encode(text), text
    model.close()


def test_bos_token_of_the_post_processor_is_exported(tmp_path):
    tokeniser = other_tokeniser(post_processor=tokenizer_json.template_processing({"<|im_start|>": 264}, {}))
    assert tokeniser.encode("in")[0] == tokeniser.bos == 264
    export_gguf(new_model("llama"), tokeniser, tmp_path / "a.gguf")
    assert read_gguf_header(tmp_path / "a.gguf").metadata["tokenizer.ggml.add_bos_token"] is True
    assert load(tmp_path / "a.gguf").tokeniser.encode("in") == tokeniser.encode("in")


def test_export_without_a_tokeniser(tmp_path):
    export_gguf(new_model("gpt2"), None, tmp_path / "a.gguf")
    assert load(tmp_path / "a.gguf").tokeniser is None


# -------------------------------------------------------------------- rejected files and models
def test_damaged_files_load_or_give_a_one_line_error(tmp_path):
    """Bytes flipped anywhere before the weights, from the container to the tokeniser."""
    path = tmp_path / "a.gguf"
    export_gguf(new_model("llama, biases"), other_tokeniser(), path, "Q8_0")
    content = path.read_bytes()
    n_header = min(entry.start for entry in read_gguf_header(path).tensors.values())
    rng = np.random.default_rng(0)
    for _ in range(400):
        damaged = np.frombuffer(content, np.uint8).copy()
        places = rng.integers(4, n_header, rng.integers(1, 4))
        damaged[places] = rng.choice([0, 1, 0x20, 0x7F, 0x80, 0xFF, rng.integers(256)], len(places))
        path.write_bytes(damaged.tobytes())
        try:
            load(path)
        except ValueError as error:
            message = str(error)
            assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 400, message


def test_unsupported_config_fields_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"^export_gguf: llama\.cpp cannot.*gpt2.* softmax='softmax1'"):
        export_gguf(GPT(ModelConfig(**GPT2, softmax="softmax1")), None, tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_unsupported_tokenizers_are_rejected(tmp_path):
    document = json.loads(other_tokeniser().to_tokenizer_json())
    strange = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}
    lstrip = [{**token, "lstrip": True} for token in document["added_tokens"]]
    before = {"type": "Prepend", "prepend": "_"}
    words = {"type": "WordLevel", "vocab": {"a": 0, "<|im_end|>": 1}, "unk_token": "a"}
    cases: list[tuple[Any, str]] = [
        (bpe_tokeniser("tricycle"), "pre-tokenizers gpt-2.*qwen2"),
        (other_tokeniser(pre_tokenizer=strange), "pre-tokenizers gpt-2"),
        (other_tokeniser(normalizer=before), "pre-tokenizers gpt-2"),
        (other_tokeniser(added_tokens=lstrip), r"lstrip.*'<\|endoftext\|>'"),
        (other_tokeniser(model=words), "byte-level BPE.*WordLevel"),
        (unigrams(normalizer=None), "unigrams without bytes"),
        (other_tokeniser(model={**document["model"], "merges": [], "ignore_merges": True}), "none for 7"),
        (PretrainedTokeniser(other_tokeniser().to_tokenizer_json()), "bos_token or eos_token"),
        (BPETokeniser(257, ["<x>"]), r"tokeniser.*<\|endoftext\|>"),
        (object(), "BPETokeniser.*object"),
    ]
    for tokeniser, pattern in cases:
        with pytest.raises(ValueError) as caught:
            export_gguf(new_model("llama"), tokeniser, tmp_path / "a.gguf")
        message = str(caught.value)
        assert re.search(f"^export_gguf: .*llama.cpp.*{pattern}", message), message
        assert "\n" not in message
    small = GPT(ModelConfig(**{**LLAMA, "vocab_size": 200}))
    with pytest.raises(ValueError, match=r"at most 200 tokens.*got 264"):
        export_gguf(small, bpe_tokeniser(), tmp_path / "a.gguf")
    assert not list(tmp_path.iterdir())


def test_invalid_export_arguments_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"F32, F16, .*Q4_0, got 'Q4_K'"):
        export_gguf(new_model("llama"), None, tmp_path / "a.gguf", "Q4_K")
    with pytest.raises(ValueError, match=r"^export_gguf: .*GPT.*dict"):
        export_gguf({}, None, tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"pooling.*mean, first.*'max'"):
        export_gguf(new_encoder(), None, tmp_path / "a.gguf", pooling="max")
    adapted = new_model("llama")
    new_adapter(Pretrained(adapted, None, GenerationSettings()))
    with pytest.raises(ValueError, match=r"^export_gguf: expected a model without an adapter"):
        export_gguf(adapted, None, tmp_path / "a.gguf")


def test_export_command_checks_the_model_before_it_writes(tmp_path):
    config = ModelConfig(vocab_size=264, context_window=32, embedding_dim=32, n_heads=2, n_layers=1, activation="relu")
    export_folder(GPT(config), bpe_tokeniser(), tmp_path / "model")
    for flag, message in {"--gguf": "activation='relu'", "--html": "a tokenizer of Tricycle"}.items():
        with pytest.raises(ValueError, match=message):
            export_main([*map(str, (tmp_path / "model", tmp_path / "copy", flag, tmp_path / "a"))])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# -------------------------------------------------------------------- llama.cpp itself
def greedy_of_llama_cpp(model: Any, prompt: list[int], n: int) -> list[int]:
    """Generate greedily with llama.cpp."""
    return list(islice(model.generate(prompt, temp=0.0, repeat_penalty=1.0), n))


def open_llama_cpp(path: Path, **options: Any) -> Any:
    """Open a file with llama.cpp, with a KV cache in float32."""
    llama_cpp = pytest.importorskip("llama_cpp")
    options |= {"flash_attn": False} if "embedding" not in options else {}
    return llama_cpp.Llama(str(path), n_ctx=128, n_threads=1, type_k=0, type_v=0, verbose=False, **options)


def check_logits_and_tokens(model: GPT, path: Path, tolerance: float) -> None:
    """Compare logits of llama.cpp, by a tolerance relative to the largest, and 32 greedy tokens after two prompts."""
    theirs = open_llama_cpp(path, logits_all=True)
    theirs.eval(TOKENS[0].tolist())
    expected = logits(model, TOKENS[:1])[0]
    np.testing.assert_allclose(
        theirs.scores[: len(expected)], expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )
    for prompt in TOKENS[:, :8].tolist():
        generated = [int(token) for token in generate(model, prompt, 32, temperature=0)][-32:]
        assert len(set(generated)) > 3
        assert greedy_of_llama_cpp(theirs, prompt, 32) == generated
    theirs.close()


@pytest.mark.slow
@each_model
def test_llama_cpp_computes_equal_logits_and_tokens(tmp_path, name):
    model = new_model(name)
    export_gguf(model, bpe_tokeniser(), tmp_path / "a.gguf")
    has_gelu = "gelu" in model.config.activation and not isinstance(model.config, MambaConfig)
    # llama.cpp has a table of GELU in 16 bits, and dividing keys by their length magnifies rounding errors.
    tolerance = 5e-3 if has_gelu else 3e-5 if hasattr(model.config, "n_linear_heads") else 1e-5
    check_logits_and_tokens(model, tmp_path / "a.gguf", tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["bpe", "another", "learned"])
def test_llama_cpp_tokenizes_equally(tmp_path, of):
    made = {"bpe": bpe_tokeniser, "another": other_tokeniser, "learned": learned_tokeniser}
    tokeniser: Any = made[of]()
    export_gguf(GPT(ModelConfig(**{**LLAMA, "vocab_size": 512})), tokeniser, tmp_path / "a.gguf")
    model = open_llama_cpp(tmp_path / "a.gguf", vocab_only=True)
    for text in [*TEXTS, *runs_of_characters()]:
        ids = tokeniser.encode(text, allowed_special=True)
        assert model.tokenize(text.encode(), add_bos=False, special=True) == list(map(int, ids)), text
    model.close()


def quantize_with_llama_cpp(source: Path, target: Path, file_type: str) -> None:
    """Write a quantized copy of a file with llama.cpp."""
    llama_cpp = pytest.importorskip("llama_cpp")
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread, options.ftype = 1, FILE_TYPES[file_type].number
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)) == 0


def dtype_names(path: Path) -> dict[str, str]:
    return {name: info.dtype_name for name, info in read_gguf_header(path).tensors.items()}


def check_against_llama_cpp(model: GPT, tokeniser: Any, folder: Path, file_types: tuple[str, ...]) -> None:
    """Check that formats and metadata equal those of llama.cpp's quantizer, and that errors are at most 2% larger."""
    export_gguf(model, tokeniser, folder / "F32.gguf", "F32")
    exact = read_gguf(folder / "F32.gguf").tensors
    for name in file_types:
        paths = [folder / f"{name}-{program}.gguf" for program in ("tricycle", "llama.cpp")]
        export_gguf(model, tokeniser, paths[0], name)
        quantize_with_llama_cpp(folder / "F32.gguf", paths[1], name)
        assert dtype_names(paths[0]) == dtype_names(paths[1])
        ours, theirs = (read_gguf_header(path).metadata for path in paths)
        assert {key for key in ours if ours[key] != theirs[key]} == {"general.name"}
        tensors = [read_gguf(path).tensors for path in paths]
        for key, tensor in ((key, tensor) for key, tensor in exact.items() if tensor.read().any()):
            errors = [relative_error(each[key].read().astype(np.float32), tensor.read()) for each in tensors]
            assert errors[0] <= 1.01 * errors[1], (name, key)  # 2% of the squared error


@pytest.mark.slow
@pytest.mark.parametrize("base", [{**LLAMA, "tied": False}, LLAMA, GPT2], ids=["untied", "llama", "gpt2"])
def test_quantized_files_equal_those_of_llama_cpp(tmp_path, base):
    check_against_llama_cpp(wide_model({**base, "n_heads": 8}), bpe_tokeniser(), tmp_path, tuple(FILE_TYPES))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "granitehybrid", "granitehybrid, experts"])
def test_quantized_models_with_states_equal_those_of_llama_cpp(tmp_path, name):
    sizes = WIDE | {"n_layers": 8, "n_heads": 8}
    sizes |= (
        {"head_size": 64, "hidden_size": 0} if name == "mamba2" else {"mamba_head_size": 64, "attention_layers": (1, 5)}
    )
    sizes |= {"shared_size": 256} if "experts" in name else {}
    model = lively(GPT(MambaConfig(**{**MODELS[name][1], **sizes})))
    check_against_llama_cpp(model, bpe_tokeniser(), tmp_path, ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0", "Q8_0"))


EIGHT = {**MIXTURE, "n_experts": 8}
LATENT_SIZES = {"expert_size": 256, "latent_size": 256, "head_size": 320, "rotary_size": 64, "value_size": 256}
T5_SIZES = {"n_layers": 13, "n_decoder_layers": 12, "head_size": 64}  # with numbers of one and of two digits
QUANTIZED: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (ModelConfig, {**EIGHT, "head_size": 64}),
    "falcon": (ModelConfig, {**FALCON, "n_layers": 33}),
    "deepseek v2, 8 experts": (LatentConfig, {**DEEPSEEK, **LATENT_SIZES, "n_experts": 8}),
    "qwen3next": (DeltaNetConfig, {**QWEN3_NEXT, "attention_layers": (3, 7), "shared_size": 256}),
    "deepseek v3": (LatentConfig, {**DEEPSEEK_V3, **LATENT_SIZES, "query_rank": 256}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUANTIZED, "t5", "flan-t5"])
def test_formats_of_tensors_equal_those_of_llama_cpp(tmp_path, name):
    """The errors of the formats are compared above."""
    if "t5" in name:
        model: Any = new_t5({**(T5 if name == "t5" else FLAN_T5), **WIDE, **T5_SIZES})
    else:
        kind, fields = QUANTIZED[name]
        model = GPT(kind(**{**fields, **WIDE, "n_layers": max(8, fields["n_layers"])}))
    exact, theirs, ours = (tmp_path / f"{program}.gguf" for program in ("F32", "llama.cpp", "tricycle"))
    export_gguf(model, bpe_tokeniser(), exact, "F32")
    for file_type in ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q4_0"):
        export_gguf(model, bpe_tokeniser(), ours, file_type)
        quantize_with_llama_cpp(exact, theirs, file_type)
        assert dtype_names(ours) == dtype_names(theirs), file_type


@pytest.mark.slow
def test_quantized_smollm2_equals_that_of_llama_cpp(tmp_path):
    loaded = load(smollm2_file())
    check_against_llama_cpp(loaded.model, loaded.tokeniser, tmp_path, ("Q4_K_M", "Q5_K_S", "Q6_K", "Q4_0"))


@pytest.mark.slow
@pytest.mark.parametrize("file_type", [name for name in FILE_TYPES if name.startswith("Q")])
def test_llama_cpp_computes_equal_logits_from_quantized_files(tmp_path, file_type):
    """llama.cpp rounds activations to 8 bits; its logits differ by that."""
    export_gguf(wide_model(), bpe_tokeniser(), tmp_path / "a.gguf", file_type)
    expected = logits(load(tmp_path / "a.gguf", "exact").model, TOKENS[:1])[0]
    model = open_llama_cpp(tmp_path / "a.gguf", logits_all=True)
    model.eval(TOKENS[0].tolist())
    found = np.array(model.scores[: len(expected)])
    model.close()
    assert relative_error(found, expected) < 0.05  # Q4_1 itself has an error of 0.3
