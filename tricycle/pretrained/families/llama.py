"""Llama and similar families: RMS norms, RoPE, gated MLPs (Touvron et al. 2023).

Mistral, Qwen and OLMo 2 have other fields, and OLMo 2 another norm placement.

Sources: Jiang et al. 2023 (Mistral 7B); Qwen Team 2024 (Qwen2), 2025 (Qwen3); OLMo et al. 2024 (OLMo 2).
"""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import (
    ConfigFields,
    activation_name,
    field_error,
    read_rotary_fields,
    rotary_scaling_fields,
    size_fields,
)
from tricycle.pretrained.families.family import Family, TensorNames

LLAMA_NAMES: TensorNames = {
    "token_embedding": ["model.embed_tokens"],
    "blocks.N.attention_norm": ["model.layers.N.input_layernorm"],
    "blocks.N.attention.qkv": [f"model.layers.N.self_attn.{part}_proj" for part in "qkv"],
    "blocks.N.attention.query_norm": ["model.layers.N.self_attn.q_norm"],
    "blocks.N.attention.key_norm": ["model.layers.N.self_attn.k_norm"],
    "blocks.N.attention.projection": ["model.layers.N.self_attn.o_proj"],
    "blocks.N.mlp_norm": ["model.layers.N.post_attention_layernorm"],
    "blocks.N.mlp.up": ["model.layers.N.mlp.up_proj", "model.layers.N.mlp.gate_proj"],
    "blocks.N.mlp.projection": ["model.layers.N.mlp.down_proj"],
    "norm": ["model.norm"],
    "head": ["lm_head"],
}
OLMO2_NAMES: TensorNames = {  # norms of the outputs of attention and MLP
    **LLAMA_NAMES,
    "blocks.N.attention_norm": ["model.layers.N.post_attention_layernorm"],
    "blocks.N.mlp_norm": ["model.layers.N.post_feedforward_layernorm"],
}


# -------------------------------------------------------------------- from config.json
def common_config(
    fields: ConfigFields,
    default_key_heads: int | None = None,
    default_head_size: int | None = None,
    default_fraction: float | None = None,
) -> dict[str, Any]:
    """Convert config.json fields to those of `ModelConfig` that all Llama-like families share, as keyword arguments.

    Args:
        default_key_heads: None for the number of query heads.
        default_head_size: None for the width divided by the number of heads.
        default_fraction: of rotary channels; None if it must be 1.
    """
    sizes = fields.sizes(32_000, 2048, 4096, 11_008, 32, 32)
    return {
        **sizes,
        "n_key_heads": fields.optional_positive_int("num_key_value_heads", default_key_heads) or sizes["n_heads"],
        "head_size": fields.optional_positive_int("head_dim", default_head_size) or 0,
        "norm": "rms_norm",
        "norm_eps": fields.positive_float("rms_norm_eps", 1e-6),
        "positions": "rotary",
        "activation": fields.activation("hidden_act", "silu"),
        "gated": True,
        "bias": False,
        "tied": fields.boolean("tie_word_embeddings", False),
        **read_rotary_fields(fields, default_fraction=default_fraction),
    }


def attention_biases(fields: ConfigFields, default: bool = False) -> dict[str, Any]:
    """Convert the field attention_bias to `ModelConfig`'s, for queries, keys and values and for the output."""
    bias = fields.boolean("attention_bias", default)
    return {"qkv_bias": bias, "output_bias": bias}


def qk_norms(common: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of RMS norms with gains on queries and keys, with the eps of the norms in `common`."""
    return {"qk_norm": True, "qk_norm_gain": True, "qk_norm_eps": common["norm_eps"]}


def from_llama(fields: ConfigFields) -> ModelConfig:
    """Convert a Llama config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    biases = {**attention_biases(fields), "mlp_bias": fields.boolean("mlp_bias", False)}
    return ModelConfig(**common_config(fields), **biases)


def from_mistral(fields: ConfigFields) -> ModelConfig:
    """Convert a Mistral config.json to a `ModelConfig`; one window for all layers (default 4096); else ValueError."""
    with_defaults = ConfigFields({"intermediate_size": 14_336, "max_position_embeddings": 131_072, **fields.values})
    window = fields.optional_positive_int("sliding_window", 4096)
    types = fields.layer_types(fields.positive_int("num_hidden_layers", 32)) or []
    if window and "full_attention" in types:  # transformers ignores this and uses the window everywhere
        raise field_error("layer_types", "sliding_attention for each layer", "full_attention")
    return ModelConfig(**common_config(with_defaults, default_key_heads=8), window=window or 0)


def from_qwen2(fields: ConfigFields) -> ModelConfig:
    """Convert a Qwen2 config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    return ModelConfig(**_qwen_config(fields), qkv_bias=True)


def from_qwen3(fields: ConfigFields) -> ModelConfig:
    """Convert a Qwen3 config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    common = _qwen_config(fields, head_size=128)
    return ModelConfig(**common, **qk_norms(common), **attention_biases(fields))


def from_olmo2(fields: ConfigFields) -> ModelConfig:
    """Convert an OLMo 2 config.json, biases included, to a `ModelConfig` with defaults; ValueError if unsupported."""
    common = common_config(ConfigFields({"vocab_size": 50_304, "rms_norm_eps": 1e-5, **fields.values}))
    norms = {**qk_norms(common), "qk_norm_per_head": False, "norm_placement": "output"}
    return ModelConfig(**common, **norms, **attention_biases(fields))


def _qwen_config(fields: ConfigFields, head_size: int | None = None) -> dict[str, Any]:
    """Return the config fields that Qwen models share; layers from `max_window_layers` on have any sliding window."""
    defaults = {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
    common = common_config(ConfigFields({**defaults, **fields.values}), 32, head_size)
    n_layers = common["n_layers"]
    uses_window = fields.boolean("use_sliding_window", False)
    window = fields.optional_positive_int("sliding_window", 4096) if uses_window else None
    types = fields.layer_types(n_layers)
    if types is None:
        first_window_layer = fields.get("max_window_layers", 28)
        if not isinstance(first_window_layer, int) or first_window_layer < 0:
            raise field_error("max_window_layers", "an integer of at least 0", first_window_layer)
        types = ["full_attention" if layer < first_window_layer else "sliding_attention" for layer in range(n_layers)]
    elif window is None and "sliding_attention" in types:
        raise field_error("layer_types", "full_attention for each layer without a window", "sliding_attention")
    return {**common, **sliding_window_config(types, window)}


def sliding_window_config(types: list[str], window: int | None) -> dict[str, Any]:
    """Return `ModelConfig` fields window and full_layers (layer indices); {} without a window or a layer with it."""
    full_layers = tuple(layer for layer, kind in enumerate(types) if kind == "full_attention")
    if window is None or len(full_layers) == len(types):
        return {}
    return {"window": window, "full_layers": full_layers}


# -------------------------------------------------------------------- to config.json
def common_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields that all Llama-like families share: sizes, norm, activation, tied head, RoPE."""
    fields = {
        **size_fields(config),
        "num_key_value_heads": config.key_heads,
        "head_dim": config.channels_per_head,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation_name(config.activation),
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rotary_base,
        "attention_dropout": 0.0,
    }
    if scaling := rotary_scaling_fields(config):
        fields["rope_scaling"] = scaling
    return fields


def layer_norm_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields that families with layer norms, RoPE and Llama's names of tensors share."""
    return {
        **size_fields(config),
        "num_key_value_heads": config.key_heads,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": activation_name(config.activation),
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rotary_base,
        "rope_scaling": rotary_scaling_fields(config) or None,
    }


def check_heads_divide_width(config: ModelConfig) -> None:
    """Raise ValueError if the heads do not divide the width, which some classes of transformers require."""
    if config.embedding_dim % config.n_heads:
        raise ValueError(f"n_heads={config.n_heads}: expected a divisor of embedding_dim {config.embedding_dim}")


def to_llama(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Llama's config.json, no model_type; ValueError if heads do not divide the width."""
    check_heads_divide_width(config)
    return {
        **common_fields(config),
        "attention_bias": bool(has_bias(config, "qkv") or has_bias(config, "output")),
        "mlp_bias": has_bias(config, "mlp"),
    }


def to_mistral(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Mistral's config.json, no model_type; drop fields it lacks (export checks them)."""
    return {**common_fields(config), "sliding_window": config.window or None}


def to_qwen2(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a Qwen2 config.json, without model_type."""
    first_window_layer = next((i for i in range(config.n_layers) if config.window_size(i)), config.n_layers)
    # Older versions of transformers read these instead of layer_types.
    legacy = {"use_sliding_window": bool(config.window), "max_window_layers": first_window_layer}
    return {**common_fields(config), **sliding_window_fields(config), **legacy}


def to_qwen3(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to the fields of a Qwen3 config.json, without model_type."""
    return {**to_qwen2(config), "attention_bias": has_bias(config, "qkv") or has_bias(config, "output")}


def sliding_window_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields sliding_window (None without one) and layer_types (a name for each layer)."""
    if not config.window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config.n_layers}
    types = ["full_attention" if config.window_size(i) is None else "sliding_attention" for i in range(config.n_layers)]
    return {"sliding_window": config.window, "layer_types": types}


def to_olmo2(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to OLMo 2's config.json, no model_type; ValueError if heads do not divide the width."""
    check_heads_divide_width(config)
    return {**common_fields(config), "attention_bias": has_bias(config, "qkv") or has_bias(config, "output")}


LLAMA = Family(
    ("llama",),
    "LlamaForCausalLM",
    from_llama,
    to_llama,
    LLAMA_NAMES,
    models="Llama 2 and 3, SmolLM2, TinyLlama",
)
MISTRAL = Family(("mistral",), "MistralForCausalLM", from_mistral, to_mistral, LLAMA_NAMES, models="Mistral 7B")
QWEN2 = Family(("qwen2",), "Qwen2ForCausalLM", from_qwen2, to_qwen2, LLAMA_NAMES, models="Qwen 2 and 2.5")
QWEN3 = Family(("qwen3",), "Qwen3ForCausalLM", from_qwen3, to_qwen3, LLAMA_NAMES, models="Qwen 3")
OLMO2 = Family(("olmo2",), "Olmo2ForCausalLM", from_olmo2, to_olmo2, OLMO2_NAMES, models="OLMo 2")
