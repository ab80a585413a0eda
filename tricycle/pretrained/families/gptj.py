"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP in parallel, after one shared norm, RoPE on some channels."""

from __future__ import annotations

import math
from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_fields import ConfigFields, activation_name, field_error, size_fields
from tricycle.pretrained.families.family import Family, TensorNames, adjacent_pairs
from tricycle.pretrained.families.gpt2 import SIZE_NAMES

NAMES: TensorNames = {
    "token_embedding": ["transformer.wte"],
    "blocks.N.attention_norm": ["transformer.h.N.ln_1"],
    "blocks.N.attention.qkv": [f"transformer.h.N.attn.{part}_proj" for part in "qkv"],
    "blocks.N.attention.projection": ["transformer.h.N.attn.out_proj"],
    "blocks.N.mlp.up": ["transformer.h.N.mlp.fc_in"],
    "blocks.N.mlp.projection": ["transformer.h.N.mlp.fc_out"],
    "norm": ["transformer.ln_f"],
    "head": ["lm_head"],
}


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a GPT-J config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields.require("tie_word_embeddings", False)
    fields.require("scale_attn_weights", True)
    inner = fields.optional_positive_int("n_inner") or 4 * fields.positive_int("n_embd", 4096)
    sizes = ConfigFields({**fields.values, "n_inner": inner}).sizes(50_400, 2048, 4096, inner, 28, 16, **SIZE_NAMES)
    head_size, n_rotated = sizes["embedding_dim"] // sizes["n_heads"], fields.positive_int("rotary_dim", 64)
    if n_rotated > head_size:
        raise field_error("rotary_dim", f"at most {head_size}, the channels of a head", n_rotated)
    fraction = n_rotated / head_size
    return ModelConfig(
        **sizes,
        norm_eps=fields.positive_float("layer_norm_epsilon", 1e-5),
        parallel=True,
        shared_norm=True,
        activation=fields.activation("activation_function", "gelu_new"),
        positions="rotary",
        # the product with the head size must not be rounded below the number of channels
        rotary_fraction=fraction if int(head_size * fraction) == n_rotated else math.nextafter(fraction, 1),
        qkv_bias=False,
        output_bias=False,
        tied=False,
        head_bias=True,
    )


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a GPT-J config.json, without model_type."""
    return {
        **size_fields(config, **SIZE_NAMES),
        "rotary_dim": int(config.channels_per_head * config.rotary_fraction),
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": activation_name(config.activation),
        "tie_word_embeddings": False,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


LAYOUTS = {"q_proj": adjacent_pairs, "k_proj": adjacent_pairs}
GPTJ = Family(
    ("gptj",), "GPTJForCausalLM", to_config, to_fields, NAMES, ("transformer.", ""), layouts=LAYOUTS, models="GPT-J"
)
