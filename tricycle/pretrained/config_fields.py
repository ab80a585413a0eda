"""The fields of a config.json, read one by one: each has a type, and a default where the file says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tricycle.configs.model import ModelConfig

# Words of transformers for activations that are here too, by ours. The first is the one that is written.
ACTIVATION_NAMES: dict[str, tuple[str, ...]] = {
    "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"),
    "gelu_exact": ("gelu", "gelu_python"),
    "relu": ("relu",),
    "relu_squared": ("relu2",),
    "swish": ("silu", "swish"),
    "sigmoid": ("sigmoid",),
    "tanh": ("tanh",),
}
# Our fields that every family has, by the names that most families give them.
SIZE_FIELDS = {
    "vocab_size": "vocab_size",
    "context_window": "max_position_embeddings",
    "embedding_dim": "hidden_size",
    "hidden_size": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
}
OURS = {word: ours for ours, words in ACTIVATION_NAMES.items() for word in words}


def activation_name(activation: str) -> str:
    """What transformers calls an activation of ours ("swiglu" is the gated "swish")."""
    return ACTIVATION_NAMES["swish" if activation == "swiglu" else activation][0]


class ConfigFields:
    """What a model's config.json says.

    Every method raises ValueError where the value is of another type; the message names the field.

    Args:
        values: the JSON object.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is."""
        return self.values.get(name, default)

    def positive_int(self, name: str, default: int) -> int:
        """A whole number above 0."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
            raise field_error(name, "a whole number above 0", value)
        return value

    def optional_positive_int(self, name: str, default: int | None = None) -> int | None:
        """A whole number above 0, or null."""
        return None if self.get(name, default) is None else self.positive_int(name, default or 0)

    def positive_float(self, name: str, default: float) -> float:
        """A number above 0."""
        value = self.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise field_error(name, "a number above 0", value)
        return float(value)

    def optional_positive_float(self, name: str, default: float | None) -> float | None:
        """A number above 0, or null."""
        return None if self.get(name, default) is None else self.positive_float(name, default or 0)

    def sizes(self, *defaults: int, **names: str) -> dict[str, Any]:
        """Return our fields of SIZE_FIELDS.

        Args:
            defaults: of these in their order.
            names: of some of ours, where this family has another name for them.
        """
        both = zip((SIZE_FIELDS | names).items(), defaults, strict=True)
        return {ours: self.positive_int(theirs, default) for (ours, theirs), default in both}

    def boolean(self, name: str, default: bool) -> bool:
        """True or false; null is the default."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise field_error(name, "true or false", value)
        return value

    def activation(self, name: str, default: str) -> Any:
        """The name of an activation, as ours are called."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in OURS:
            raise field_error(name, f"one of {', '.join(OURS)}", value)
        return OURS[value]

    def section(self, name: str) -> dict[str, Any]:
        """An object inside; empty where there is none."""
        value = self.get(name)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise field_error(name, "an object", value)
        return value

    def require(self, name: str, value: Any) -> None:
        """Refuse a field that says something else than the only thing that is computed here."""
        if self.get(name, value) != value:
            raise field_error(name, f"{value!r}, the only way that is known here", self.get(name))

    def layer_types(self, n_layers: int) -> list[str] | None:
        """What each layer sees, "full_attention" or "sliding_attention"; None where the file does not say."""
        value = self.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != n_layers:
            raise field_error("layer_types", f"a list of {n_layers}", value)
        unknown = [kind for kind in value if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise field_error("layer_types", "full_attention or sliding_attention for each layer", unknown[0])
        return value


def field_error(name: str, wanted: str, value: Any) -> ValueError:
    """One short line about a field."""
    text = repr(value)
    return ValueError(f"expected {name} to be {wanted}, got {text if len(text) <= 60 else text[:60] + '...'}")


def size_fields(config: ModelConfig, **names: str) -> dict[str, Any]:
    """Return their fields of SIZE_FIELDS; `names` as of `ConfigFields.sizes`."""
    ours = {name: getattr(config, name) for name in SIZE_FIELDS} | {"hidden_size": config.mlp_width}
    return {theirs: ours[name] for name, theirs in (SIZE_FIELDS | names).items()}


# -------------------------------------------------------------------- rotary positions
def read_rotary_fields(fields: ConfigFields, theta: float = 10_000.0, fraction: float = 1.0) -> dict[str, Any]:
    """Our fields of rotary positions, from the old spelling (rope_theta, rope_scaling, partial_rotary_factor) or the
    new one (rope_parameters).

    Args:
        theta, fraction: where the file says nothing.

    Raises:
        ValueError: a way of scaling that is not known here, or a value that is missing or wrong.
    """
    place = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    old = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor") if fields.get(name) is not None}
    return read_rotary_section({**old, **fields.section(place)}, place, theta, fraction)


def read_rotary_section(section: dict[str, Any], place: str, theta: float, fraction: float = 1.0) -> dict[str, Any]:
    """The same of one such object, which stands at that place."""
    inside = ConfigFields({f"{place}.{name}": value for name, value in section.items()})
    kind = section.get("rope_type", section.get("type", "default"))
    ours: dict[str, Any] = {
        "rotary_base": inside.positive_float(f"{place}.rope_theta", theta),
        "rotary_fraction": inside.positive_float(f"{place}.partial_rotary_factor", fraction),
    }
    if ours["rotary_fraction"] > 1:
        raise field_error(f"{place}.partial_rotary_factor", "at most 1", ours["rotary_fraction"])
    if kind == "default":
        return ours
    if kind not in ("linear", "llama3"):
        raise field_error(f"{place}.rope_type", "default, linear or llama3", kind)
    numbers = ["factor"]
    if kind == "llama3":
        numbers += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    for name in numbers:
        if section.get(name) is None:
            raise field_error(f"{place}.{name}", "a number above 0", None)
    ours |= {"rotary_scaling": kind, "rotary_factor": inside.positive_float(f"{place}.factor", 1.0)}
    if kind == "llama3":
        ours["rotary_low_frequency"] = inside.positive_float(f"{place}.low_freq_factor", 1.0)
        ours["rotary_high_frequency"] = inside.positive_float(f"{place}.high_freq_factor", 4.0)
        ours["rotary_original_window"] = inside.positive_int(f"{place}.original_max_position_embeddings", 8192)
    return ours
