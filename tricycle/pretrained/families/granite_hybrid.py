"""Granite 4 (IBM 2025): Granite with Mamba-2 mixers in place of attention in most layers, also with experts.

In models with experts, one more MLP processes every token.
"""

from __future__ import annotations

from typing import Any

from tricycle.configs.mamba import MambaConfig
from tricycle.pretrained.config_fields import ConfigFields, field_error
from tricycle.pretrained.families.family import Family, TensorNames, gate_first
from tricycle.pretrained.families.granite import MIXTURE_NAMES, STACKS, common_granite, common_granite_fields
from tricycle.pretrained.families.mamba2 import CHUNK_SIZE, MIXER_NAMES, check_time_steps
from tricycle.pretrained.families.mixtures import expert_config, expert_fields

SHARED = "model.layers.N.shared_mlp"
NAMES: TensorNames = {
    **MIXTURE_NAMES,
    "blocks.N.norm": ["model.layers.N.input_layernorm"],
    **{f"blocks.N.mixer.{ours}": [f"model.layers.N.mamba.{theirs}"] for ours, theirs in MIXER_NAMES.items()},
    **{f"blocks.N.mlp.{part}up": [f"{SHARED}.input_linear"] for part in ("", "shared.")},
    **{f"blocks.N.mlp.{part}projection": [f"{SHARED}.output_linear"] for part in ("", "shared.")},
}
MAMBA, ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")  # since transformers 5.20 the latter
POSITIONS = {None: "none", "nope": "none", "rope": "rotary"}
SIZES = {
    "n_mamba_heads": ("mamba_n_heads", 128),
    "state_size": ("mamba_d_state", 256),
    "n_groups": ("mamba_n_groups", 1),
    "conv_width": ("mamba_d_conv", 4),
    "chunk_size": ("mamba_chunk_size", 256),
}


def to_config(fields: ConfigFields) -> MambaConfig:
    """Convert a Granite 4 config.json to a `MambaConfig`; missing fields get defaults, unsupported ones ValueError."""
    fields.require("hidden_act", "silu")
    fields.require("normalization_function", "rmsnorm")
    check_time_steps(fields)
    position_type = fields.get("position_embedding_type")
    if not isinstance(position_type, (str, type(None))) or position_type not in POSITIONS:
        raise field_error("position_embedding_type", "null, nope or rope", position_type)
    common = common_granite(fields)
    shared = fields.positive_int("shared_intermediate_size", 1024)
    if fields.get("num_local_experts", 8) == 0:
        experts: dict[str, Any] = {"hidden_size": shared}
    else:
        experts = {**expert_config(fields, 8, 2, 0.001), "shared_size": shared}
    mixer = _mixer_config(fields, common["embedding_dim"])
    options: dict[str, Any] = {"positions": POSITIONS[position_type], "mlp_bias": False, "mamba_mlp": True}
    layers = _attention_layers(fields, common["n_layers"])
    return MambaConfig(**common | experts | mixer | options, attention_layers=layers)


def _mixer_config(fields: ConfigFields, width: int) -> dict[str, Any]:
    """Convert the sizes and biases of Mamba mixers to fields of `MambaConfig`; ValueError if sizes do not fit."""
    sizes: dict[str, Any] = {ours: fields.positive_int(name, default) for ours, (name, default) in SIZES.items()}
    inner, n_heads = fields.positive_int("mamba_expand", 2) * width, sizes["n_mamba_heads"]
    head_size = fields.get("mamba_d_head", "auto")
    if inner % n_heads or head_size not in ("auto", inner // n_heads):
        raise field_error("mamba_d_head", f"mamba_expand * hidden_size / mamba_n_heads, {inner / n_heads:g}", head_size)
    sizes |= {"mamba_head_size": inner // n_heads, "chunk_size": min(CHUNK_SIZE, sizes["chunk_size"])}
    biases = {"bias": fields.boolean("mamba_proj_bias", False), "conv_bias": fields.boolean("mamba_conv_bias", True)}
    return sizes | biases


def _attention_layers(fields: ConfigFields, n_layers: int) -> tuple[int, ...]:
    """Return the layers with attention, by layer_types or layers_block_type, () if both lack; ValueError if invalid."""
    name = "layer_types" if fields.get("layer_types") is not None else "layers_block_type"
    types = fields.get(name)
    types = [MAMBA[0]] * n_layers if types is None else types
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in MAMBA + ATTENTION for kind in types):
        raise field_error(name, f"a list of {n_layers} names mamba or attention", types)
    return tuple(layer for layer, kind in enumerate(types) if kind in ATTENTION)


def to_fields(config: MambaConfig) -> dict[str, Any]:
    """Convert a `MambaConfig` to Granite 4's config.json, no model_type; ValueError if sizes are not multiples."""
    expand, rest = divmod(config.inner_size, config.embedding_dim)
    if rest:
        raise field_error("heads * channels of Mamba layers", "a multiple of embedding_dim", config.inner_size)
    if config.n_experts:
        fields = {**expert_fields(config, "num_local_experts"), "shared_intermediate_size": config.shared_size}
    else:
        fields = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": config.mlp_width}
    types = [(ATTENTION if layer in config.attention_layers else MAMBA)[0] for layer in range(config.n_layers)]
    return {
        **common_granite_fields(config),
        **fields,
        **{name: getattr(config, ours) for ours, (name, _) in SIZES.items()},
        "mamba_n_heads": config.mamba_heads,
        "mamba_d_head": config.channels_per_mamba_head,
        "mamba_expand": expand,
        "mamba_conv_bias": config.conv_bias,
        "mamba_proj_bias": config.bias,
        "layer_types": types,
        "position_embedding_type": "rope" if config.positions == "rotary" else "nope",
        "pad_token_id": None,  # the default may be outside of the vocabulary
    }


GRANITE_HYBRID = Family(
    ("granitemoehybrid",),
    "GraniteMoeHybridForCausalLM",
    to_config,
    to_fields,
    NAMES,
    layouts={"input_linear": gate_first},
    stacks=STACKS,
    config_class=MambaConfig,
    models="Granite 4 (hybrid)",
)
