"""GPT-2 (Radford et al. 2019): our defaults."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.families.family import Family, Names
from tricycle.pretrained.fields import Fields, activation_word

NAMES: Names = {
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


def to_config(fields: Fields) -> ModelConfig:
    fields.must_be("scale_attn_by_inverse_layer_idx", False)
    fields.must_be("add_cross_attention", False)
    width = fields.whole("n_embd", 768)
    return ModelConfig(
        vocab_size=fields.whole("vocab_size", 50_257),
        context_window=fields.whole("n_positions", 1024),
        embedding_dim=width,
        hidden_size=fields.whole_or_none("n_inner", None) or 4 * width,
        n_layers=fields.whole("n_layer", 12),
        n_heads=fields.whole("n_head", 12),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=fields.activation("activation_function", "gelu_new"),
        score_scale=0.0 if fields.flag("scale_attn_weights", True) else 1.0,
        tied=fields.flag("tie_word_embeddings", True),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.context_window,
        "n_ctx": config.context_window,  # of old versions
        "n_embd": config.embedding_dim,
        "n_inner": config.mlp_width,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new" if config.activation == "gelu" else activation_word(config.activation),
        "scale_attn_weights": config.score_scale != 1,
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


GPT2 = Family(("gpt2",), "GPT2LMHeadModel", to_config, to_fields, NAMES, ("transformer.", ""), in_out=True)
