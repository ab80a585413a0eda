"""T5 (Raffel et al. 2020), T5 1.1 (Shazeer 2020) and Flan-T5 (Chung et al. 2022): encoder-decoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tricycle.configs.encoder_decoder import EncoderDecoderConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ACTIVATION_NAMES, ConfigFields, activation_name, field_error
from tricycle.pretrained.families.family import Family, TensorNames

BLOCK_NAMES: TensorNames = {
    "attention.softmax_scales": ["0.SelfAttention.relative_attention_bias.weight"],
    "attention.qkv": [f"0.SelfAttention.{part}" for part in "qkv"],
    "attention.projection": ["0.SelfAttention.o"],
    "attention_norm": ["0.layer_norm"],
    "cross.query": ["1.EncDecAttention.q"],  # in the decoder only
    "cross.key": ["1.EncDecAttention.k"],
    "cross.value": ["1.EncDecAttention.v"],
    "cross.projection": ["1.EncDecAttention.o"],
    "cross_norm": ["1.layer_norm"],
    "mlp.up": ["2.DenseReluDense.wi"],
    "mlp.projection": ["2.DenseReluDense.wo"],
    "mlp_norm": ["2.layer_norm"],
}
ENCODER_NAMES = {
    ours: [name.replace("2.", "1.", 1) for name in theirs]
    for ours, theirs in BLOCK_NAMES.items()
    if not ours.startswith("cross")
}
NAMES: TensorNames = {
    "encoder.embedding": ["shared"],
    **{
        f"encoder.blocks.N.{ours}": [f"encoder.block.N.layer.{n}" for n in names]
        for ours, names in ENCODER_NAMES.items()
    },
    **{
        f"decoder.blocks.N.{ours}": [f"decoder.block.N.layer.{n}" for n in names] for ours, names in BLOCK_NAMES.items()
    },
    "encoder.norm": ["encoder.final_layer_norm"],
    "decoder.norm": ["decoder.final_layer_norm"],
    "head": ["lm_head"],
}
# T5 has no table of positions, so its texts are limited by memory only.
CONTEXT_WINDOW = 2**15
# Copies of the table "shared" that older versions of transformers saved, and one that no computation uses.
COPIES = r"(encoder|decoder)\.embed_tokens\.|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\."


def is_gated(fields: dict[str, Any]) -> bool:
    """Return whether the MLPs of a config.json are gated: its feed_forward_proj begins with "gated-"."""
    return str(fields.get("feed_forward_proj")).startswith("gated-")


def to_config(fields: ConfigFields) -> EncoderDecoderConfig:
    """Convert a T5 config.json to an `EncoderDecoderConfig` with transformers' defaults; ValueError if unsupported."""
    fields.require("is_encoder_decoder", True)
    n_heads, width = fields.positive_int("num_heads", 8), fields.positive_int("d_model", 512)
    n_layers = fields.positive_int("num_layers", 6)
    # Models of version 1.1 are neither scaled nor tied. Newer files say so by the first field, and older by the second.
    scaled = fields.boolean("scale_decoder_outputs", fields.boolean("tie_word_embeddings", True))
    gated = is_gated(dict(fields.values))
    name = fields.get("feed_forward_proj", "relu")
    activation = {"feed_forward_proj": name.removeprefix("gated-") if isinstance(name, str) else name}
    if name == "gated-gelu":  # the only name whose function is another one in this family
        activation = {"feed_forward_proj": ACTIVATION_NAMES["gelu"][0]}
    if "dense_act_fn" in fields:  # newer files have the function itself, too, which then counts
        activation = {"dense_act_fn": fields.get("dense_act_fn")}
    start = fields.get("decoder_start_token_id", fields.get("pad_token_id", 0))
    return EncoderDecoderConfig(
        vocab_size=fields.positive_int("vocab_size", 32_128),
        context_window=CONTEXT_WINDOW,
        embedding_dim=width,
        head_size=fields.positive_int("d_kv", 64),
        hidden_size=fields.positive_int("d_ff", 2048),
        n_heads=n_heads,
        n_layers=n_layers,
        n_decoder_layers=fields.optional_positive_int("num_decoder_layers") or n_layers,
        relative_buckets=fields.positive_int("relative_attention_num_buckets", 32),
        relative_distance=fields.positive_int("relative_attention_max_distance", 128),
        norm="rms_norm",
        norm_eps=fields.positive_float("layer_norm_epsilon", 1e-6),
        activation=ConfigFields(activation).activation(next(iter(activation)), ""),
        gated=gated,
        positions="none",
        score_scale=1.0,
        bias=False,
        tied=scaled,
        output_scale=width**-0.5 if scaled else 1.0,
        start_token=start if isinstance(start, int) and not isinstance(start, bool) else 0,
    )


def to_fields(config: EncoderDecoderConfig) -> dict[str, Any]:
    """Convert an `EncoderDecoderConfig` to fields of a T5 config.json, without model_type; ValueError for biases."""
    if any(has_bias(config, part) for part in ("qkv", "output", "mlp")):
        raise field_error("bias", "False", True)
    name = "gelu" if config.is_gated and config.activation == "gelu" else activation_name(config.activation)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.embedding_dim,
        "d_kv": config.channels_per_head,
        "d_ff": config.mlp_width,
        "num_heads": config.n_heads,
        "num_layers": config.n_layers,
        "num_decoder_layers": config.n_decoder_layers or config.n_layers,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": f"gated-{name}" if config.is_gated else name,
        "dropout_rate": config.dropout,
        "tie_word_embeddings": config.tied,
        "decoder_start_token_id": config.start_token,
        "pad_token_id": config.start_token,
        "is_encoder_decoder": True,
    }


T5 = Family(
    ("t5",),
    "T5ForConditionalGeneration",
    to_config,
    to_fields,
    NAMES,
    prefixes=("",),
    legacy_names={r"DenseReluDense\.wi_1\.": "DenseReluDense.wi."},  # as in GGUF files, with or without gates
    ignored=COPIES,
    config_class=EncoderDecoderConfig,
    fallbacks={"lm_head.weight": "shared.weight", "shared.weight": "encoder.embed_tokens.weight"},
    applies_to=lambda fields: not is_gated(fields),
    models="encoder-decoders: T5, Flan-T5",
)
GATED_NAMES: TensorNames = {
    ours: [name + part for name in names for part in (("_1", "_0") if name.endswith(".wi") else ("",))]
    for ours, names in NAMES.items()
}
T5_GATED = replace(T5, names=GATED_NAMES, legacy_names={}, applies_to=is_gated)
