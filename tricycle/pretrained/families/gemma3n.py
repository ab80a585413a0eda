"""The text model of Gemma 3n (Google 2025): several residual streams, per-layer inputs, shared keys and values."""

from __future__ import annotations

from typing import Any

from tricycle.multi_stream.decoder import MultiStreamConfig
from tricycle.pretrained.config_equivalence import has_bias
from tricycle.pretrained.config_fields import ConfigFields, activation_name, field_error
from tricycle.pretrained.families.family import Family, TensorNames
from tricycle.pretrained.families.gemma import (
    NAMES,
    PREFIXES,
    periodic_layer_types,
    rope_config,
    rope_fields,
    text_fields,
)
from tricycle.pretrained.families.llama import (
    attention_biases,
    check_heads_divide_width,
    common_config,
    common_fields,
    sliding_window_config,
    sliding_window_fields,
)

LAYER = "model.layers.N"
GEMMA3N_NAMES: TensorNames = {
    **{name: theirs for name, theirs in NAMES.items() if ".qkv" not in name},
    "blocks.N.attention.query": [f"{LAYER}.self_attn.q_proj"],
    "blocks.N.attention.key_value": [f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.v_proj"],
    "blocks.N.altup.router_norm": [f"{LAYER}.altup.router_norm"],
    "blocks.N.altup.router": [f"{LAYER}.altup.modality_router"],
    "blocks.N.altup.prediction": [f"{LAYER}.altup.prediction_coefs"],
    "blocks.N.altup.correction": [f"{LAYER}.altup.correction_coefs"],
    "blocks.N.laurel.down": [f"{LAYER}.laurel.linear_left"],
    "blocks.N.laurel.projection": [f"{LAYER}.laurel.linear_right"],
    "blocks.N.laurel.norm": [f"{LAYER}.laurel.post_laurel_norm"],
    "blocks.N.per_layer.scale": [f"{LAYER}.altup.correct_output_scale"],
    "blocks.N.per_layer.gate": [f"{LAYER}.per_layer_input_gate"],
    "blocks.N.per_layer.projection": [f"{LAYER}.per_layer_projection"],
    "blocks.N.per_layer.norm": [f"{LAYER}.post_per_layer_input_norm"],
    "streams.projections.inputs.N": ["model.altup_projections.N"],
    "streams.projections.outputs.N": ["model.altup_unembed_projections.N"],
    "streams.per_layer.embedding": ["model.embed_tokens_per_layer"],
    "streams.per_layer.projection": ["model.per_layer_model_projection"],
    "streams.per_layer.norm": ["model.per_layer_projection_norm"],
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
}
SIZES = {
    "n_streams": ("altup_num_inputs", 4),
    "residual_rank": ("laurel_rank", 64),
    "per_layer_size": ("hidden_size_per_layer_input", 256),
    "per_layer_rows": ("vocab_size_per_layer_input", 262_144),
}


# -------------------------------------------------------------------- from config.json
def to_config(fields: ConfigFields) -> MultiStreamConfig:
    """Convert a Gemma 3n config.json or its text_config to a config with defaults; ValueError if unsupported."""
    fields = text_fields(fields, DEFAULTS, "gemma3n")
    fields.require("altup_active_idx", 0)
    fields.require("altup_correct_scale", True)
    n_layers = fields.positive_int("num_hidden_layers")
    widths = _by_layer(fields, "intermediate_size", n_layers, int)
    numbers = {"rope_scaling": None, "rope_parameters": None, "intermediate_size": max(widths)}
    common = common_config(ConfigFields({**fields.values, **numbers}), default_key_heads=2, default_head_size=256)
    common["activation"] = fields.activation("hidden_activation", "")
    n_shared = fields.get("num_kv_shared_layers")
    if not isinstance(n_shared, int) or isinstance(n_shared, bool):
        raise field_error("num_kv_shared_layers", "a whole number", n_shared)
    types = fields.layer_types(n_layers) or periodic_layer_types(n_layers, 5)
    sizes: dict[str, Any] = {ours: fields.positive_int(name, default) for ours, (name, default) in SIZES.items()}
    windows = sliding_window_config(types, fields.positive_int("sliding_window")) or {"window": 0, "full_layers": ()}
    return MultiStreamConfig(
        **{**common, **rope_config(fields), **sizes, **windows},
        norm_placement="both",
        qk_norm_eps=common["norm_eps"],
        **attention_biases(fields),
        embedding_scale=common["embedding_dim"] ** 0.5,
        logit_cap=fields.optional_positive_float("final_logit_softcapping", 30.0) or 0.0,
        n_shared_layers=n_shared,
        sparsity=_sparsity(fields, n_layers),
        hidden_sizes=widths if len(set(widths)) > 1 else (),
    )


def _by_layer(fields: ConfigFields, name: str, n_layers: int, kind: type) -> tuple[Any, ...]:
    """Return a field with one number for all layers, or a list with one for each; ValueError for other values."""
    value = fields.get(name)
    values = value if isinstance(value, list) else [value] * n_layers
    kinds = (int, float) if kind is float else int
    numbers = [isinstance(x, kinds) and not isinstance(x, bool) and 0 <= x < 2**63 for x in values]
    if len(values) != n_layers or not all(numbers):
        raise field_error(name, f"a number of 0 or more, or a list of {n_layers}", value)
    return tuple(kind(x) for x in values)


def _sparsity(fields: ConfigFields, n_layers: int) -> tuple[float, ...]:
    """Return the sparsity of each layer's MLP; by default 0.95 in the first ten of more layers. () if all are 0."""
    name = "activation_sparsity_pattern"
    if fields.get(name) is None:
        values = (0.95,) * 10 + (0.0,) * (n_layers - 10) if n_layers > 10 else ()
    else:
        values = _by_layer(fields, name, n_layers, float)
    return values if any(values) else ()


# -------------------------------------------------------------------- to config.json
def to_fields(config: MultiStreamConfig) -> dict[str, Any]:
    """Convert a config to fields of a Gemma 3n config.json; ValueError if heads do not divide the width, or no cap."""
    check_heads_divide_width(config)
    if not config.logit_cap:  # transformers 5 requires a number
        raise field_error("logit_cap", "above 0", config.logit_cap)
    fields = {
        **common_fields(config),
        **sliding_window_fields(config),
        **rope_fields(config),
        **{name: getattr(config, ours) for ours, (name, _) in SIZES.items()},
        "hidden_activation": activation_name(config.activation),
        "intermediate_size": list(config.hidden_sizes) or config.mlp_width,
        "activation_sparsity_pattern": list(config.sparsity) or [0.0] * config.n_layers,
        "num_kv_shared_layers": config.n_shared_layers,
        "final_logit_softcapping": config.logit_cap,
        "sliding_window": config.window or DEFAULTS["sliding_window"],  # required even if no layer uses it
        "attention_bias": has_bias(config, "qkv") or has_bias(config, "output"),
    }
    del fields["hidden_act"]
    return fields


GEMMA3N = Family(
    ("gemma3n_text", "gemma3n"),
    "Gemma3nForCausalLM",
    to_config,
    to_fields,
    GEMMA3N_NAMES,
    PREFIXES,
    # the models of images and sound, and matrices of layers that share those of earlier layers
    ignored=r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\."
    r"|model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.",
    config_class=MultiStreamConfig,
    models="Gemma 3n, text only (`tricycle/multi_stream/altup.py:AltUp`)",
)
