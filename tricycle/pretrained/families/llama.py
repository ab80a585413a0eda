"""Llama and its kin: RMS norms, rotary positions, gated MLPs (Touvron et al. 2023). Mistral, Qwen and OLMo 2 differ by
fields, and OLMo 2 by the places of its norms.

Sources: Jiang et al. 2023 (Mistral 7B); Qwen Team 2024 (Qwen2), 2025 (Qwen3); OLMo et al. 2024 (OLMo 2).
"""

from __future__ import annotations

from typing import Any

from tricycle.configs.model import ModelConfig
from tricycle.pretrained.families.family import Family, Names
from tricycle.pretrained.fields import Fields, activation_word, rotary_fields, size_fields, wrong
from tricycle.pretrained.same import has_bias

LLAMA_NAMES: Names = {
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
PREFIXES = ("model.", "")
OLMO2_NAMES: Names = {  # its norms are on the outputs of a block's parts
    **LLAMA_NAMES,
    "blocks.N.attention_norm": ["model.layers.N.post_attention_layernorm"],
    "blocks.N.mlp_norm": ["model.layers.N.post_feedforward_layernorm"],
}


# -------------------------------------------------------------------- theirs to ours
def common(fields: Fields, n_key_heads: int | None = None, head_size: int | None = None) -> dict[str, Any]:
    """What all of them share.

    Args:
        n_key_heads, head_size: defaults of the class; None for as many as heads of queries, and for their share of the
            width.
    """
    sizes = fields.sizes(32_000, 2048, 4096, 11_008, 32, 32)
    return {
        **sizes,
        "n_key_heads": fields.whole_or_none("num_key_value_heads", n_key_heads) or sizes["n_heads"],
        "head_size": fields.whole_or_none("head_dim", head_size) or 0,
        "norm": "rms_norm",
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "positions": "rotary",
        "activation": fields.activation("hidden_act", "silu"),
        "gated": True,
        "bias": False,
        "tied": fields.flag("tie_word_embeddings", False),
        **rotary_fields(fields),
    }


def from_llama(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    ours = common(fields)
    return ModelConfig(**ours, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def from_mistral(fields: Fields) -> ModelConfig:
    with_defaults = Fields({"intermediate_size": 14_336, "max_position_embeddings": 131_072, **fields.values})
    window = fields.whole_or_none("sliding_window", 4096)
    types = fields.layer_types(fields.whole("num_hidden_layers", 32)) or []
    if window and "full_attention" in types:  # transformers' Mistral gives every layer the window even so
        raise wrong("layer_types", "sliding_attention for each layer", "full_attention")
    return ModelConfig(**common(with_defaults, n_key_heads=8), window=window or 0)


def from_qwen2(fields: Fields) -> ModelConfig:
    return ModelConfig(**_qwen(fields), qkv_bias=True)


def from_qwen3(fields: Fields) -> ModelConfig:
    ours = _qwen(fields, head_size=128)
    bias = fields.flag("attention_bias", False)
    norms = {"qk_norm": True, "qk_norm_gain": True, "qk_norm_eps": ours["norm_eps"]}
    return ModelConfig(**ours, **norms, qkv_bias=bias, output_bias=bias)


def from_olmo2(fields: Fields) -> ModelConfig:
    ours = common(Fields({"vocab_size": 50_304, "rms_norm_eps": 1e-5, **fields.values}))
    norms = {"qk_norm": True, "qk_norm_gain": True, "qk_norm_eps": ours["norm_eps"], "qk_norm_per_head": False}
    bias = fields.flag("attention_bias", False)
    return ModelConfig(**ours, **norms, norm_placement="output", qkv_bias=bias, output_bias=bias)


def _qwen(fields: Fields, head_size: int | None = None) -> dict[str, Any]:
    defaults = {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
    ours = common(Fields({**defaults, **fields.values}), 32, head_size)
    n_layers = ours["n_layers"]
    window = fields.whole_or_none("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    types = fields.layer_types(n_layers)
    if types is None:
        first = fields.get("max_window_layers", 28)
        if not isinstance(first, int) or first < 0:
            raise wrong("max_window_layers", "a whole number, 0 or more", first)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(n_layers)]
    elif window is None and "sliding_attention" in types:
        raise wrong("layer_types", "full_attention for each layer without a window", "sliding_attention")
    return {**ours, **windows(types, window)}


def windows(types: list[str], window: int | None) -> dict[str, Any]:
    """Our fields of windows, by what each layer sees."""
    full = tuple(layer for layer, kind in enumerate(types) if kind == "full_attention")
    if window is None or len(full) == len(types):
        return {}
    return {"window": window, "full_layers": full}


# -------------------------------------------------------------------- ours to theirs
def common_fields(config: ModelConfig) -> dict[str, Any]:
    """What all of them share."""
    theirs = {
        **size_fields(config),
        "num_key_value_heads": config.key_heads,
        "head_dim": config.channels_per_head,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation_word(config.activation),
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rotary_base,
        "attention_dropout": 0.0,
    }
    if scaling := rotary_scaling_fields(config):
        theirs["rope_scaling"] = scaling
    return theirs


def rotary_scaling_fields(config: ModelConfig) -> dict[str, Any]:
    """The object rope_scaling; empty where angles are not scaled."""
    if config.rotary_scaling == "none":
        return {}
    scaling = {"rope_type": config.rotary_scaling, "factor": float(config.rotary_factor)}
    if config.rotary_scaling == "linear":
        return scaling
    return {
        **scaling,
        "low_freq_factor": float(config.rotary_low_frequency),
        "high_freq_factor": float(config.rotary_high_frequency),
        "original_max_position_embeddings": config.rotary_original_window,
    }


def whole_share(config: ModelConfig) -> None:
    """Raise ValueError for heads that do not divide the width: some classes of transformers refuse them."""
    if config.embedding_dim % config.n_heads:
        raise ValueError(f"n_heads={config.n_heads}: expected a divisor of embedding_dim {config.embedding_dim}")


def to_llama(config: ModelConfig) -> dict[str, Any]:
    whole_share(config)
    return {
        **common_fields(config),
        "attention_bias": bool(has_bias(config, "qkv") or has_bias(config, "output")),
        "mlp_bias": has_bias(config, "mlp"),
    }


def to_mistral(config: ModelConfig) -> dict[str, Any]:
    return {**common_fields(config), "sliding_window": config.window or None}


def to_qwen2(config: ModelConfig) -> dict[str, Any]:
    first = next((i for i in range(config.n_layers) if config.window_size(i)), config.n_layers)
    windows_as_once = {"use_sliding_window": bool(config.window), "max_window_layers": first}  # before layer_types
    return {**common_fields(config), **window_fields(config), **windows_as_once}


def to_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {**to_qwen2(config), "attention_bias": has_bias(config, "qkv") or has_bias(config, "output")}


def window_fields(config: ModelConfig) -> dict[str, Any]:
    """What each layer sees."""
    if not config.window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config.n_layers}
    types = ["full_attention" if config.window_size(i) is None else "sliding_attention" for i in range(config.n_layers)]
    return {"sliding_window": config.window, "layer_types": types}


def to_olmo2(config: ModelConfig) -> dict[str, Any]:
    whole_share(config)
    return {**common_fields(config), "attention_bias": has_bias(config, "qkv") or has_bias(config, "output")}


LLAMA = Family(("llama",), "LlamaForCausalLM", from_llama, to_llama, LLAMA_NAMES, PREFIXES)
MISTRAL = Family(("mistral",), "MistralForCausalLM", from_mistral, to_mistral, LLAMA_NAMES, PREFIXES)
QWEN2 = Family(("qwen2",), "Qwen2ForCausalLM", from_qwen2, to_qwen2, LLAMA_NAMES, PREFIXES)
QWEN3 = Family(("qwen3",), "Qwen3ForCausalLM", from_qwen3, to_qwen3, LLAMA_NAMES, PREFIXES)
OLMO2 = Family(("olmo2",), "Olmo2ForCausalLM", from_olmo2, to_olmo2, OLMO2_NAMES, PREFIXES)
