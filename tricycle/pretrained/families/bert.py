"""BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019): encoders, read without the heads that stand on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tricycle.configs.encoder import EncoderConfig
from tricycle.layers import Layer
from tricycle.pretrained.families.family import Family, Names
from tricycle.pretrained.fields import ACTIVATION_WORDS, Fields, size_fields
from tricycle.sequences.text_encoder import TextEncoder

NAMES: Names = {
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
HEADS = r"(pooler|cls|lm_head|classifier|qa_outputs)\."
OLD_NAMES = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}


def to_config(fields: Fields) -> EncoderConfig:
    fields.must_be("position_embedding_type", "absolute")
    fields.must_be("is_decoder", False)
    fields.must_be("add_cross_attention", False)
    return EncoderConfig(
        **fields.sizes(30_522, 512, 768, 3072, 12, 12),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=fields.activation("hidden_act", "gelu"),
        token_types=fields.whole("type_vocab_size", 2),
    )


def to_fields(config: EncoderConfig) -> dict[str, Any]:
    return {
        **size_fields(config),
        "layer_norm_eps": config.norm_eps,
        "hidden_act": ACTIVATION_WORDS[config.activation][0],
        "type_vocab_size": config.token_types,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
    }


def to_config_with_offset(fields: Fields) -> EncoderConfig:
    """RoBERTa counts positions from the one after that of padding, whose number is its token's.

    Where padding stands before a text, others leave it out of the count and this library does not.
    """
    config = to_config(fields)
    padding = fields.get("pad_token_id", 1)
    offset = (padding if isinstance(padding, int) else 1) + 1
    return replace(config, position_offset=offset, context_window=config.context_window - offset)


def to_fields_with_offset(config: EncoderConfig) -> dict[str, Any]:
    rows = config.context_window + config.position_offset
    return {**to_fields(config), "max_position_embeddings": rows, "pad_token_id": config.position_offset - 1}


def empty_encoder(config: EncoderConfig) -> Layer:
    """An encoder whose weights are not drawn."""
    return TextEncoder(config, draw_weights=False)


PARTS: dict[str, Any] = {"renamed": OLD_NAMES, "unread": HEADS, "new_model": empty_encoder}
BERT = Family(("bert",), "BertModel", to_config, to_fields, NAMES, ("", "bert."), **PARTS)
ROBERTA = replace(
    BERT,
    model_types=("roberta", "xlm-roberta", "camembert"),
    architecture="RobertaModel",
    to_config=to_config_with_offset,
    to_fields=to_fields_with_offset,
    prefixes=("", "roberta."),
)
