"""ModernBERT (Warner et al. 2024): an encoder with RoPE, gated MLPs, and local attention in two of three layers."""

from __future__ import annotations

from typing import Any

from tricycle.configs.encoder import EncoderConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields, activation_name, read_rotary_section, size_fields
from tricycle.pretrained.families.family import Family, TensorNames, gate_first
from tricycle.pretrained.families.llama import (
    attention_biases,
    check_heads_divide_width,
    sliding_window_config,
    sliding_window_fields,
)

NAMES: TensorNames = {
    "token_embedding": ["embeddings.tok_embeddings"],
    "embedding_norm": ["embeddings.norm"],
    "blocks.N.attention_norm": ["layers.N.attn_norm"],
    "blocks.N.attention.qkv": ["layers.N.attn.Wqkv"],
    "blocks.N.attention.projection": ["layers.N.attn.Wo"],
    "blocks.N.mlp_norm": ["layers.N.mlp_norm"],
    "blocks.N.mlp.up": ["layers.N.mlp.Wi"],
    "blocks.N.mlp.projection": ["layers.N.mlp.Wo"],
    "norm": ["final_norm"],
}
IGNORED_HEADS = r"(head|decoder|classifier)\."


def to_config(fields: ConfigFields) -> EncoderConfig:
    """Convert a ModernBERT config.json to an `EncoderConfig` with transformers' defaults; ValueError if unsupported."""
    if fields.get("rope_scaling") is not None:
        fields.require("rope_scaling", {"rope_type": "default"})
    sizes = fields.sizes(50_368, 8192, 768, 1152, 22, 12)
    types = fields.layer_types(sizes["n_layers"])
    if types is None:
        every = fields.positive_int("global_attn_every_n_layers", 3)
        types = ["sliding_attention" if layer % every else "full_attention" for layer in range(sizes["n_layers"])]
    return EncoderConfig(
        **sizes,
        **sliding_window_config(types, fields.positive_int("local_attention", 128)),
        norm_eps=fields.positive_float("norm_eps", 1e-5),
        norm_placement="before",
        first_norm=False,
        token_types=0,
        activation=fields.activation("hidden_activation", "gelu"),
        gated=True,
        bias=fields.boolean("norm_bias", False),
        **attention_biases(fields),
        mlp_bias=fields.boolean("mlp_bias", False),
        positions="rotary",
        rotary_base=_base(fields, "full_attention", "global_rope_theta", 160_000.0),
        rotary_local_base=_base(fields, "sliding_attention", "local_rope_theta", 10_000.0),
    )


def _base(fields: ConfigFields, kind: str, name: str, default: float) -> float:
    """Return the base of RoPE in one kind of layers: of rope_parameters, else of a field; ValueError for a scaling."""
    section = ConfigFields(fields.section("rope_parameters")).section(kind)  # "type" is an older name of rope_type
    scaling = {
        "rope_theta": fields.positive_float(name, default),
        "rope_type": section.get("type", "default"),
    } | section
    ConfigFields(scaling).require("rope_type", "default")
    base: float = read_rotary_section(scaling, f"rope_parameters.{kind}", default)["rotary_base"]
    return base


def to_fields(config: EncoderConfig) -> dict[str, Any]:
    """Convert an `EncoderConfig` to ModernBERT's config.json, no model_type; ValueError if its first block has a norm.

    Raises:
        ValueError: a norm before the attention of the first block, or heads that do not divide the width.
    """
    check_heads_divide_width(config)
    if config.first_norm:
        raise ValueError("first_norm=True: expected a first block without a norm before attention")
    fields = sliding_window_fields(config)
    del fields["sliding_window"]
    return {
        **size_fields(config),
        **fields,
        "local_attention": config.window or 128,
        "norm_eps": config.norm_eps,
        "norm_bias": config.bias,
        "hidden_activation": activation_name(config.activation),
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
        "mlp_bias": has_bias(config, "mlp"),
        "global_rope_theta": config.rotary_base,
        "local_rope_theta": config.rotary_local_base or config.rotary_base,
        "embedding_dropout": config.dropout,
        "pad_token_id": None,  # the default may be outside of the vocabulary
    }


MODERNBERT = Family(
    ("modernbert",),
    "ModernBertModel",
    to_config,
    to_fields,
    NAMES,
    ("", "model."),
    ignored=IGNORED_HEADS,
    layouts={"Wi": gate_first},
    config_class=EncoderConfig,
    models="ModernBERT without head",
)
