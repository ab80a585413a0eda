"""Phi 1, 1.5 and 2 (Li et al. 2023): attention and MLP side by side, behind one norm."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.families.family import Family, Names
from tricycle.pretrained.families.llama import LLAMA_NAMES, rotary_scaling_fields
from tricycle.pretrained.fields import Fields, activation_word, rotary_fields

NAMES: Names = {
    **LLAMA_NAMES,
    "blocks.N.attention.projection": ["model.layers.N.self_attn.dense"],
    "blocks.N.mlp.up": ["model.layers.N.mlp.fc1"],
    "blocks.N.mlp.projection": ["model.layers.N.mlp.fc2"],
    "norm": ["model.final_layernorm"],
}


def to_config(fields: Fields) -> ModelConfig:
    fields.must_be("qk_layernorm", False)
    fields.must_be("tie_word_embeddings", False)
    n_heads = fields.whole("num_attention_heads", 32)
    return ModelConfig(
        vocab_size=fields.whole("vocab_size", 51_200),
        context_window=fields.whole("max_position_embeddings", 2048),
        embedding_dim=fields.whole("hidden_size", 2048),
        hidden_size=fields.whole("intermediate_size", 8192),
        n_layers=fields.whole("num_hidden_layers", 24),
        n_heads=n_heads,
        n_key_heads=fields.whole_or_none("num_key_value_heads", None) or n_heads,
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        parallel=True,
        shared_norm=True,
        activation=fields.activation("hidden_act", "gelu_new"),
        positions="rotary",
        tied=False,
        head_bias=True,
        **rotary_fields(fields, fraction=0.5),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_window,
        "hidden_size": config.embedding_dim,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.key_heads,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": activation_word(config.activation),
        "tie_word_embeddings": False,
        "rope_theta": config.rotary_base,
        "partial_rotary_factor": config.rotary_fraction,
        "rope_scaling": rotary_scaling_fields(config) or None,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
    }


PHI = Family(("phi",), "PhiForCausalLM", to_config, to_fields, NAMES, ("model.", ""))
