"""Qwen3-Next (Qwen Team 2025): Gated DeltaNet with gated attention in every fourth layer, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields, field_error
from tricycle.pretrained.families.family import Family, TensorNames
from tricycle.pretrained.families.llama import attention_biases, common_config, common_fields, qk_norms
from tricycle.pretrained.families.mixtures import NAMES, expert_config, expert_fields
from tricycle.state_spaces.delta_net import DeltaNetConfig

LINEAR, MLP = "model.layers.N.linear_attn", "model.layers.N.mlp"
QWEN3_NEXT_NAMES: TensorNames = {
    **NAMES,
    "blocks.N.attention.input": [f"{LINEAR}.in_proj_qkvz"],
    "blocks.N.attention.rates": [f"{LINEAR}.in_proj_ba"],
    "blocks.N.attention.conv_weights": [f"{LINEAR}.conv1d.weight"],
    "blocks.N.attention.step_bias": [f"{LINEAR}.dt_bias"],
    "blocks.N.attention.log_rates": [f"{LINEAR}.A_log"],
    "blocks.N.attention.output.norm": [f"{LINEAR}.norm"],
    "blocks.N.attention.output.projection": [f"{LINEAR}.out_proj"],
    "blocks.N.mlp.shared.up": [f"{MLP}.shared_expert.up_proj", f"{MLP}.shared_expert.gate_proj"],
    "blocks.N.mlp.shared.projection": [f"{MLP}.shared_expert.down_proj"],
    "blocks.N.mlp.shared_gate": [f"{MLP}.shared_expert_gate"],
}
SIZES = {
    "n_linear_heads": ("linear_num_value_heads", 32),
    "n_linear_key_heads": ("linear_num_key_heads", 16),
    "linear_head_size": ("linear_value_head_dim", 128),
    "linear_key_size": ("linear_key_head_dim", 128),
    "conv_width": ("linear_conv_kernel_dim", 4),
    "shared_size": ("shared_expert_intermediate_size", 512),
}
DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
}
KINDS = ("linear_attention", "full_attention")


def to_config(fields: ConfigFields) -> DeltaNetConfig:
    """Convert a Qwen3-Next config.json to a `DeltaNetConfig` with transformers' defaults; ValueError if unsupported."""
    fields.require("decoder_sparse_step", 1)
    if fields.get("mlp_only_layers") is not None:
        fields.require("mlp_only_layers", [])
    fields.require("hidden_act", "silu")
    width = {"intermediate_size": fields.positive_int("moe_intermediate_size", 512)}
    fields = ConfigFields({**DEFAULTS, **fields.values, **width})
    common = common_config(fields, default_key_heads=2, default_head_size=256, default_fraction=0.25)
    sizes: dict[str, Any] = {ours: fields.positive_int(name, default) for ours, (name, default) in SIZES.items()}
    return DeltaNetConfig(
        **common | expert_config(fields, 512, 10, 0.001),
        **sizes,
        attention_layers=_attention_layers(fields, common["n_layers"]),
        normalize_experts=fields.boolean("norm_topk_prob", True),
        norm_unit_offset=True,
        **qk_norms(common),
        **attention_biases(fields),
    )


def _attention_layers(fields: ConfigFields, n_layers: int) -> tuple[int, ...]:
    """Return the layers with attention, by layer_types, or every full_attention_interval-th; ValueError if invalid."""
    types = fields.get("layer_types")
    if types is None:
        interval = fields.positive_int("full_attention_interval", 4)
        return tuple(range(interval - 1, n_layers, interval))
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in KINDS for kind in types):
        raise field_error("layer_types", f"a list of {n_layers}, each {' or '.join(KINDS)}", types)
    return tuple(layer for layer, kind in enumerate(types) if kind == "full_attention")


def to_fields(config: DeltaNetConfig) -> dict[str, Any]:
    """Convert a `DeltaNetConfig` to fields of a Qwen3-Next config.json, without model_type; ValueError w/o experts."""
    for name in ("n_experts", "shared_size"):
        if not getattr(config, name):
            raise field_error(name, "above 0", 0)
    return {
        **common_fields(config),
        **expert_fields(config, "num_experts"),
        **{name: getattr(config, ours) for ours, (name, _) in SIZES.items()},
        "moe_intermediate_size": config.mlp_width,
        "partial_rotary_factor": config.rotary_fraction,
        "layer_types": [KINDS[layer in config.attention_layers] for layer in range(config.n_layers)],
        "norm_topk_prob": config.normalize_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }


# -------------------------------------------------------------------- orders of outputs
def _by_key_head(config: Any, sizes: list[int], ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[Any, Any]]:
    """Yield views (ours, theirs) of parts with `sizes` outputs per key head, which theirs groups by key head."""
    n_heads, rest, start, first = config.n_linear_key_heads, ours.shape[1:], 0, 0
    by_head = theirs.reshape(n_heads, sum(sizes), *rest)
    for size in sizes:
        part = ours[start : start + n_heads * size].reshape(n_heads, size, *rest)
        yield part, by_head[:, first : first + size]
        start, first = start + n_heads * size, first + size


def queries_keys_values_gates(
    config: Any, ours: np.ndarray, theirs: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield views (ours, theirs) of linear attention's Q, K, V and gates, which theirs groups by key head."""
    values = config.inner_size // config.n_linear_key_heads
    return _by_key_head(config, [config.linear_key_size] * 2 + [values] * 2, ours, theirs)


def strengths_steps(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield views (ours, theirs) of linear attention's strengths and step sizes, which theirs groups by key head."""
    return _by_key_head(config, [config.n_linear_heads // config.n_linear_key_heads] * 2, ours, theirs)


def queries_gates(config: Any, ours: np.ndarray, theirs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield one pair of views (H, 2, D, ...) of attention's queries and gates (2 H D, ...), by head in theirs."""
    n_heads, rest = config.n_heads, ours.shape[1:]
    yield ours.reshape(2, n_heads, -1, *rest).swapaxes(0, 1), theirs.reshape(n_heads, 2, -1, *rest)


QWEN3_NEXT = Family(
    ("qwen3_next",),
    "Qwen3NextForCausalLM",
    to_config,
    to_fields,
    QWEN3_NEXT_NAMES,
    ignored=r"mtp\.",  # layers that predict more tokens
    layouts={"in_proj_qkvz": queries_keys_values_gates, "in_proj_ba": strengths_steps, "q_proj": queries_gates},
    config_class=DeltaNetConfig,
    models="Qwen3-Next (`tricycle/state_spaces/delta_rule.py:GatedDeltaRule`)",
)
