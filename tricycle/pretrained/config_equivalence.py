"""When two configs make the same model: each field spelled in one way, and those that do not matter left out."""

from __future__ import annotations

import math
from typing import Any

from tricycle.configs.encoder import EncoderConfig
from tricycle.configs.model import ModelConfig
from tricycle.configs.presets import model_fields

# What says how a model starts, learns or rounds, and not what it computes.
FREE = ("dropout", "seed", "precision", "zero_projections", "expansion_ratio")


def effective_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields that decide what a model computes, with all that follows from others written out."""
    values = {name: getattr(config, name) for name in model_fields(ModelConfig.__dataclass_fields__)}
    for name in FREE:
        del values[name]
    values |= {
        "n_key_heads": config.key_heads,
        "head_size": config.channels_per_head,
        "hidden_size": config.mlp_width,
        "gated": config.is_gated,
        "activation": "swish" if config.activation == "swiglu" else config.activation,
        "score_scale": config.score_scale or config.channels_per_head**-0.5,
        "embedding_size": config.embedding_size or config.embedding_dim,
    }
    for part in ("qkv", "output", "mlp"):
        values[f"{part}_bias"] = has_bias(config, part)
    values["bias"] = config.bias and config.norm == "layer_norm"  # what is left of it are the norms' own
    if isinstance(config, EncoderConfig):
        values |= {"token_types": config.token_types, "embedding_norm": config.embedding_norm}
    full = tuple(layer for layer in range(config.n_layers) if config.window_size(layer) is None)
    local = config.rotary_local_base
    if not local and config.rotary_scaling == "none":
        local = config.rotary_base
    values |= {"full_layers": full, "rotary_local_base": local}
    is_rotary = config.positions == "rotary"
    scaling = config.rotary_scaling if is_rotary else "none"
    unused = {
        "window full_layers rotary_local_base": len(full) == config.n_layers,
        "position_offset": config.positions != "learned",
        "rotary_base rotary_local_base rotary_fraction rotary_scaling": not is_rotary,
        "rotary_factor": scaling == "none",
        "rotary_low_frequency rotary_high_frequency rotary_original_window": scaling != "llama3",
        "qk_norm_gain qk_norm_eps qk_norm_per_head": not config.qk_norm,
        "softmax_blocks": config.softmax != "blocks",
    }
    for names, is_unused in unused.items():
        for name in names.split() if is_unused else ():
            values[name] = ModelConfig.__dataclass_fields__[name].default
    return values


def has_bias(config: ModelConfig, part: str) -> bool:
    """Whether the linear layers of a part ("qkv", "output", "mlp") have biases."""
    own = getattr(config, f"{part}_bias")
    return config.bias if own is None else bool(own)


def differing_fields(config: ModelConfig, other: ModelConfig) -> list[str]:
    """The fields in which two configs make different models."""
    ours, theirs = effective_fields(config), effective_fields(other)
    floats = {
        name for name, value in ours.items() if isinstance(value, float) and isinstance(theirs[name], (int, float))
    }
    near = {name for name in floats if math.isclose(ours[name], theirs[name], rel_tol=1e-12)}
    return [name for name in ours if name not in near and ours[name] != theirs[name]]
