"""StableLM (Bellagente et al. 2024): Llama with layer norms that have biases, and RoPE on some channels of a head."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields, read_rotary_fields
from tricycle.pretrained.families.family import Family
from tricycle.pretrained.families.llama import LLAMA_NAMES, check_heads_divide_width, layer_norm_fields


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a StableLM config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields.require("qk_layernorm", False)
    parallel = fields.boolean("use_parallel_residual", False)
    return ModelConfig(
        **fields.sizes(50_304, 4096, 2560, 6912, 32, 32),
        n_key_heads=fields.optional_positive_int("num_key_value_heads", 32) or 0,
        norm_eps=fields.positive_float("layer_norm_eps", 1e-5),
        parallel=parallel,
        shared_norm=parallel,
        activation=fields.activation("hidden_act", "silu"),
        gated=True,
        positions="rotary",
        qkv_bias=fields.boolean("use_qkv_bias", False),
        output_bias=False,
        mlp_bias=False,
        tied=fields.boolean("tie_word_embeddings", False),
        **read_rotary_fields(fields, default_fraction=0.25),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to StableLM's config.json, no model_type; ValueError if heads do not divide the width."""
    check_heads_divide_width(config)
    return {
        **layer_norm_fields(config),
        "use_parallel_residual": config.parallel,
        "use_qkv_bias": has_bias(config, "qkv"),
        "qk_layernorm": False,
        "partial_rotary_factor": config.rotary_fraction,
        "hidden_dropout": config.dropout,
        "attention_dropout": 0.0,
    }


STABLELM = Family(("stablelm",), "StableLmForCausalLM", to_config, to_fields, LLAMA_NAMES, models="StableLM")
