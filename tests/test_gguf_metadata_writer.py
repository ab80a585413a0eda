"""The choice of a llama.cpp architecture for a config, and its metadata, by reading them back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers_families import FAMILIES, LIKE_LLAMA, TRICYCLE_SIZES

from tricycle.configs import EncoderConfig, ModelConfig
from tricycle.configs.encoder_decoder import EncoderDecoderConfig
from tricycle.configs.mamba import MambaConfig
from tricycle.multi_stream.decoder import MultiStreamConfig
from tricycle.pretrained.config_equivalence import differing_fields
from tricycle.pretrained.gguf_config import CONFIG_READERS, POOLING_TYPES
from tricycle.pretrained.gguf_metadata_writer import (
    METADATA_WRITERS,
    architecture_metadata,
    match_architecture,
    rope_divisors,
)
from tricycle.pretrained.gguf_names import TENSOR_MAPPINGS
from tricycle.sequences.text_encoder import POOLINGS
from tricycle.state_spaces.delta_net import DeltaNetConfig

# llama.cpp scales Gemma's scores by the head size, and has an output matrix in OLMo 2.
CONFIGS: dict[str, ModelConfig] = {name: family.config for name, family in FAMILIES.items()}
CONFIGS |= {name: replace(CONFIGS[name], score_scale=0.0) for name in ("Gemma 2", "Gemma 3")}
CONFIGS["OLMo 2"] = replace(CONFIGS["OLMo 2"], tied=False)
CONFIGS["Qwen2"] = replace(CONFIGS["Qwen2"], window=0, full_layers=())
CONFIGS["Mixtral"] = replace(CONFIGS["Mixtral"], window=0)
CONFIGS["Qwen3-MoE"] = replace(CONFIGS["Qwen3-MoE"], normalize_experts=True)
CONFIGS["OLMoE"] = replace(CONFIGS["OLMoE"], n_key_heads=4)
CONFIGS["gpt-oss"] = replace(CONFIGS["gpt-oss"], tied=False)
CONFIGS["Falcon, 40B"] = replace(CONFIGS["Falcon, 40B"], qkv_bias=False, output_bias=False, mlp_bias=False)
CONFIGS["SmolLM3"] = replace(CONFIGS["SmolLM3"], n_layers=4, unrotated_layers=(3,))
CONFIGS["Phi-3"] = replace(CONFIGS["Phi-3"], window=0)
BOUNDS = {"rotary_low_frequency": 1.0, "rotary_high_frequency": 32.0}  # always those of llama.cpp
CONFIGS |= {name: replace(CONFIGS[name], **BOUNDS) for name in ("Qwen2, YaRN", "gpt-oss", "DeepSeek-V2")}
LATENT = {"norm_eps": 1e-6, "rotary_attention_factor": 1.0, "qkv_bias": False, "output_bias": False}
CONFIGS |= {name: replace(CONFIGS[name], **LATENT) for name in ("DeepSeek-V2", "DeepSeek-V3")}
CONFIGS["DeepSeek-V2"] = replace(CONFIGS["DeepSeek-V2"], n_groups=1, n_active_groups=1)
CONFIGS["BERT"] = EncoderConfig()
CONFIGS["ModernBERT"] = EncoderConfig(
    **{"positions": "rotary", "norm_placement": "before", "first_norm": False, "bias": False, "token_types": 0},
    **{"gated": True, "window": 128, "full_layers": (0, 3, 6, 9), "rotary_local_base": 1e4, "rotary_base": 1.6e5},
)
T5 = {"relative_buckets": 32, "activation": "relu", "positions": "none", "norm": "rms_norm", "score_scale": 1.0}
CONFIGS["T5"] = EncoderDecoderConfig(**T5, context_window=2**15, n_decoder_layers=9, bias=False, tied=False)
CONFIGS["T5, gated"] = replace(CONFIGS["T5"], activation="gelu", gated=True)
CONFIGS["Mamba-2"] = MambaConfig()
CONFIGS["Gemma 3n"] = MultiStreamConfig()
CONFIGS["Granite 4"] = MambaConfig(
    **{**TRICYCLE_SIZES, **LIKE_LLAMA, "positions": "none", "n_heads": 4, "n_key_heads": 2, "head_size": 0},
    **{"n_mamba_heads": 3, "mamba_head_size": 16, "mamba_mlp": True, "attention_layers": (1,), "score_scale": 0.2},
)
CONFIGS["Qwen3-Next"] = DeltaNetConfig(
    **{**TRICYCLE_SIZES, **LIKE_LLAMA, "n_heads": 4, "n_key_heads": 2, "n_layers": 4, "attention_layers": (3,)},
    **{"norm_eps": 1e-6, "norm_unit_offset": True, "qk_norm": True, "qk_norm_gain": True, "qk_norm_eps": 1e-6},
    **{"n_experts": 6, "n_active_experts": 2, "shared_size": 20},
)
CONFIGS["Granite 4, experts"] = replace(CONFIGS["Granite 4"], n_experts=4, n_active_experts=2, shared_size=20)
ARCHITECTURES = {
    **dict.fromkeys(("Llama", "Llama 3", "Llama, linear"), "llama"),
    **{"Qwen2": "qwen2", "Qwen3": "qwen3", "OLMo 2": "olmo2", "Gemma 2": "gemma2", "Gemma 3": "gemma3"},
    **{"Pythia": "gptneox", "GPT-NeoX, one after the other": "gptneox", "GPT-2": "gpt2", "Phi": "phi2", "BERT": "bert"},
    **{"ModernBERT": "modern-bert", "Qwen3-Next": "qwen3next"},
    **{"Granite": "granite", "Cohere": "command-r", "Qwen2, YaRN": "qwen2", "Mamba-2": "mamba2"},
    **{"Gemma 3n": "gemma3n"},
    **dict.fromkeys(("Granite 4", "Granite 4, experts"), "granitehybrid"),
    **{"Phi-3": "phi3", "Falcon": "falcon", "Falcon, 40B": "falcon"},
    **{
        "Mixtral": "llama",
        "Qwen3-MoE": "qwen3moe",
        "OLMoE": "olmoe",
        "Granite-MoE": "granitemoe",
        "gpt-oss": "gpt-oss",
        "T5": "t5",
        "T5, gated": "t5",
        "DeepSeek-V2": "deepseek2",
        "DeepSeek-V3": "deepseek2",
        "SmolLM3": "smollm3",
        "StableLM": "stablelm",
    },
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_of_each_family(name):
    config = CONFIGS[name]
    architecture, family, converted = match_architecture(config)
    assert architecture == ARCHITECTURES[name]
    assert differing_fields(config, converted) == []
    names = {hf_name for hf_names in family.names.values() for hf_name in hf_names}
    readable = {hf_name for hf_names in TENSOR_MAPPINGS[architecture].names.values() for hf_name in hf_names}
    splits = TENSOR_MAPPINGS[architecture].splits.values()
    readable -= {part.removesuffix(".weight") for split in splits for part in split.parts}
    # The first three have the names of two families, and the last has heads of tasks, which are ignored.
    assert architecture in ("llama", "falcon", "t5", "modern-bert") or names == readable
    metadata = architecture_metadata(architecture, converted)
    assert metadata[f"{architecture}.block_count"] == config.n_layers
    # llama.cpp reads a number with a decimal point as a float and another one as an integer.
    floats = {name for name, value in metadata.items() if isinstance(value, float)}
    endings = ("epsilon", "softcapping", "base", "swa", "factor", "scale", "multiplier")
    assert floats == {name for name in metadata if name.endswith(endings)}


def test_each_architecture_that_is_read_is_written():
    assert set(METADATA_WRITERS) == set(CONFIG_READERS) == set(ARCHITECTURES.values())
    assert tuple(POOLING_TYPES) == POOLINGS


def test_floats_are_equal_after_rounding_to_32_bits():
    config = replace(CONFIGS["Llama"], rotary_base=123_456.789, norm_eps=1.23456789e-5)
    _, _, converted = match_architecture(config)
    assert converted.rotary_base == float(str(np.float32(config.rotary_base))) != config.rotary_base
    with pytest.raises(ValueError, match="gemma2 does not support score_scale"):
        match_architecture(replace(CONFIGS["Gemma 2"], score_scale=8**-0.5 * (1 + 1e-6)))


def test_missing_biases_are_added():
    bare = replace(CONFIGS["Phi"], bias=False, head_bias=False)
    architecture, _, converted = match_architecture(bare)
    assert architecture == "phi2" and converted.bias and converted.head_bias
    architecture, _, converted = match_architecture(replace(CONFIGS["Qwen3"], qk_norm_gain=False))
    assert architecture == "qwen3" and converted.qk_norm_gain


@pytest.mark.parametrize(("n_layers", "architecture"), [(46, "gemma2"), (62, "gemma3")])
def test_the_largest_gemma_scales_scores_by_the_width(n_layers, architecture):
    """llama.cpp recognizes it by the number of layers."""
    name = {"gemma2": "Gemma 2", "gemma3": "Gemma 3"}[architecture]
    full = tuple(range(1, n_layers, 2)) if architecture == "gemma2" else tuple(range(2, n_layers, 3))
    large = replace(CONFIGS[name], n_layers=n_layers, full_layers=full, score_scale=6**-0.5)  # 24 channels, 4 heads
    assert match_architecture(large)[0] == architecture
    with pytest.raises(ValueError, match=f"{architecture} does not support score_scale"):
        match_architecture(replace(large, score_scale=0.0))


def test_rope_divisors_are_those_of_llama_3_only():
    divisors = rope_divisors(CONFIGS["Llama 3"])
    assert divisors is not None and divisors.dtype == np.float32 and divisors.max() == 8
    assert rope_divisors(CONFIGS["Llama"]) is None
    assert rope_divisors(replace(CONFIGS["GPT-2"], rotary_scaling="llama3")) is None


UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "weights of experts with another sum": ("Qwen3-MoE", {"normalize_experts": False}, "normalize_experts=False"),
    "grouped heads of OLMoE": ("OLMoE", {"n_key_heads": 2}, "olmoe .*n_key_heads=2"),
    "exact bounds of YaRN": ("gpt-oss", {"rotary_rounded": False}, "gpt-oss .*rotary_rounded=False"),
    "another eps than that of latents": ("DeepSeek-V3", {"norm_eps": 1e-5}, "deepseek2.*layer_norm_rms_epsilon.*1e-05"),
    "groups by the best expert": (
        "DeepSeek-V2",
        {"n_groups": 3, "n_active_groups": 2},
        "deepseek2.*sigmoids.*3 groups",
    ),
    "groups of one": ("DeepSeek-V3", {"n_groups": 6, "n_active_groups": 3}, "deepseek2.*6 groups of 6 experts"),
    "groups that are all active": ("DeepSeek-V3", {"n_active_groups": 3}, "deepseek2 .*n_groups=3, n_active_groups=3"),
    "biases of latents": ("DeepSeek-V3", {"qkv_bias": True}, "deepseek2 .*qkv_bias=True"),
    "latents of queries in 27 layers": ("DeepSeek-V3", {"n_layers": 27}, "deepseek2 .*query_rank=9"),
    "YaRN on rotated channels": ("DeepSeek-V2", {"rotary_attention_factor": 1.5}, "deepseek2.*attn_factor.*1.5"),
    "YaRN without a factor of scores": ("DeepSeek-V2", {"yarn_mscale": 0.0}, "deepseek2.*yarn_log_multiplier.*0.0"),
    "linear scaling of latent attention": (
        "DeepSeek-V3",
        {"rotary_scaling": "linear", "rotary_factor": 2.0},
        "deepseek2.*yarn, got linear",
    ),
    "windows of latent attention": ("DeepSeek-V3", {"window": 9}, "deepseek2 .*window=9"),
    "normalized weights of a softmax": ("DeepSeek-V2", {"normalize_experts": True}, "deepseek.*norm_topk_prob"),
    "scale of scores of latent attention": ("DeepSeek-V3", {"score_scale": 0.5}, "deepseek2 .*score_scale=0.5"),
    "windows of Phi-3": ("Phi-3", {"window": 9}, "phi3 .*window=9"),
    "windows": ("Qwen2", {"window": 8}, "(llama|qwen2) .*window=8"),
    "biases of Qwen 3": ("Qwen3", {"qkv_bias": True}, "qwen3 .*qkv_bias=True"),
    "tied OLMo 2": ("OLMo 2", {"tied": True}, "olmo2 .*tied=True"),
    "biases of OLMo 2": ("OLMo 2", {"qkv_bias": True, "output_bias": True}, "olmo2 .*qkv_bias=True, output_bias=True"),
    "wide heads of OLMo 2": ("OLMo 2", {"head_size": 16}, "olmo2 .*head_size=16"),
    "norms per head": ("OLMo 2", {"qk_norm_per_head": True}, "olmo2 .*qk_norm_per_head=True"),
    "untied Gemma 2": ("Gemma 2", {"tied": False}, "gemma2 .*tied=False"),
    "uncapped Gemma 2": ("Gemma 2", {"score_cap": 0.0}, "gemma2 .*score_cap=0.0"),
    "other windows of Gemma 2": ("Gemma 2", {"full_layers": (0,)}, r"gemma2 .*full_layers=\(0,\)"),
    "scale of scores": ("Gemma 3", {"score_scale": 0.5}, "gemma3 .*score_scale=0.5"),
    "irregular windows": ("Gemma 3", {"full_layers": (0, 2)}, r"gemma3 .*full_layers=\(0, 2\)"),
    "capped scores of Gemma 3": ("Gemma 3", {"score_cap": 5.0}, "gemma3 .*score_cap=5.0"),
    "other eps of norms": ("Gemma 3", {"qk_norm_eps": 1e-2}, "gemma3 .*qk_norm_eps=0.01"),
    "scale of embeddings": ("Gemma 3", {"embedding_scale": 1.0}, "gemma3 .*embedding_scale=1.0"),
    "norms of queries in Llama": ("Llama", {"qk_norm": True}, "llama.* qk_norm=True"),
    "activation of Llama": ("Llama", {"activation": "relu"}, "llama.* activation='relu'"),
    "activation of GPT-2": ("GPT-2", {"activation": "gelu_exact"}, "gpt2.* activation='gelu_exact'"),
    "scores without a scale": ("GPT-2", {"score_scale": 1.0}, "gpt2.* score_scale=1.0"),
    "parallel blocks": ("GPT-2", {"parallel": True}, "gpt2.* parallel=True"),
    "tied GPT-NeoX": ("Pythia", {"tied": True}, "gptneox .*tied=True"),
    "key heads of GPT-NeoX": ("Pythia", {"n_key_heads": 1}, "gptneox .*n_key_heads=1"),
    "activation": ("Pythia", {"activation": "gelu"}, "gptneox .*activation='gelu'"),
    "scaled RoPE": ("Pythia", {"rotary_scaling": "llama3"}, "gptneox .*rotary_scaling='llama3'"),
    "separate norms": ("Phi", {"shared_norm": False, "n_key_heads": 1}, "phi2 .*shared_norm=False"),
    "softmax": ("Phi", {"softmax": "softmax1"}, "phi2 .*softmax='softmax1'"),
    "shift": ("Qwen3", {"key_shift": True}, "qwen3 .*key_shift=True"),
    "RoBERTa": ("BERT", {"position_offset": 2}, "bert .*position_offset=2"),
    "activation of BERT": ("BERT", {"activation": "relu"}, "bert .*activation='relu'"),
    "rotary BERT": ("BERT", {"positions": "rotary"}, "bert"),
    "biases of Mamba-2": ("Mamba-2", {"bias": True}, "mamba2 .*bias=True"),
    "Mamba-2 with attention": ("Mamba-2", {"attention_layers": (1,)}, "attention_layers"),
    "norms of Mamba-2": ("Mamba-2", {"norm": "layer_norm"}, "mamba2 .*norm='layer_norm'"),
    "biases of Granite 4's mixers": ("Granite 4", {"bias": True, "mlp_bias": False}, "granitehybrid .*bias=True"),
    "biases of Granite 4's MLPs": ("Granite 4", {"mlp_bias": True}, "granitehybrid .*mlp_bias=True"),
    "Granite 4 with attention alone": ("Granite 4", {"attention_layers": (0, 1)}, "granitehybrid: .*some without"),
    "Granite 4 without attention": (
        "Granite 4",
        {"attention_layers": ()},
        "granitehybrid: .*some layers with attention",
    ),
    "another width of Granite 4's mixers": ("Granite 4", {"mamba_head_size": 24}, "granitehybrid: .*inner_size.*twice"),
    "no shared MLP": ("Granite 4, experts", {"shared_size": 0}, "granitehybrid: .*expert_shared_feed_forward_length"),
    "biases of Qwen3-Next": ("Qwen3-Next", {"qkv_bias": True}, "qwen3next .*qkv_bias=True"),
    "weights of its experts": ("Qwen3-Next", {"normalize_experts": False}, "qwen3next .*normalize_experts=False"),
    "its keys as wide as others": ("Qwen3-Next", {"linear_key_size": 64}, "qwen3next: .*64 channels, got 4096"),
    "no shared expert": ("Qwen3-Next", {"shared_size": 0}, "qwen3next .*shared_size=0"),
    "another eps of keys": ("Qwen3-Next", {"norm_eps": 1e-5}, "qwen3next: .*norms of keys, got"),
    "no layer with attention": ("Qwen3-Next", {"attention_layers": ()}, "qwen3next: .*some layers with full"),
    "no experts": (
        "Qwen3-Next",
        {"n_experts": 0, "shared_size": 0},
        "qwen3next: expected n_experts to be above 0, got 0",
    ),
    "norms without 1 + gain": ("Qwen3-Next", {"norm_unit_offset": False}, "qwen3next .*norm_unit_offset=False"),
    "biases of ModernBERT": ("ModernBERT", {"mlp_bias": True, "bias": True}, "modern-bert .*bias=True"),
    "token types of ModernBERT": ("ModernBERT", {"token_types": 2}, "token_types=2"),
    "activation of ModernBERT": ("ModernBERT", {"activation": "relu"}, "modern-bert .*activation='relu'"),
    "local first layer": ("ModernBERT", {"full_layers": ()}, r"modern-bert .*full_layers=\(\)"),
    "irregular local layers": ("ModernBERT", {"full_layers": (0, 3, 5)}, r"modern-bert .*full_layers=\(0, 3, 5\)"),
    "norm of the first block": ("ModernBERT", {"first_norm": True}, "first_norm=True"),
    "partial RoPE of ModernBERT": ("ModernBERT", {"rotary_fraction": 0.5}, "modern-bert .*rotary_fraction=0.5"),
    "no token types": ("BERT", {"token_types": 0}, "bert.*token_types"),
    "scaled logits of T5": ("T5", {"tied": True, "output_scale": 0.125}, "t5: expected tied to be False.*by 0.125"),
    "distance of T5": ("T5", {"relative_distance": 64}, "t5 does not support relative_distance=64"),
    "activation of T5": ("T5", {"activation": "swish", "gated": True}, "t5 does not support activation='swish'"),
    "a deeper decoder": ("T5", {"n_layers": 8}, "t5: expected n_decoder_layers to be at most n_layers, 8, got 9"),
    "scale of scores of T5": ("T5", {"score_scale": 0.5}, "t5 does not support score_scale=0.5"),
}


@pytest.mark.parametrize(("family", "changes", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_fields_that_llama_cpp_cannot_express_are_rejected(family, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        match_architecture(replace(CONFIGS[family], **changes))
    assert "\n" not in str(caught.value)


def test_heads_that_do_not_fill_the_width_are_rejected():
    """qwen2's matrices have the width of the model; llama's need not."""
    wide = ModelConfig(**LIKE_LLAMA, embedding_dim=50, n_heads=3, head_size=16, hidden_size=32, tied=False)
    assert match_architecture(wide)[0] == "llama"
    assert match_architecture(replace(wide, qkv_bias=True))[0] == "llama"
