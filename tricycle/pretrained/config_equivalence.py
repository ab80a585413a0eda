"""Comparison of two configs: whether they define the same computation, for export to other formats."""

from __future__ import annotations

import math
from typing import Any

from tricycle.configs.mamba import MambaConfig
from tricycle.configs.model import ModelConfig
from tricycle.configs.presets import GPTConfig, model_fields

# Fields that affect initialization, training or rounding, but not the computation.
IGNORED_FIELDS = ("dropout", "seed", "precision", "zero_projections", "expansion_ratio", "router_loss")


def effective_fields(config: ModelConfig) -> dict[str, Any]:
    """Return by name the config fields that affect results: derived values filled in, unused ones at their defaults."""
    values = {name: getattr(config, name) for name in model_fields(ModelConfig.__dataclass_fields__)}
    for name in IGNORED_FIELDS:
        del values[name]
    values |= {
        "n_key_heads": config.key_heads,
        "head_size": config.channels_per_head,
        "hidden_size": config.mlp_width,
        "gated": config.is_gated,
        "activation": "swish" if config.activation == "swiglu" else config.activation,
        "score_scale": config.score_scale or config.channels_per_head**-0.5,
        "rotary_fraction": int(config.channels_per_head * config.rotary_fraction) / config.channels_per_head,
        "embedding_size": config.embedding_size or config.embedding_dim,
    }
    for group in ("qkv", "output", "mlp"):
        values[f"{group}_bias"] = has_bias(config, group)
    has_mixers = isinstance(config, MambaConfig)
    values["bias"] = config.bias and (has_mixers or config.norm == "layer_norm")  # others have own fields
    own = [name for name in config.__dataclass_fields__ if name not in GPTConfig.__dataclass_fields__]
    values |= {name: getattr(config, name) for name in own if name != "chunk_size"}
    if isinstance(config, MambaConfig):
        sizes = {"n_mamba_heads": config.mamba_heads, "mamba_head_size": config.channels_per_mamba_head}
        values |= {**sizes, "attention_layers": tuple(sorted(set(config.attention_layers)))}
    if "n_decoder_layers" in values:  # of an encoder-decoder
        values["n_decoder_layers"] = values["n_decoder_layers"] or config.n_layers
    full_layers = tuple(layer for layer in range(config.n_layers) if config.window_size(layer) is None)
    local_base = config.rotary_local_base
    if not local_base and config.rotary_scaling == "none":
        local_base = config.rotary_base
    values |= {"full_layers": full_layers, "rotary_local_base": local_base}
    values["unrotated_layers"] = tuple(sorted(set(config.unrotated_layers)))
    is_rotary = config.positions == "rotary"
    scaling = config.rotary_scaling if is_rotary else "none"
    unused = {
        "window full_layers rotary_local_base": len(full_layers) == config.n_layers,
        "position_offset": config.positions != "learned",
        "context_window": bool(values.get("relative_buckets")),  # these have no table of positions
        "rotary_base rotary_local_base rotary_fraction rotary_scaling unrotated_layers": not is_rotary,
        "rotary_factor": scaling in ("none", "longrope"),
        "rotary_attention_factor": scaling == "none",
        "rotary_low_frequency rotary_high_frequency": scaling not in ("llama3", "yarn"),
        "rotary_original_window": scaling not in ("llama3", "yarn", "longrope"),
        "rotary_rounded": scaling != "yarn",
        "rotary_divisors": scaling != "longrope",
        "qk_norm_gain qk_norm_eps qk_norm_per_head": not config.qk_norm,
        "n_active_experts normalize_experts router_bias": not config.n_experts,
        "softmax_blocks": config.softmax != "blocks",
    }
    for names, is_unused in unused.items():
        for name in names.split() if is_unused else ():
            values[name] = ModelConfig.__dataclass_fields__[name].default
    return values


def has_bias(config: ModelConfig, group: str) -> bool:
    """Return whether a group of layers ("qkv", "output", "mlp") has biases, by its field, else by `config.bias`."""
    bias = getattr(config, f"{group}_bias")
    return config.bias if bias is None else bool(bias)


def differing_fields(config: ModelConfig, other: ModelConfig, tolerance: float = 1e-12) -> list[str]:
    """Return the names of the fields in which the computations of two configs differ; [] if they compute the same.

    Args:
        tolerance: the largest relative difference of floats that count as equal.
    """
    values, others = effective_fields(config), effective_fields(other)
    return [name for name, value in values.items() if not _are_equal(value, others[name], tolerance)]


def _are_equal(value: Any, other: Any, tolerance: float) -> bool:
    """Return whether two values are equal; a float may differ by the relative tolerance."""
    if isinstance(value, float) and isinstance(other, (int, float)) and math.isclose(value, other, rel_tol=tolerance):
        return True
    return bool(value == other)
