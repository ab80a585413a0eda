"""Mamba-2 (Dao and Gu 2024): a state-space model."""

from __future__ import annotations

from typing import Any

from tricycle.configs.mamba import MambaConfig
from tricycle.pretrained.config_fields import ConfigFields, field_error
from tricycle.pretrained.families.family import Family, TensorNames

# From parameters of a mixer to their names in checkpoints.
MIXER_NAMES = {
    "input": "in_proj",
    "conv_weights": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "step_bias": "dt_bias",
    "log_rates": "A_log",
    "skip": "D",
    "norm_gain": "norm.weight",
    "projection": "out_proj",
}
NAMES: TensorNames = {
    "token_embedding": ["backbone.embeddings"],
    "blocks.N.norm": ["backbone.layers.N.norm"],
    **{f"blocks.N.mixer.{ours}": [f"backbone.layers.N.mixer.{theirs}"] for ours, theirs in MIXER_NAMES.items()},
    "norm": ["backbone.norm_f"],
    "head": ["lm_head"],
}
SIZES = {
    "vocab_size": ("vocab_size", 32_768),
    "embedding_dim": ("hidden_size", 4096),
    "n_heads": ("num_heads", 128),
    "head_size": ("head_dim", 64),
    "n_layers": ("num_hidden_layers", 64),
    "state_size": ("state_size", 128),
    "n_groups": ("n_groups", 8),
    "conv_width": ("conv_kernel", 4),
    "chunk_size": ("chunk_size", 256),
}
NO_LIMITS = [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]  # transformers writes the second
CHUNK_SIZE = 32  # fastest on a CPU; that of the files is for GPUs


def check_time_steps(fields: ConfigFields) -> None:
    """Raise ValueError if config.json limits the step sizes of the scan, which is not supported."""
    limits = fields.get("time_step_limit", NO_LIMITS[0])
    if limits not in NO_LIMITS:
        raise field_error("time_step_limit", "[0.0, Infinity], the only supported value", limits)


def to_config(fields: ConfigFields) -> MambaConfig:
    """Convert a Mamba-2 config.json to a `MambaConfig` with transformers' defaults; ValueError if unsupported."""
    fields.require("hidden_act", "silu")
    check_time_steps(fields)
    sizes: dict[str, Any] = {ours: fields.positive_int(name, default) for ours, (name, default) in SIZES.items()}
    inner, expanded = sizes["n_heads"] * sizes["head_size"], fields.positive_int("expand", 2) * sizes["embedding_dim"]
    if expanded != inner:
        raise field_error(
            "expand", f"{inner / sizes['embedding_dim']:g}, by num_heads and head_dim", fields.get("expand", 2)
        )
    return MambaConfig(
        **{**sizes, "chunk_size": min(CHUNK_SIZE, sizes["chunk_size"])},
        norm_eps=fields.positive_float("layer_norm_epsilon", 1e-5),
        bias=fields.boolean("use_bias", False),
        conv_bias=fields.boolean("use_conv_bias", True),
        tied=fields.boolean("tie_word_embeddings", False),
    )


def to_fields(config: MambaConfig) -> dict[str, Any]:
    """Convert a `MambaConfig` to fields of a Mamba-2 config.json, without model_type; ValueError if unsupported."""
    if config.attention_layers:
        raise field_error("attention_layers", "()", config.attention_layers)
    expand, rest = divmod(config.inner_size, config.embedding_dim)
    if rest:
        raise field_error("n_heads * head_size", "a multiple of embedding_dim", config.inner_size)
    return {
        **{name: getattr(config, ours) for ours, (name, _) in SIZES.items()},
        "head_dim": config.channels_per_head,
        "expand": expand,
        "layer_norm_epsilon": config.norm_eps,
        "use_bias": config.bias,
        "use_conv_bias": config.conv_bias,
        "tie_word_embeddings": config.tied,
        "pad_token_id": None,  # the default may be outside of the vocabulary
    }


MAMBA2 = Family(
    ("mamba2",),
    "Mamba2ForCausalLM",
    to_config,
    to_fields,
    NAMES,
    ("backbone.", ""),
    config_class=MambaConfig,
    models="Mamba-2 (`tricycle/state_spaces/scan.py:StateSpaceScan`)",
)
