"""gpt-oss (OpenAI 2025): experts with biases and clamped SwiGLU, learned attention sinks, alternating windows, YaRN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ORIGINAL_WINDOW, ConfigFields
from tricycle.pretrained.families.family import Family, TensorNames, gate_interleaved
from tricycle.pretrained.families.llama import (
    attention_biases,
    common_config,
    common_fields,
    sliding_window_config,
    sliding_window_fields,
)
from tricycle.pretrained.families.mixtures import EXPERT, NAMES, expert_config, expert_fields
from tricycle.pretrained.families.stacks import Stack

GPT_OSS_NAMES: TensorNames = {
    **NAMES,
    "blocks.N.attention.softmax_scales": ["model.layers.N.self_attn.sinks"],
    "blocks.N.mlp.router": ["model.layers.N.mlp.router"],
    "blocks.N.mlp.experts.M.up": [f"{EXPERT}.gate_up_proj"],
    "blocks.N.mlp.experts.M.projection": [f"{EXPERT}.down_proj"],
}
STACKS = {
    f"{EXPERT}.{part}.{kind}": Stack(f"model.layers.N.mlp.experts.{part}{suffix}", transposed=kind == "weight")
    for part in ("gate_up_proj", "down_proj")
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
}
DEFAULT_WINDOW = 128
DEFAULT_SCALING = {"rope_type": "yarn", "factor": 32.0, "truncate": False, ORIGINAL_WINDOW: 4096}


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a gpt-oss config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    for name, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0), ("hidden_act", "silu")):
        fields.require(name, value)
    scaling = {"rope_scaling": fields.get("rope_scaling") or fields.get("rope_parameters") or DEFAULT_SCALING}
    fields = ConfigFields({**DEFAULTS, **fields.values, **scaling})
    common = common_config(fields, default_key_heads=8, default_head_size=64)
    types = fields.layer_types(common["n_layers"])
    if types is None:
        types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(common["n_layers"])]
    return ModelConfig(
        **common | {"activation": "clamped_swiglu"},
        **sliding_window_config(types, fields.optional_positive_int("sliding_window", DEFAULT_WINDOW)),
        **expert_config(fields, 128, 4, 0.001),
        router_bias=True,
        **attention_biases(fields, default=True),
        mlp_bias=True,
        softmax="sink",
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a gpt-oss config.json, without model_type."""
    return {
        "rope_scaling": {"rope_type": "default"},
        **common_fields(replace(config, activation="swish", gated=True)),  # the name that the files have
        **expert_fields(config, "num_local_experts"),
        **sliding_window_fields(config),
        "sliding_window": config.window or DEFAULT_WINDOW,  # required even if no layer uses it
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }


GPT_OSS = Family(
    ("gpt_oss",),
    "GptOssForCausalLM",
    to_config,
    to_fields,
    GPT_OSS_NAMES,
    layouts={"gate_up_proj": gate_interleaved},
    stacks=STACKS,
    models="gpt-oss",
)
