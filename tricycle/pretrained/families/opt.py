"""OPT (Zhang et al. 2022); OPT-350M has post-norm blocks, and embeddings narrower than the hidden states."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields, activation_name, size_fields
from tricycle.pretrained.families.family import Family, TensorNames

NAMES: TensorNames = {
    "token_embedding": ["model.decoder.embed_tokens"],
    "position_embedding": ["model.decoder.embed_positions"],
    "embedding_projection": ["model.decoder.project_in"],
    "blocks.N.attention_norm": ["model.decoder.layers.N.self_attn_layer_norm"],
    "blocks.N.attention.qkv": [f"model.decoder.layers.N.self_attn.{part}_proj" for part in "qkv"],
    "blocks.N.attention.projection": ["model.decoder.layers.N.self_attn.out_proj"],
    "blocks.N.mlp_norm": ["model.decoder.layers.N.final_layer_norm"],
    "blocks.N.mlp.up": ["model.decoder.layers.N.fc1"],
    "blocks.N.mlp.projection": ["model.decoder.layers.N.fc2"],
    "norm": ["model.decoder.final_layer_norm"],
    "head_projection": ["model.decoder.project_out"],
    "head": ["lm_head"],
}
POSITION_OFFSET = 2  # rows of the position embedding that are not used


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert an OPT config.json to a `ModelConfig`, missing fields by default; ValueError if unsupported."""
    fields.require("_remove_final_layer_norm", False)
    fields.require("layer_norm_elementwise_affine", True)
    sizes = fields.sizes(50_272, 2048, 768, 3072, 12, 12, hidden_size="ffn_dim")
    embedding_size = fields.optional_positive_int("word_embed_proj_dim") or 0
    bias = fields.boolean("enable_bias", True)
    return ModelConfig(
        **sizes,
        norm_placement="before" if fields.boolean("do_layer_norm_before", True) else "after",
        activation=fields.activation("activation_function", "relu"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        position_offset=POSITION_OFFSET,
        embedding_size=embedding_size if embedding_size != sizes["embedding_dim"] else 0,
        tied=fields.boolean("tie_word_embeddings", True),
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of an OPT config.json, without model_type."""
    return {
        **size_fields(config, hidden_size="ffn_dim"),
        "do_layer_norm_before": config.norm_placement == "before",
        "activation_function": activation_name(config.activation),
        "enable_bias": any(has_bias(config, part) for part in ("qkv", "output", "mlp")),
        "word_embed_proj_dim": config.embedding_size or config.embedding_dim,
        "tie_word_embeddings": config.tied,
        "dropout": config.dropout,
        "attention_dropout": 0.0,
    }


OPT = Family(("opt",), "OPTForCausalLM", to_config, to_fields, NAMES, ("model.decoder.", "decoder.", ""), models="OPT")
