"""GPT-2 (Radford et al. 2019), whose architecture is the default of `ModelConfig`."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_fields import ConfigFields, activation_name, size_fields
from tricycle.pretrained.families.family import Family, TensorNames

NAMES: TensorNames = {
    "token_embedding": ["transformer.wte"],
    "position_embedding": ["transformer.wpe"],
    "blocks.N.attention_norm": ["transformer.h.N.ln_1"],
    "blocks.N.attention.qkv": ["transformer.h.N.attn.c_attn"],
    "blocks.N.attention.projection": ["transformer.h.N.attn.c_proj"],
    "blocks.N.mlp_norm": ["transformer.h.N.ln_2"],
    "blocks.N.mlp.up": ["transformer.h.N.mlp.c_fc"],
    "blocks.N.mlp.projection": ["transformer.h.N.mlp.c_proj"],
    "norm": ["transformer.ln_f"],
    "head": ["lm_head"],
}
SIZE_NAMES = {
    "context_window": "n_positions",
    "embedding_dim": "n_embd",
    "hidden_size": "n_inner",
    "n_layers": "n_layer",
    "n_heads": "n_head",
}


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a GPT-2 config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    inner = fields.optional_positive_int("n_inner") or 4 * fields.positive_int("n_embd", 768)
    return ModelConfig(
        **ConfigFields({**fields.values, "n_inner": inner}).sizes(50_257, 1024, 768, 0, 12, 12, **SIZE_NAMES),
        norm_eps=fields.positive_float("layer_norm_epsilon", 1e-5),
        activation=fields.activation("activation_function", "gelu_new"),
        score_scale=0.0 if fields.boolean("scale_attn_weights", True) else 1.0,
        tied=fields.boolean("tie_word_embeddings", True),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a GPT-2 config.json, without `model_type`."""
    return {
        **size_fields(config, **SIZE_NAMES),
        "n_ctx": config.context_window,  # read by old versions of transformers
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new" if config.activation == "gelu" else activation_name(config.activation),
        "scale_attn_weights": config.score_scale != 1,
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


GPT2 = Family(
    ("gpt2",), "GPT2LMHeadModel", to_config, to_fields, NAMES, ("transformer.", ""), fan_in_fan_out=True, models="GPT-2"
)
