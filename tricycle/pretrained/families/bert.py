"""BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019): encoders, loaded without their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tricycle.configs.encoder import EncoderConfig
from tricycle.pretrained.config_fields import ACTIVATION_NAMES, ConfigFields, size_fields
from tricycle.pretrained.families.family import Family, TensorNames

NAMES: TensorNames = {
    "token_embedding": ["embeddings.word_embeddings"],
    "position_embedding": ["embeddings.position_embeddings"],
    "type_embedding": ["embeddings.token_type_embeddings"],
    "embedding_norm": ["embeddings.LayerNorm"],
    "blocks.N.attention.qkv": [f"encoder.layer.N.attention.self.{part}" for part in ("query", "key", "value")],
    "blocks.N.attention.projection": ["encoder.layer.N.attention.output.dense"],
    "blocks.N.attention_norm": ["encoder.layer.N.attention.output.LayerNorm"],
    "blocks.N.mlp.up": ["encoder.layer.N.intermediate.dense"],
    "blocks.N.mlp.projection": ["encoder.layer.N.output.dense"],
    "blocks.N.mlp_norm": ["encoder.layer.N.output.LayerNorm"],
}
IGNORED_HEADS = r"(pooler|cls|lm_head|classifier|qa_outputs)\."
LEGACY_NAMES = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}


def to_config(fields: ConfigFields) -> EncoderConfig:
    """Convert a BERT config.json to an `EncoderConfig` with transformers' defaults; ValueError if unsupported."""
    fields.require("position_embedding_type", "absolute")
    fields.require("is_decoder", False)
    fields.require("add_cross_attention", False)
    return EncoderConfig(
        **fields.sizes(30_522, 512, 768, 3072, 12, 12),
        norm_eps=fields.positive_float("layer_norm_eps", 1e-12),
        activation=fields.activation("hidden_act", "gelu"),
        token_types=fields.positive_int("type_vocab_size", 2),
    )


def to_fields(config: EncoderConfig) -> dict[str, Any]:
    """Convert an `EncoderConfig` to the fields of a BERT config.json, without model_type."""
    return {
        **size_fields(config),
        "layer_norm_eps": config.norm_eps,
        "hidden_act": ACTIVATION_NAMES[config.activation][0],
        "type_vocab_size": config.token_types,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
    }


def to_roberta_config(fields: ConfigFields) -> EncoderConfig:
    """Convert a RoBERTa config.json to an `EncoderConfig`: positions start at pad_token_id + 1, window shortened.

    Unlike transformers, Tricycle also counts padding before a text.
    """
    config = to_config(fields)
    padding = fields.get("pad_token_id", 1)
    offset = (padding if isinstance(padding, int) else 1) + 1
    return replace(config, position_offset=offset, context_window=config.context_window - offset)


def to_roberta_fields(config: EncoderConfig) -> dict[str, Any]:
    """Convert an `EncoderConfig` to the fields of a RoBERTa config.json, without model_type."""
    rows = config.context_window + config.position_offset
    return {**to_fields(config), "max_position_embeddings": rows, "pad_token_id": config.position_offset - 1}


PREFIXES = ("", "bert.")
BERT = Family(
    ("bert",),
    "BertModel",
    to_config,
    to_fields,
    NAMES,
    PREFIXES,
    LEGACY_NAMES,
    IGNORED_HEADS,
    config_class=EncoderConfig,
    models="encoders, without task heads",
)
ROBERTA = replace(
    BERT,
    model_types=("roberta", "xlm-roberta", "camembert"),
    architecture="RobertaModel",
    to_config=to_roberta_config,
    to_fields=to_roberta_fields,
    prefixes=("", "roberta."),
)
