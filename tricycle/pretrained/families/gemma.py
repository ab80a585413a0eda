"""Gemma 2 and 3 (Gemma Team 2024, 2025), the latter's text part: norms around each part, and windows in most layers."""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.families.family import Family, Names
from tricycle.pretrained.families.llama import (
    LLAMA_NAMES,
    common,
    common_fields,
    rotary_scaling_fields,
    whole_share,
    window_fields,
    windows,
)
from tricycle.pretrained.fields import Fields, activation_word, rotary_section, wrong
from tricycle.pretrained.same import has_bias

NAMES: Names = {
    **LLAMA_NAMES,
    "blocks.N.attention_post_norm": ["model.layers.N.post_attention_layernorm"],
    "blocks.N.mlp_norm": ["model.layers.N.pre_feedforward_layernorm"],
    "blocks.N.mlp_post_norm": ["model.layers.N.post_feedforward_layernorm"],
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
USUAL_WINDOW = 4096
GEMMA3_DEFAULTS = {**DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072}


# -------------------------------------------------------------------- theirs to ours
def from_gemma2(fields: Fields) -> ModelConfig:
    fields = Fields({**DEFAULTS, **fields.values})
    ours = _common(fields, caps=(50.0, 30.0))
    types = fields.layer_types(ours["n_layers"]) or _pattern(ours["n_layers"], 2)
    return ModelConfig(**ours, **windows(types, _window(fields, types)))


def from_gemma3(fields: Fields) -> ModelConfig:
    fields = _text_part(fields)
    ours = _common(Fields({**fields.values, "rope_scaling": None, "rope_parameters": None}), caps=(None, None))
    norms = {"qk_norm": True, "qk_norm_gain": True, "qk_norm_eps": ours["norm_eps"]}
    types = fields.layer_types(ours["n_layers"])
    if types is None:
        every = fields.whole("sliding_window_pattern", fields.whole("_sliding_window_pattern", 6))
        types = _pattern(ours["n_layers"], every)
    return ModelConfig(**{**ours, **norms, **windows(types, _window(fields, types)), **_rotary(fields)})


def _text_part(fields: Fields) -> Fields:
    """The fields of the text model, which stand inside where there is one for pictures too."""
    inside = fields.section("text_config")
    if fields.get("model_type") == "gemma3" and "text_config" not in fields:
        raise wrong("text_config", "an object", None)
    name = "tie_word_embeddings"
    tied = {} if fields.get(name) is None else {name: fields.get(name)}
    return Fields({**GEMMA3_DEFAULTS, **(tied | inside if inside else fields.values)})


def _common(fields: Fields, caps: tuple[float | None, float | None]) -> dict[str, Any]:
    """What both have in common; `caps` are the class's defaults for scores and for logits."""
    if fields.get("use_bidirectional_attention"):
        raise wrong("use_bidirectional_attention", "false", fields.get("use_bidirectional_attention"))
    bias = fields.flag("attention_bias", False)
    ours = common(fields, n_key_heads=4, head_size=256)
    activation = fields.get("hidden_activation") or "gelu_pytorch_tanh"  # null in some files
    return {
        **ours,
        "norm_unit_offset": True,
        "norm_placement": "both",
        "activation": Fields({"hidden_activation": activation}).activation("hidden_activation", ""),
        "qkv_bias": bias,
        "output_bias": bias,
        "score_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "score_cap": fields.number_or_none("attn_logit_softcapping", caps[0]) or 0.0,
        "logit_cap": fields.number_or_none("final_logit_softcapping", caps[1]) or 0.0,
        "embedding_scale": ours["embedding_dim"] ** 0.5,
    }


def _pattern(n_layers: int, every: int) -> list[str]:
    """The last of so many layers sees all tokens."""
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(n_layers)]


def _window(fields: Fields, types: list[str]) -> int | None:
    window = fields.whole_or_none("sliding_window", USUAL_WINDOW)
    if window is None and "sliding_attention" in types:
        raise wrong("sliding_window", "a whole number above 0, for layers of sliding_attention", None)
    return window


def _rotary(fields: Fields) -> dict[str, Any]:
    """Layers with a window turn by a speed of their own, which is never scaled."""
    theta = fields.number("rope_theta", 1_000_000.0)
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    place = "rope_parameters"
    sections = fields.section(place)
    if "full_attention" in sections or "sliding_attention" in sections:
        inside = Fields(sections)
        full = inside.section("full_attention") | fields.section("rope_scaling")
        local = inside.section("sliding_attention")
    else:
        full, local = sections | fields.section("rope_scaling"), {}
    ours = rotary_section(full, f"{place}.full_attention", theta)
    ours_local = rotary_section(local, f"{place}.sliding_attention", local_theta)
    if ours_local.get("rotary_scaling"):
        raise wrong(f"{place}.sliding_attention.rope_type", "default", ours_local["rotary_scaling"])
    if ours_local["rotary_fraction"] != ours["rotary_fraction"]:
        raise wrong(f"{place}.partial_rotary_factor", "the same in all layers", ours_local["rotary_fraction"])
    return {**ours, "rotary_local_base": ours_local["rotary_base"]}


# -------------------------------------------------------------------- ours to theirs
def to_gemma2(config: ModelConfig) -> dict[str, Any]:
    whole_share(config)
    theirs = {
        **common_fields(config),
        **window_fields(config),
        "hidden_activation": activation_word(config.activation),
        # a whole number, in transformers 5
        "query_pre_attn_scalar": max(1, round((config.score_scale or config.channels_per_head**-0.5) ** -2)),
        "attn_logit_softcapping": config.score_cap or None,
        "final_logit_softcapping": config.logit_cap or None,
        "sliding_window": config.window or USUAL_WINDOW,  # must be there even if no layer has one
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }
    del theirs["hidden_act"]
    return theirs


def to_gemma3(config: ModelConfig) -> dict[str, Any]:
    return {
        **to_gemma2(config),
        "rope_local_base_freq": config.rotary_local_base or config.rotary_base,
        "rope_scaling": rotary_scaling_fields(config) or None,
    }


GEMMA2 = Family(("gemma2",), "Gemma2ForCausalLM", from_gemma2, to_gemma2, NAMES, ("model.", ""))
GEMMA3 = Family(
    ("gemma3_text", "gemma3"),
    "Gemma3ForCausalLM",
    from_gemma3,
    to_gemma3,
    NAMES,
    ("model.", "language_model.model.", "model.language_model.", "language_model.", ""),
    unread=r"(model\.)?(vision_tower|multi_modal_projector)\.",  # of pictures
)
