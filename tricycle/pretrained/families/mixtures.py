"""Mixtures of experts: Mixtral (Jiang et al. 2024), Qwen3-MoE (Qwen Team 2025) and OLMoE (Muennighoff et al. 2024).

They are Llama, Qwen3 and OLMo with a `MixtureOfExperts` in place of each MLP. Mixtral divides the weights of a token's
experts by their sum; the others do so if norm_topk_prob is true.
"""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields
from tricycle.pretrained.families.family import Family, TensorNames
from tricycle.pretrained.families.llama import (
    LLAMA_NAMES,
    attention_biases,
    check_heads_divide_width,
    common_config,
    common_fields,
    qk_norms,
)

EXPERT = "model.layers.N.mlp.experts.M"
NAMES: TensorNames = {
    **{name: theirs for name, theirs in LLAMA_NAMES.items() if ".mlp." not in name},
    "blocks.N.mlp.router": ["model.layers.N.mlp.gate"],
    "blocks.N.mlp.experts.M.up": [f"{EXPERT}.up_proj", f"{EXPERT}.gate_proj"],
    "blocks.N.mlp.experts.M.projection": [f"{EXPERT}.down_proj"],
}
MIXTRAL_EXPERT = "model.layers.N.block_sparse_moe.experts.M"
MIXTRAL_NAMES: TensorNames = {
    **NAMES,
    "blocks.N.mlp.router": ["model.layers.N.block_sparse_moe.gate"],
    "blocks.N.mlp.experts.M.up": [f"{MIXTRAL_EXPERT}.w3", f"{MIXTRAL_EXPERT}.w1"],
    "blocks.N.mlp.experts.M.projection": [f"{MIXTRAL_EXPERT}.w2"],
}
MIXTRAL_DEFAULTS = {"intermediate_size": 14_336, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
QWEN3_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32_768,
}
OLMOE_DEFAULTS = {
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


# -------------------------------------------------------------------- from config.json
def expert_config(fields: ConfigFields, n_experts: int, n_active: int, router_loss: float) -> dict[str, Any]:
    """Convert config.json fields of experts to `ModelConfig` keyword arguments; numbers here are defaults.

    Args:
        n_experts, n_active, router_loss: values of missing fields.
    """
    fields.require("router_jitter_noise", 0.0)
    name = "router_aux_loss_coef"
    number = "num_local_experts" if "num_local_experts" in fields or "num_experts" not in fields else "num_experts"
    return {
        "n_experts": fields.positive_int(number, n_experts),
        "n_active_experts": fields.positive_int("num_experts_per_tok", n_active),
        "router_loss": 0.0 if fields.get(name) == 0 else fields.positive_float(name, router_loss),
    }


def from_mixtral(fields: ConfigFields) -> ModelConfig:
    """Convert a Mixtral config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields = ConfigFields({**MIXTRAL_DEFAULTS, "rope_theta": 1_000_000.0, **fields.values})
    window = fields.optional_positive_int("sliding_window")
    common = common_config(fields, default_key_heads=8)
    return ModelConfig(**common, **expert_config(fields, 8, 2, 0.001), window=window or 0)


def from_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Convert a Qwen3-MoE config.json to a `ModelConfig`; ValueError if a layer has no experts, or is unsupported."""
    fields.require("decoder_sparse_step", 1)
    if fields.get("mlp_only_layers") is not None:
        fields.require("mlp_only_layers", [])
    width = {"intermediate_size": fields.positive_int("moe_intermediate_size", 768)}
    common = common_config(ConfigFields({**QWEN3_DEFAULTS, **fields.values, **width}), default_key_heads=4)
    window = fields.optional_positive_int("sliding_window", 4096) if fields.boolean("use_sliding_window", False) else 0
    return ModelConfig(
        **common,
        **expert_config(fields, 128, 8, 0.001),
        **qk_norms(common),
        normalize_experts=fields.boolean("norm_topk_prob", False),
        window=window or 0,
        **attention_biases(fields),
    )


def from_olmoe(fields: ConfigFields) -> ModelConfig:
    """Convert an OLMoE config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields.require("clip_qkv", None)
    common = common_config(ConfigFields({**OLMOE_DEFAULTS, **fields.values}))
    return ModelConfig(
        **common,
        **expert_config(fields, 64, 8, 0.01),
        **qk_norms(common),
        normalize_experts=fields.boolean("norm_topk_prob", False),
        qk_norm_per_head=False,
        **attention_biases(fields),
    )


# -------------------------------------------------------------------- to config.json
def expert_fields(config: ModelConfig, name: str) -> dict[str, Any]:
    """Return the config.json fields of experts that all families share; `name` is that of the number of experts."""
    return {
        name: config.n_experts,
        "num_experts_per_tok": config.n_active_experts,
        "router_aux_loss_coef": config.router_loss,
        "output_router_logits": False,
    }


def to_mixtral(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a Mixtral config.json, without model_type."""
    sliding_window = {"sliding_window": config.window or None}
    return {**common_fields(config), **expert_fields(config, "num_local_experts"), **sliding_window}


def to_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a Qwen3-MoE config.json, without model_type."""
    return {
        **common_fields(config),
        **expert_fields(config, "num_experts"),
        "moe_intermediate_size": config.mlp_width,
        "norm_topk_prob": config.normalize_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": bool(config.window),
        "sliding_window": config.window or None,
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }


def to_olmoe(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to OLMoE's config.json, no model_type; ValueError if heads do not divide the width."""
    check_heads_divide_width(config)
    fields = {
        **common_fields(config),
        **expert_fields(config, "num_experts"),
        "norm_topk_prob": config.normalize_experts,
        "clip_qkv": None,
        "pad_token_id": None,  # the default is a token
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }
    del fields["head_dim"]  # always the width divided by the number of heads
    return fields


MIXTRAL = Family(
    ("mixtral",),
    "MixtralForCausalLM",
    from_mixtral,
    to_mixtral,
    MIXTRAL_NAMES,
    models="mixtures of experts: Mixtral",
)
QWEN3_MOE = Family(("qwen3_moe",), "Qwen3MoeForCausalLM", from_qwen3_moe, to_qwen3_moe, NAMES, models="Qwen3-MoE")
OLMOE = Family(("olmoe",), "OlmoeForCausalLM", from_olmoe, to_olmoe, NAMES, models="OLMoE")
