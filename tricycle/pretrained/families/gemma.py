"""Gemma 2 and the text model of Gemma 3 (Gemma Team 2024, 2025): norms before and after, sliding-window layers."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import (
    ConfigFields,
    activation_name,
    field_error,
    read_rotary_section,
    rotary_scaling_fields,
)
from tricycle.pretrained.families.family import Family, TensorNames
from tricycle.pretrained.families.llama import (
    LLAMA_NAMES,
    attention_biases,
    check_heads_divide_width,
    common_config,
    common_fields,
    qk_norms,
    sliding_window_config,
    sliding_window_fields,
)

NAMES: TensorNames = {
    **LLAMA_NAMES,
    "blocks.N.attention_post_norm": ["model.layers.N.post_attention_layernorm"],
    "blocks.N.mlp_norm": ["model.layers.N.pre_feedforward_layernorm"],
    "blocks.N.mlp_post_norm": ["model.layers.N.post_feedforward_layernorm"],
}
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
DEFAULT_WINDOW = 4096
GEMMA3_DEFAULTS = {**DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072}


# -------------------------------------------------------------------- from config.json
def from_gemma2(fields: ConfigFields) -> ModelConfig:
    """Convert a Gemma 2 config.json to a `ModelConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields = ConfigFields({**DEFAULTS, **fields.values})
    common = _common_config(fields, caps=(50.0, 30.0))
    types = fields.layer_types(common["n_layers"]) or periodic_layer_types(common["n_layers"], 2)
    return ModelConfig(**common, **sliding_window_config(types, _sliding_window(fields, types)))


def from_gemma3(fields: ConfigFields) -> ModelConfig:
    """Convert a Gemma 3 config.json or its text_config to a `ModelConfig` with defaults; ValueError if unsupported."""
    fields = text_fields(fields, GEMMA3_DEFAULTS, "gemma3")
    fields.require("attn_logit_softcapping", None)  # transformers ignores this field
    common = _common_config(
        ConfigFields({**fields.values, "rope_scaling": None, "rope_parameters": None}), caps=(None, None)
    )
    types = fields.layer_types(common["n_layers"])
    if types is None:
        period = fields.positive_int("sliding_window_pattern", fields.positive_int("_sliding_window_pattern", 6))
        types = periodic_layer_types(common["n_layers"], period)
    windows = sliding_window_config(types, _sliding_window(fields, types))
    return ModelConfig(**{**common, **qk_norms(common), **windows, **rope_config(fields)})


def text_fields(fields: ConfigFields, defaults: dict[str, Any], model_type: str) -> ConfigFields:
    """Return the text model's fields with `defaults`: `text_config`, ValueError if `model_type` lacks it, or all."""
    section = fields.section("text_config")
    if fields.get("model_type") == model_type and "text_config" not in fields:
        raise field_error("text_config", "an object", None)
    name = "tie_word_embeddings"
    tied = {} if fields.get(name) is None else {name: fields.get(name)}
    return ConfigFields({**defaults, **(tied | section if section else fields.values)})


def _common_config(fields: ConfigFields, caps: tuple[float | None, float | None]) -> dict[str, Any]:
    """Return the fields Gemma 2, 3 share; `caps`: default soft-caps of scores and logits; ValueError if unsupported."""
    if fields.get("use_bidirectional_attention"):
        raise field_error("use_bidirectional_attention", "false", fields.get("use_bidirectional_attention"))
    common = common_config(fields, default_key_heads=4, default_head_size=256)
    activation = fields.get("hidden_activation") or "gelu_pytorch_tanh"  # null in some files
    return {
        **common,
        "norm_unit_offset": True,
        "norm_placement": "both",
        "activation": ConfigFields({"hidden_activation": activation}).activation("hidden_activation", ""),
        **attention_biases(fields),
        "score_scale": fields.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        "score_cap": fields.optional_positive_float("attn_logit_softcapping", caps[0]) or 0.0,
        "logit_cap": fields.optional_positive_float("final_logit_softcapping", caps[1]) or 0.0,
        "embedding_scale": common["embedding_dim"] ** 0.5,
    }


def periodic_layer_types(n_layers: int, period: int) -> list[str]:
    """Return the attention types of layers: full in the last layer of each period, sliding-window in the others."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(n_layers)]


def _sliding_window(fields: ConfigFields, types: list[str]) -> int | None:
    """Return the sliding-window size, by default DEFAULT_WINDOW, None for null; ValueError if layers then need one."""
    window = fields.optional_positive_int("sliding_window", DEFAULT_WINDOW)
    if window is None and "sliding_attention" in types:
        raise field_error("sliding_window", "a positive integer, because layers have sliding_attention", None)
    return window


def rope_config(fields: ConfigFields) -> dict[str, Any]:
    """Return the `rotary_*` fields: sliding-window layers have another base, and must be unscaled, else ValueError."""
    theta = fields.positive_float("rope_theta", 1_000_000.0)
    local_theta = fields.positive_float("rope_local_base_freq", 10_000.0)
    place = "rope_parameters"
    by_type = ConfigFields(fields.section(place))
    full = by_type.section("full_attention") | fields.section("rope_scaling")
    rope = read_rotary_section(full, f"{place}.full_attention", theta)
    local = by_type.section("sliding_attention")
    local_rope = read_rotary_section(local, f"{place}.sliding_attention", local_theta)
    if local_rope.get("rotary_scaling"):
        raise field_error(f"{place}.sliding_attention.rope_type", "default", local_rope["rotary_scaling"])
    return {**rope, "rotary_local_base": local_rope["rotary_base"]}


# -------------------------------------------------------------------- to config.json
def to_gemma2(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Gemma 2's config.json, no model_type; ValueError if heads do not divide the width."""
    check_heads_divide_width(config)
    fields = {
        **common_fields(config),
        **sliding_window_fields(config),
        "hidden_activation": activation_name(config.activation),
        # transformers 5 requires an integer
        "query_pre_attn_scalar": max(1, round((config.score_scale or config.channels_per_head**-0.5) ** -2)),
        "attn_logit_softcapping": config.score_cap or None,
        "final_logit_softcapping": config.logit_cap or None,
        "sliding_window": config.window or DEFAULT_WINDOW,  # required even if no layer uses it
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }
    del fields["hidden_act"]
    return fields


def to_gemma3(config: ModelConfig) -> dict[str, Any]:
    """Convert a `ModelConfig` to Gemma 3's config.json, no model_type; ValueError if heads do not divide the width."""
    return {**to_gemma2(config), **rope_fields(config)}


def rope_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of RoPE that Gemma 3 has beside rope_theta."""
    local_base = config.rotary_local_base or config.rotary_base
    return {"rope_local_base_freq": local_base, "rope_scaling": rotary_scaling_fields(config) or None}


GEMMA2 = Family(("gemma2",), "Gemma2ForCausalLM", from_gemma2, to_gemma2, NAMES, models="Gemma 2")
GEMMA3 = Family(
    ("gemma3_text", "gemma3"),
    "Gemma3ForCausalLM",
    from_gemma3,
    to_gemma3,
    NAMES,
    PREFIXES,
    ignored=r"(model\.)?(vision_tower|multi_modal_projector)\.",  # the vision model
    models="Gemma 3 without image input",
)
