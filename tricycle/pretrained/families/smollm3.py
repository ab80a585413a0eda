"""SmolLM3 (Bakouch et al. 2025): Llama without RoPE in every fourth layer, as in Yang et al. 2025, "Rope to nope"."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields, field_error
from tricycle.pretrained.families.family import Family
from tricycle.pretrained.families.llama import (
    LLAMA_NAMES,
    attention_biases,
    check_heads_divide_width,
    common_config,
    common_fields,
    sliding_window_config,
    sliding_window_fields,
)

DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
}


def to_config(fields: ConfigFields) -> ModelConfig:
    """Convert a SmolLM3 config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields = ConfigFields({**DEFAULTS, **fields.values})
    common = common_config(fields, default_key_heads=4)
    uses_rope = _rope_layers(fields, common["n_layers"])
    uses_window = fields.boolean("use_sliding_window", False)
    window = fields.optional_positive_int("sliding_window") if uses_window else None
    types = fields.layer_types(common["n_layers"])
    if types is None:
        types = ["full_attention" if window is None or rope else "sliding_attention" for rope in uses_rope]
    elif window is None and "sliding_attention" in types:
        raise field_error("layer_types", "full_attention for each layer without a window", "sliding_attention")
    return ModelConfig(
        **common,
        **sliding_window_config(types, window),
        unrotated_layers=tuple(layer for layer, rope in enumerate(uses_rope) if not rope),
        **attention_biases(fields),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _rope_layers(fields: ConfigFields, n_layers: int) -> list[int]:
    """Return 1 for each layer with RoPE, else 0, by no_rope_layers or no_rope_layer_interval; ValueError if invalid."""
    layers = fields.get("no_rope_layers")
    if layers is None:
        interval = fields.positive_int("no_rope_layer_interval", 4)
        return [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    if not isinstance(layers, list) or len(layers) != n_layers or any(value not in (0, 1) for value in layers):
        raise field_error("no_rope_layers", f"a list of {n_layers} numbers 0 or 1", layers)
    return layers


def to_fields(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to SmolLM3's config.json, no model_type; ValueError if heads do not divide the width."""
    check_heads_divide_width(config)
    fields = {
        **common_fields(config),
        **sliding_window_fields(config),
        "use_sliding_window": bool(config.window),
        "no_rope_layers": [int(layer not in config.unrotated_layers) for layer in range(config.n_layers)],
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
        "mlp_bias": has_bias(config, "mlp"),
        "pad_token_id": None,  # the default may be outside of the vocabulary
    }
    del fields["head_dim"]  # always the width divided by the number of heads
    return fields


SMOLLM3 = Family(("smollm3",), "SmolLM3ForCausalLM", to_config, to_fields, LLAMA_NAMES, models="SmolLM3")
