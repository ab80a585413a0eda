"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused matrices, and LongRoPE in models of long contexts."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_fields import ORIGINAL_WINDOW, ConfigFields, field_error
from tricycle.pretrained.families.family import Family, TensorNames, gate_first
from tricycle.pretrained.families.llama import LLAMA_NAMES, check_heads_divide_width, common_config, common_fields

NAMES: TensorNames = {
    **LLAMA_NAMES,
    "blocks.N.attention.qkv": ["model.layers.N.self_attn.qkv_proj"],
    "blocks.N.mlp.up": ["model.layers.N.mlp.gate_up_proj"],
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    ORIGINAL_WINDOW: 4096,
    "rms_norm_eps": 1e-5,
}
FORMER_NAMES = ("su", "yarn")  # of LongRoPE in the first config files of Phi-3


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a Phi-3 config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    values = {**DEFAULTS, **fields.values}
    for name in ("rope_scaling", "rope_parameters"):
        section = fields.section(name)
        kind = section.get("rope_type", section.get("type", "default"))
        if kind not in ("default", "longrope", *FORMER_NAMES):
            raise field_error(f"{name}.rope_type", "default or longrope", kind)
        values[name] = {**section, "rope_type": "longrope" if kind in FORMER_NAMES else kind} if section else None
    fields = ConfigFields(values)
    return ModelConfig(
        **common_config(fields, default_fraction=1.0), window=fields.optional_positive_int("sliding_window") or 0
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Phi-3's config.json, no model_type; ValueError if heads do not divide the width."""
    check_heads_divide_width(config)
    fields = {
        **common_fields(config),
        "partial_rotary_factor": config.rotary_fraction,
        "sliding_window": config.window or None,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "pad_token_id": None,  # the default may be outside of the vocabulary
    }
    if config.rotary_scaling == "longrope":
        fields[ORIGINAL_WINDOW] = config.rotary_original_window
    return fields


LAYOUTS = {"gate_up_proj": gate_first}
PHI3 = Family(("phi3",), "Phi3ForCausalLM", to_config, to_fields, NAMES, layouts=LAYOUTS, models="Phi-3 and 4")
