"""Command R (Cohere 2024): parallel blocks, layer norms without biases, and a factor of the logits."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields, read_rotary_fields
from tricycle.pretrained.families.family import Family, adjacent_pairs
from tricycle.pretrained.families.llama import (
    LLAMA_NAMES,
    attention_biases,
    check_heads_divide_width,
    layer_norm_fields,
)


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a Cohere config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields.require("use_qk_norm", False)
    sizes = fields.sizes(256_000, 8192, 8192, 22_528, 40, 64)
    return ModelConfig(
        **sizes,
        n_key_heads=fields.optional_positive_int("num_key_value_heads") or sizes["n_heads"],
        norm_eps=fields.positive_float("layer_norm_eps", 1e-5),
        parallel=True,
        shared_norm=True,
        activation=fields.activation("hidden_act", "silu"),
        gated=True,
        positions="rotary",
        bias=False,
        **attention_biases(fields),
        tied=fields.boolean("tie_word_embeddings", True),
        logit_scale=fields.positive_float("logit_scale", 0.0625),
        **read_rotary_fields(fields, default_theta=500_000.0),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Cohere's config.json, no model_type; ValueError if heads do not divide the width."""
    check_heads_divide_width(config)
    return {
        **layer_norm_fields(config),
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
        "use_qk_norm": False,
        "logit_scale": config.logit_scale,
        "attention_dropout": 0.0,
        "pad_token_id": None,  # the default is a token
    }


LAYOUTS = {"q_proj": adjacent_pairs, "k_proj": adjacent_pairs}
COHERE = Family(
    ("cohere",), "CohereForCausalLM", to_config, to_fields, LLAMA_NAMES, layouts=LAYOUTS, models="Command R"
)
