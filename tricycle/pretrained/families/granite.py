"""Granite 3 (Granite Team 2024): Llama with factors of embeddings, residuals, scores and logits, also with experts."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.families.family import Family, TensorNames, gate_first
from tricycle.pretrained.families.llama import LLAMA_NAMES, attention_biases, common_config, common_fields
from tricycle.pretrained.families.mixtures import NAMES, expert_config, expert_fields
from tricycle.pretrained.families.stacks import Stack

LAYER = "model.layers.N.block_sparse_moe"
MIXTURE_NAMES: TensorNames = {
    **NAMES,
    "blocks.N.mlp.router": [f"{LAYER}.router.layer"],
    "blocks.N.mlp.experts.M.up": [f"{LAYER}.experts.M.input_linear"],
    "blocks.N.mlp.experts.M.projection": [f"{LAYER}.experts.M.output_linear"],
}
STACKS = {
    f"{LAYER}.experts.M.{part}.weight": Stack(f"{LAYER}.{part}.weight") for part in ("input_linear", "output_linear")
}


def common_granite(fields: ConfigFields) -> dict[str, Any]:
    """Convert the fields that both families share to `ModelConfig` keyword arguments, missing ones by default."""
    return {
        **common_config(fields),
        "embedding_scale": fields.positive_float("embedding_multiplier", 1.0),
        "residual_scale": fields.positive_float("residual_multiplier", 1.0),
        "score_scale": fields.positive_float("attention_multiplier", 1.0),
        "logit_scale": 1 / fields.positive_float("logits_scaling", 1.0),
        **attention_biases(fields),
    }


def from_granite(fields: ConfigFields) -> ModelConfig:
    """Convert a Granite config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    return ModelConfig(**common_granite(fields), mlp_bias=fields.boolean("mlp_bias", False))


def from_granite_moe(fields: ConfigFields) -> ModelConfig:
    """Convert a Granite-MoE config.json to a `ModelConfig`, missing fields by default; ValueError if unsupported."""
    return ModelConfig(**common_granite(fields), **expert_config(fields, 8, 2, 0.001))


def common_granite_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields that both families share, with head_dim if it is not width / heads."""
    fields = {
        **common_fields(config),
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.score_scale or config.channels_per_head**-0.5,
        "logits_scaling": 1 / config.logit_scale,
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }
    if config.n_heads * config.channels_per_head == config.embedding_dim:
        del fields["head_dim"]
    return fields


def to_granite(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Granite's config.json, no model_type; ValueError if heads do not divide the width."""
    return {**common_granite_fields(config), "mlp_bias": has_bias(config, "mlp")}


def to_granite_moe(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Granite-MoE's config.json, no model_type; ValueError for heads as in `to_granite`."""
    return {**common_granite_fields(config), **expert_fields(config, "num_local_experts")}


GRANITE = Family(("granite",), "GraniteForCausalLM", from_granite, to_granite, LLAMA_NAMES, models="Granite 3")
GRANITE_MOE = Family(
    ("granitemoe",),
    "GraniteMoeForCausalLM",
    from_granite_moe,
    to_granite_moe,
    MIXTURE_NAMES,
    layouts={"input_linear": gate_first},
    stacks=STACKS,
    models="Granite 3 with experts",
)
