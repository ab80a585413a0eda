"""GPT-NeoX (Black et al. 2022), the architecture of the Pythia models."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import (
    ConfigFields,
    activation_name,
    read_rotary_fields,
    rotary_scaling_fields,
    size_fields,
)
from tricycle.pretrained.families.family import Family, TensorNames, by_head
from tricycle.pretrained.families.llama import attention_biases

NAMES: TensorNames = {
    "token_embedding": ["gpt_neox.embed_in"],
    "blocks.N.attention_norm": ["gpt_neox.layers.N.input_layernorm"],
    "blocks.N.attention.qkv": ["gpt_neox.layers.N.attention.query_key_value"],
    "blocks.N.attention.projection": ["gpt_neox.layers.N.attention.dense"],
    "blocks.N.mlp_norm": ["gpt_neox.layers.N.post_attention_layernorm"],
    "blocks.N.mlp.up": ["gpt_neox.layers.N.mlp.dense_h_to_4h"],
    "blocks.N.mlp.projection": ["gpt_neox.layers.N.mlp.dense_4h_to_h"],
    "norm": ["gpt_neox.final_layer_norm"],
    "head": ["embed_out"],
}


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a GPT-NeoX config.json to a `ModelConfig` with transformers' defaults; ValueError if unsupported."""
    rope = {"rope_theta": fields.get("rotary_emb_base"), "partial_rotary_factor": fields.get("rotary_pct")}
    return ModelConfig(
        **fields.sizes(50_432, 2048, 6144, 24_576, 44, 64),
        norm_eps=fields.positive_float("layer_norm_eps", 1e-5),
        parallel=fields.boolean("use_parallel_residual", True),
        activation=fields.activation("hidden_act", "gelu"),
        positions="rotary",
        **attention_biases(fields, default=True),
        tied=fields.boolean("tie_word_embeddings", False),
        **read_rotary_fields(ConfigFields({**fields.values, **rope}), default_fraction=0.25),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a GPT-NeoX config.json, without model_type."""
    return {
        **size_fields(config),
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel,
        "hidden_act": activation_name(config.activation),
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
        "tie_word_embeddings": config.tied,
        "rotary_emb_base": config.rotary_base,
        "rotary_pct": config.rotary_fraction,
        "rope_scaling": rotary_scaling_fields(config) or None,
    }


LEGACY_NAMES = {r"^lm_head\.": "embed_out."}
PREFIXES = ("gpt_neox.", "")
NEOX = Family(
    ("gpt_neox",),
    "GPTNeoXForCausalLM",
    to_config,
    to_fields,
    NAMES,
    PREFIXES,
    LEGACY_NAMES,
    layouts={"query_key_value": by_head},
    models="Pythia, GPT-NeoX",
)
