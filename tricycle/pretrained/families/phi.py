"""Phi 1, 1.5 and 2 (Li et al. 2023): attention and MLP in parallel, after one shared norm."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_fields import ConfigFields, read_rotary_fields
from tricycle.pretrained.families.family import Family, TensorNames
from tricycle.pretrained.families.llama import LLAMA_NAMES, layer_norm_fields

NAMES: TensorNames = {
    **LLAMA_NAMES,
    "blocks.N.attention.projection": ["model.layers.N.self_attn.dense"],
    "blocks.N.mlp.up": ["model.layers.N.mlp.fc1"],
    "blocks.N.mlp.projection": ["model.layers.N.mlp.fc2"],
    "norm": ["model.final_layernorm"],
}


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a Phi config.json's fields to a `ModelConfig` by transformers' defaults; ValueError if unsupported."""
    fields.require("qk_layernorm", False)
    fields.require("tie_word_embeddings", False)
    sizes = fields.sizes(51_200, 2048, 2048, 8192, 24, 32)
    return ModelConfig(
        **sizes,
        n_key_heads=fields.optional_positive_int("num_key_value_heads") or sizes["n_heads"],
        norm_eps=fields.positive_float("layer_norm_eps", 1e-5),
        parallel=True,
        shared_norm=True,
        activation=fields.activation("hidden_act", "gelu_new"),
        positions="rotary",
        tied=False,
        head_bias=True,
        **read_rotary_fields(fields, default_fraction=0.5),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a Phi config.json, without model_type."""
    return {
        **layer_norm_fields(config),
        "tie_word_embeddings": False,
        "partial_rotary_factor": config.rotary_fraction,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
    }


PHI = Family(("phi",), "PhiForCausalLM", to_config, to_fields, NAMES, models="Phi 1, 1.5 and 2")
