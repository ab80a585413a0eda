"""Typed access to the fields of a config.json, for the model families: each field has a type and a default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tricycle.configs.model import ModelConfig

# From activations of Tricycle to their names in transformers, of which the first is written.
ACTIVATION_NAMES: dict[str, tuple[str, ...]] = {
    "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"),
    "gelu_exact": ("gelu", "gelu_python"),
    "relu": ("relu",),
    "relu_squared": ("relu2",),
    "swish": ("silu", "swish"),
    "sigmoid": ("sigmoid",),
    "tanh": ("tanh",),
}
# From size fields of `ModelConfig` to their names in most families.
SIZE_FIELDS = {
    "vocab_size": "vocab_size",
    "context_window": "max_position_embeddings",
    "embedding_dim": "hidden_size",
    "hidden_size": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
}
WINDOW, ORIGINAL_WINDOW = "max_position_embeddings", "original_max_position_embeddings"
_ACTIVATION_OF_NAME = {name: activation for activation, names in ACTIVATION_NAMES.items() for name in names}


def activation_name(activation: str) -> str:
    """Return transformers' name of a Tricycle activation ("swiglu": that of its gate, silu); ValueError if unknown."""
    if activation not in {*ACTIVATION_NAMES, "swiglu"}:
        raise ValueError(f"activation={activation!r} has no name in transformers")
    return ACTIVATION_NAMES["swish" if activation == "swiglu" else activation][0]


class ConfigFields:
    """The fields of a config.json; a value of another type raises a ValueError that names the field.

    Args:
        values: the JSON object.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __contains__(self, name: str) -> bool:
        """Return whether the fields have this name."""
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field without a check, or `default` if it is missing; null is returned as None."""
        return self.values.get(name, default)

    def positive_int(self, name: str, default: int | None = None) -> int:
        """Return an integer field above 0, or `default` if it is missing; ValueError for others, also for None."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
            raise field_error(name, "a whole number above 0", value)
        return value

    def optional_positive_int(self, name: str, default: int | None = None) -> int | None:
        """Return an integer field above 0, `default` if it is missing, None for null; ValueError for other values."""
        return None if self.get(name, default) is None else self.positive_int(name, default)

    def positive_float(self, name: str, default: float | None = None) -> float:
        """Return a number field above 0 as a float, `default` if it is missing; ValueError for others, also null."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise field_error(name, "a number above 0", value)
        return float(value)

    def optional_positive_float(self, name: str, default: float | None) -> float | None:
        """Return a number field above 0 as a float, `default` if missing, None for null; ValueError for others."""
        return None if self.get(name, default) is None else self.positive_float(name, default)

    def sizes(self, *defaults: int, **names: str) -> dict[str, Any]:
        """Return six sizes in SIZE_FIELDS order, `defaults` if missing; `names` replaces their config.json names.

        With YaRN, the context window is at least the original window times the factor: some files state the former.

        Args:
            defaults: one for each field, in the order of SIZE_FIELDS.
            names: names in config.json that differ from SIZE_FIELDS, by the names in `ModelConfig`.
        """
        fields = zip((SIZE_FIELDS | names).items(), defaults, strict=True)
        sizes = {name: self.positive_int(hf_name, default) for (name, hf_name), default in fields}
        rope = self.section("rope_scaling") or self.section("rope_parameters")
        if rope.get("rope_type", rope.get("type")) == "yarn":
            scaling = ConfigFields({ORIGINAL_WINDOW: sizes["context_window"], **rope})
            window = scaling.positive_int(ORIGINAL_WINDOW) * scaling.positive_float("factor")
            sizes["context_window"] = max(sizes["context_window"], round(window))
        return sizes

    def positive_floats(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers above 0 as floats; raise ValueError for other values, also if it is missing."""
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(x, (int, float)) and 0 < x < 1e30 for x in value):
            raise field_error(name, "a list of numbers above 0", value)
        return tuple(map(float, value))

    def boolean(self, name: str, default: bool) -> bool:
        """Return a Boolean field, or `default` if it is missing or null; raise ValueError for another type."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise field_error(name, "true or false", value)
        return value

    def activation(self, name: str, default: str) -> Any:
        """Return Tricycle's name of the activation that a field or `default` has in transformers; else ValueError."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in _ACTIVATION_OF_NAME:
            raise field_error(name, f"one of {', '.join(_ACTIVATION_OF_NAME)}", value)
        return _ACTIVATION_OF_NAME[value]

    def section(self, name: str) -> dict[str, Any]:
        """Return a nested object, or {} if it is missing or null; raise ValueError for another type."""
        value = self.get(name)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise field_error(name, "an object", value)
        return value

    def require(self, name: str, value: Any) -> None:
        """Raise ValueError if a field is present and is not `value`, the only supported value."""
        if self.get(name, value) != value:
            raise field_error(name, f"{value!r}, the only supported value", self.get(name))

    def layer_types(self, n_layers: int) -> list[str] | None:
        """Return `n_layers` names "full_attention" or "sliding_attention", None if missing; ValueError for others."""
        value = self.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != n_layers:
            raise field_error("layer_types", f"a list of {n_layers}", value)
        unknown = [kind for kind in value if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise field_error("layer_types", "full_attention or sliding_attention for each layer", unknown[0])
        return value


def field_error(name: str, expected: str, value: Any) -> ValueError:
    """Return (not raise) a ValueError: expected `name` to be `expected`, got `value`, cut to 60 characters."""
    text = repr(value)
    return ValueError(f"expected {name} to be {expected}, got {text if len(text) <= 60 else text[:60] + '...'}")


def size_fields(config: ModelConfig, **names: str) -> dict[str, Any]:
    """Return the six sizes of a config by their names in config.json; for `names`, see `ConfigFields.sizes`."""
    values = {name: getattr(config, name) for name in SIZE_FIELDS} | {"hidden_size": config.mlp_width}
    return {hf_name: values[name] for name, hf_name in (SIZE_FIELDS | names).items()}


# -------------------------------------------------------------------- RoPE
def read_rotary_fields(
    fields: ConfigFields, default_theta: float = 10_000.0, default_fraction: float | None = None
) -> dict[str, Any]:
    """Convert the RoPE fields of a config.json to a dict of `ModelConfig` fields `rotary_*`; ValueError if unsupported.

    They are stored in rope_theta, rope_scaling and partial_rotary_factor, or, in newer files, in rope_parameters.

    Args:
        default_theta, default_fraction: of the base and of the fraction of rotary channels; None if it must be 1.

    Raises:
        ValueError: an unsupported scaling, or a value that is missing or invalid.
    """
    section_name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    names = ("rope_theta", "partial_rotary_factor", WINDOW)
    section = {name: fields.get(name) for name in names if fields.get(name) is not None} | fields.section(section_name)
    window = fields.get(ORIGINAL_WINDOW, section.get(ORIGINAL_WINDOW, fields.get(WINDOW)))
    return read_rotary_section({**section, ORIGINAL_WINDOW: window}, section_name, default_theta, default_fraction)


def read_rotary_section(
    section: dict[str, Any], section_name: str, default_theta: float, default_fraction: float | None = None
) -> dict[str, Any]:
    """Convert a RoPE object of config.json to a dict of `rotary_*` fields; ValueError if unsupported or invalid."""
    fields = ConfigFields({f"{section_name}.{name}": value for name, value in section.items()})
    rope_type = section.get("rope_type", section.get("type", "default"))
    fraction = fields.positive_float(f"{section_name}.partial_rotary_factor", default_fraction or 1.0)
    if fraction > 1 or (default_fraction is None and fraction != 1):
        rule = "at most 1" if default_fraction else "1, the only supported value"
        raise field_error(f"{section_name}.partial_rotary_factor", rule, fraction)
    rotary: dict[str, Any] = {
        "rotary_base": fields.positive_float(f"{section_name}.rope_theta", default_theta),
        "rotary_fraction": fraction,
    }
    if rope_type == "default":
        return rotary
    if not isinstance(rope_type, str) or rope_type not in SCALING_READERS:
        raise field_error(f"{section_name}.rope_type", f"one of default, {', '.join(SCALING_READERS)}", rope_type)
    return rotary | {"rotary_scaling": rope_type} | SCALING_READERS[rope_type](fields, f"{section_name}.")


def _linear(fields: ConfigFields, prefix: str) -> dict[str, Any]:
    """Return the `ModelConfig` field of linear RoPE scaling, the factor; ValueError without it."""
    return {"rotary_factor": fields.positive_float(f"{prefix}factor")}


def _llama3(fields: ConfigFields, prefix: str) -> dict[str, Any]:
    """Return the `ModelConfig` fields of Llama 3's RoPE scaling; ValueError if one is missing or invalid."""
    return {
        **_linear(fields, prefix),
        "rotary_low_frequency": fields.positive_float(f"{prefix}low_freq_factor"),
        "rotary_high_frequency": fields.positive_float(f"{prefix}high_freq_factor"),
        "rotary_original_window": fields.positive_int(prefix + ORIGINAL_WINDOW),
    }


def _yarn(fields: ConfigFields, prefix: str) -> dict[str, Any]:
    """Return the `ModelConfig` fields of YaRN; as in transformers, a bound of 0 or null counts as missing."""
    factor = fields.positive_float(f"{prefix}factor")
    bounds = {name: fields.get(prefix + name) or default for name, default in (("beta_slow", 1), ("beta_fast", 32))}
    low, high = (ConfigFields(bounds).positive_float(name) for name in bounds)
    scales = [0.1 * math.log(max(1.0, factor))] * 2  # of the attention factors 1 + scale
    names = [f"{prefix}mscale", f"{prefix}mscale_all_dim"]
    if all(fields.get(name) for name in names):
        scales = [scale * fields.positive_float(name) for scale, name in zip(scales, names)]
    else:
        scales[1] = 0
    attention_factor = fields.optional_positive_float(f"{prefix}attention_factor", None)
    return {
        "rotary_factor": factor,
        "rotary_low_frequency": low,
        "rotary_high_frequency": high,
        "rotary_original_window": fields.positive_int(prefix + ORIGINAL_WINDOW),
        "rotary_rounded": fields.boolean(f"{prefix}truncate", True),
        "rotary_attention_factor": attention_factor or (1 + scales[0]) / (1 + scales[1]),
    }


def _longrope(fields: ConfigFields, prefix: str) -> dict[str, Any]:
    """Return the `ModelConfig` fields of LongRoPE, the attention factor computed if missing; ValueError if invalid."""
    original = fields.positive_int(prefix + ORIGINAL_WINDOW)
    factor = fields.optional_positive_float(f"{prefix}factor", None) or fields.positive_int(prefix + WINDOW) / original
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "rotary_divisors": fields.positive_floats(f"{prefix}short_factor")
        + fields.positive_floats(f"{prefix}long_factor"),
        "rotary_original_window": original,
        "rotary_attention_factor": fields.optional_positive_float(f"{prefix}attention_factor", None) or default,
    }


SCALING_READERS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


def rotary_scaling_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the value of rope_scaling in config.json: rope_type and the numbers of this type; {} without scaling."""
    kind = config.rotary_scaling
    if kind == "none":
        return {}
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind == "longrope":
        half = len(config.rotary_divisors) // 2
        scaling |= {"short_factor": list(config.rotary_divisors[:half])}
        scaling |= {"long_factor": list(config.rotary_divisors[half:])}
    else:
        scaling |= {"factor": float(config.rotary_factor)}
    if kind in ("llama3", "yarn"):
        low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
        scaling |= {low: float(config.rotary_low_frequency), high: float(config.rotary_high_frequency)}
    if kind == "yarn":
        scaling |= {"truncate": config.rotary_rounded}
    if kind in ("yarn", "longrope"):
        scaling |= {"attention_factor": float(config.rotary_attention_factor)}
    return scaling if kind == "linear" else {**scaling, ORIGINAL_WINDOW: config.rotary_original_window}
