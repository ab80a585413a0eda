"""Falcon (Almazrouei et al. 2023): parallel blocks with one norm (7B, 11B) or two (40B, 180B), few key heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import (
    ConfigFields,
    activation_name,
    field_error,
    read_rotary_fields,
    rotary_scaling_fields,
    size_fields,
)
from tricycle.pretrained.families.family import Family, TensorNames, by_group
from tricycle.pretrained.families.llama import check_heads_divide_width

BLOCK = "transformer.h.N"
NAMES: TensorNames = {
    "token_embedding": ["transformer.word_embeddings"],
    "blocks.N.attention_norm": [f"{BLOCK}.input_layernorm"],
    "blocks.N.attention.qkv": [f"{BLOCK}.self_attention.query_key_value"],
    "blocks.N.attention.projection": [f"{BLOCK}.self_attention.dense"],
    "blocks.N.mlp_norm": [f"{BLOCK}.post_attention_layernorm"],
    "blocks.N.mlp.up": [f"{BLOCK}.mlp.dense_h_to_4h"],
    "blocks.N.mlp.projection": [f"{BLOCK}.mlp.dense_4h_to_h"],
    "norm": ["transformer.ln_f"],
    "head": ["lm_head"],
}
PARALLEL_NORMS = {"blocks.N.attention_norm": [f"{BLOCK}.ln_attn"], "blocks.N.mlp_norm": [f"{BLOCK}.ln_mlp"]}


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a Falcon config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields.require("alibi", False)
    width = fields.positive_int("hidden_size", 4544)
    inner = fields.optional_positive_int("ffn_hidden_size") or 4 * width
    sizes = ConfigFields({**fields.values, "ffn_hidden_size": inner}).sizes(
        65_024, 2048, 4544, inner, 32, 71, hidden_size="ffn_hidden_size"
    )
    is_new, parallel = fields.boolean("new_decoder_architecture", False), fields.boolean("parallel_attn", True)
    n_norms = fields.optional_positive_int("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if n_norms not in ((1, 2) if is_new else (1,)) or (is_new and not parallel):
        rule = "1, or 2 in the new decoder architecture, which needs parallel_attn"
        raise field_error("num_ln_in_parallel_attn", rule, n_norms)
    n_key_heads = 1 if fields.boolean("multi_query", True) else sizes["n_heads"]
    if is_new:
        n_key_heads = fields.optional_positive_int("num_kv_heads") or sizes["n_heads"]
    bias = fields.boolean("bias", False)
    return ModelConfig(
        **sizes,
        n_key_heads=n_key_heads,
        norm_eps=fields.positive_float("layer_norm_epsilon", 1e-5),
        parallel=parallel,
        shared_norm=parallel and n_norms == 1,
        activation=fields.activation("activation", "gelu"),
        positions="rotary",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        tied=fields.boolean("tie_word_embeddings", True),
        **read_rotary_fields(fields),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Falcon's config.json, no model_type; ValueError if heads do not divide the width.

    Parallel blocks are exported in the new decoder architecture, which can have any number of key heads. Models whose
    query heads share no key heads are left to GPT-NeoX, as all Falcon models with RoPE share them.
    """
    check_heads_divide_width(config)
    if config.key_heads == config.n_heads:
        raise ValueError(f"n_key_heads={config.n_key_heads}: expected fewer key heads than query heads")
    return {
        **size_fields(config, hidden_size="ffn_hidden_size"),
        "new_decoder_architecture": config.parallel,
        "parallel_attn": config.parallel,
        "num_ln_in_parallel_attn": 2 if config.parallel and not config.shared_norm else 1,
        "num_kv_heads": config.key_heads,
        "multi_query": config.key_heads == 1,
        "alibi": False,
        "bias": any(has_bias(config, part) for part in ("qkv", "output", "mlp")),
        "layer_norm_epsilon": config.norm_eps,
        "activation": activation_name(config.activation),
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rotary_base,
        "rope_scaling": rotary_scaling_fields(config) or None,
        "hidden_dropout": config.dropout,
        "attention_dropout": 0.0,
    }


def has_two_norms(fields: dict[str, Any]) -> bool:
    """Return whether a config.json has the new architecture with two norms in a block, which have other names."""
    return fields.get("new_decoder_architecture") is True and fields.get("num_ln_in_parallel_attn") in (None, 2)


FALCON = Family(
    ("falcon",),
    "FalconForCausalLM",
    to_config,
    to_fields,
    NAMES,
    ("transformer.", ""),
    layouts={"query_key_value": by_group},
    applies_to=lambda fields: not has_two_norms(fields),
    models="Falcon",
)
FALCON_TWO_NORMS = replace(
    FALCON,
    names={**NAMES, **PARALLEL_NORMS},
    legacy_names={r"\.input_layernorm\.": ".ln_mlp."},  # of GGUF files, which have one name for both
    applies_to=has_two_norms,
)
