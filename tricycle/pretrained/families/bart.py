"""BART (Lewis et al. 2020) and Marian (Junczys-Dowmunt et al. 2018, such as OPUS-MT): encoder-decoders."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tricycle.configs.encoder_decoder import EncoderDecoderConfig
from tricycle.pretrained.config_fields import ConfigFields, activation_name, field_error
from tricycle.pretrained.families.family import Family, TensorNames

BLOCK_NAMES: TensorNames = {
    "attention.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "attention.projection": ["self_attn.out_proj"],
    "attention_norm": ["self_attn_layer_norm"],
    "mlp.up": ["fc1"],
    "mlp.projection": ["fc2"],
    "mlp_norm": ["final_layer_norm"],
    "cross.query": ["encoder_attn.q_proj"],  # cross-attention is in the decoder only
    "cross.key": ["encoder_attn.k_proj"],
    "cross.value": ["encoder_attn.v_proj"],
    "cross.projection": ["encoder_attn.out_proj"],
    "cross_norm": ["encoder_attn_layer_norm"],
}
NAMES: TensorNames = {
    "encoder.embedding": ["model.shared"],
    "logit_bias": ["final_logits_bias"],
    **{f"{side}.positions": [f"model.{side}.embed_positions"] for side in ("encoder", "decoder")},
    **{f"{side}.embedding_norm": [f"model.{side}.layernorm_embedding"] for side in ("encoder", "decoder")},
    **{
        f"{side}.blocks.N.{ours}": [f"model.{side}.layers.N.{name}" for name in theirs]
        for side in ("encoder", "decoder")
        for ours, theirs in BLOCK_NAMES.items()
    },
}
POSITION_OFFSET = 2  # rows of the position embedding that are not used
COPIES = r"model\.(encoder|decoder)\.(embed_tokens\.weight|version)$"


def to_config(fields: ConfigFields) -> EncoderDecoderConfig:
    """Convert a BART config.json to an `EncoderDecoderConfig` by transformers' defaults; ValueError if unsupported."""
    for name in ("is_encoder_decoder", "tie_word_embeddings", "normalize_embedding"):
        fields.require(name, True)
    for name in ("normalize_before", "add_final_layer_norm", "static_position_embeddings"):
        fields.require(name, False)
    return EncoderDecoderConfig(
        **_common_config(fields, vocab_size=50_265, start_token=2),
        positions="learned",
        position_offset=POSITION_OFFSET,
        embedding_norm=True,
    )


def to_marian_config(fields: ConfigFields) -> EncoderDecoderConfig:
    """Convert a Marian config.json to an `EncoderDecoderConfig` with defaults; ValueError if unsupported."""
    for name in ("is_encoder_decoder", "tie_word_embeddings", "share_encoder_decoder_embeddings"):
        fields.require(name, True)
    for name in ("normalize_before", "add_final_layer_norm", "normalize_embedding"):
        fields.require(name, False)
    fields.require("static_position_embeddings", True)
    common = _common_config(fields, vocab_size=58_101, start_token=58_100)
    if fields.get("decoder_vocab_size") not in (None, common["vocab_size"]):
        raise field_error(
            "decoder_vocab_size", f"{common['vocab_size']}, the vocab_size", fields.get("decoder_vocab_size")
        )
    return EncoderDecoderConfig(**common, positions="none", sinusoids="halves")


def _common_config(fields: ConfigFields, vocab_size: int, start_token: int) -> dict[str, Any]:
    """Return `EncoderDecoderConfig` arguments that both families share; ValueError if the decoder's sizes differ.

    Raises:
        ValueError: a value is not supported, or encoder and decoder differ in width or heads.
    """
    width = fields.positive_int("d_model", 1024)
    heads = fields.positive_int("encoder_attention_heads", 16)
    hidden_size = fields.positive_int("encoder_ffn_dim", 4096)
    for name, default, size in (("attention_heads", 16, heads), ("ffn_dim", 4096, hidden_size)):
        if fields.positive_int(f"decoder_{name}", default) != size:
            raise field_error(f"decoder_{name}", f"{size}, as encoder_{name}", fields.get(f"decoder_{name}", default))
    start = fields.get("decoder_start_token_id", start_token)
    return {
        "vocab_size": fields.positive_int("vocab_size", vocab_size),
        "context_window": fields.positive_int("max_position_embeddings", 1024),
        "embedding_dim": width,
        "n_heads": heads,
        "hidden_size": hidden_size,
        "n_layers": fields.positive_int("encoder_layers", 12),
        "n_decoder_layers": fields.positive_int("decoder_layers", 12),
        "activation": fields.activation("activation_function", "gelu"),
        "norm_placement": "after",
        "embedding_scale": math.sqrt(width) if fields.boolean("scale_embedding", False) else 1.0,
        "logit_bias": True,
        "start_token": start if isinstance(start, int) and not isinstance(start, bool) else start_token,
    }


def to_fields(config: EncoderDecoderConfig) -> dict[str, Any]:
    """Convert an `EncoderDecoderConfig` to the fields of a BART config.json, without model_type."""
    both = {"attention_heads": config.n_heads, "ffn_dim": config.mlp_width}
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_window,
        "d_model": config.embedding_dim,
        **{f"{side}_{name}": value for name, value in both.items() for side in ("encoder", "decoder")},
        "encoder_layers": config.n_layers,
        "decoder_layers": config.n_decoder_layers or config.n_layers,
        "activation_function": activation_name(config.activation),
        "scale_embedding": config.embedding_scale != 1,
        "dropout": config.dropout,
        "decoder_start_token_id": config.start_token,
        "tie_word_embeddings": config.tied,
        "forced_eos_token_id": None,
        "is_encoder_decoder": True,
    }


def to_marian_fields(config: EncoderDecoderConfig) -> dict[str, Any]:
    """Convert an `EncoderDecoderConfig` to the fields of a Marian config.json, without model_type."""
    return {**to_fields(config), "pad_token_id": config.start_token}


BART = Family(
    ("bart",),
    "BartForConditionalGeneration",
    to_config,
    to_fields,
    NAMES,
    ("model.", ""),
    ignored=COPIES,
    config_class=EncoderDecoderConfig,
    fallbacks={"final_logits_bias": "", "model.shared.weight": "model.encoder.embed_tokens.weight"},
    models="BART",
)
MARIAN = replace(
    BART,
    model_types=("marian",),
    architecture="MarianMTModel",
    to_config=to_marian_config,
    to_fields=to_marian_fields,
    ignored=COPIES.replace("embed_tokens", "embed_(tokens|positions)"),
    models="OPUS-MT",
)
