"""The search space of `tricycle sweep`: parse --over into ranges and choices of config fields."""

from __future__ import annotations

import difflib
import itertools
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from tricycle.configs import GPTConfig

SYNTAX = "FIELD=LOW..HIGH, FIELD=LOW..HIGH:log, FIELD=LOW..HIGH:5 (5 values) or FIELD=A,B,C"
MAX_CORNERS = 2**10


@dataclass(frozen=True)
class Range:
    """A range of floats or integers.

    Attributes:
        low, high: the bounds, inclusive.
        log: sample uniformly in the logarithm.
        is_integer: integers only.
    """

    low: float
    high: float
    log: bool
    is_integer: bool

    def ends(self) -> tuple[Any, ...]:
        """Return the inclusive bounds, (low, high)."""
        return self.low, self.high

    def suggest(self, trial: Any, name: str) -> Any:
        """Return the value that an Optuna trial suggests: an int, or a float rounded to six significant digits."""
        if self.is_integer:
            return trial.suggest_int(name, self.low, self.high, log=self.log)
        return float(f"{trial.suggest_float(name, self.low, self.high, log=self.log):.6g}")


@dataclass(frozen=True)
class Categorical:
    """A list of values.

    Attributes:
        values: the values.
        log: the values are spaced evenly in the logarithm.
    """

    values: tuple[Any, ...]
    log: bool = False

    def ends(self) -> tuple[Any, ...]:
        """Return all values."""
        return self.values

    def suggest(self, trial: Any, name: str) -> Any:
        """Return the element of `values` that an Optuna trial suggests for this name."""
        return trial.suggest_categorical(name, self.values)


SearchSpace = dict[str, Range | Categorical]


def parse_search_space(words: Sequence[str], kind: type[GPTConfig] = GPTConfig) -> SearchSpace:
    """Parse --over values such as FIELD=A,B or FIELD=LOW..HIGH of a kind of config to choices and ranges by field.

    Raises:
        ValueError: no values, an unknown field, a field twice, or values that it cannot have.
    """
    hints = get_type_hints(kind)
    over: SearchSpace = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not values:
            raise ValueError(f"expected --over {SYNTAX}, got {word!r}")
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"--over {word}: expected a field of the config, got {name!r}{hint}")
        if name in over:
            raise ValueError(f"--over {word}: expected each field once, got {name} twice")
        over[name] = (_range if ".." in values else _choices)(word, values, hints[name])
    if not over:
        raise ValueError(f"expected --over {SYNTAX}, got nothing")
    return over


def _range(word: str, text: str, kind: Any) -> Range | Categorical:
    """Parse LOW..HIGH[:log][:N] (or :N:log) to a Range, or with N >= 2 a Categorical; ValueError if invalid."""
    if kind not in (int, float):
        raise ValueError(f"--over {word}: expected choices such as A,B for a field without numbers, got a range")
    bounds, *more = text.split(":")
    low, high = (_value(word, bound, kind) for bound in bounds.split("..", 1))
    log, count = "log" in more, [part for part in more if part != "log"]
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        rule = "a range from low to high" + (", both above 0" if log else "")
        raise ValueError(f"--over {word}: expected {rule}, got {bounds}")
    if not count:
        return Range(low, high, log, kind is int)
    if len(count) > 1 or not count[0].isdecimal() or int(count[0]) < 2:
        got = ":".join(count)
        raise ValueError(f"--over {word}: expected :log or a number of values of 2 or more after a range, got {got}")
    values = (np.geomspace if log else np.linspace)(low, high, int(count[0]))
    rounded = [round(value) if kind is int else float(f"{value:.6g}") for value in values.tolist()]
    return Categorical(tuple(dict.fromkeys(rounded)), log)


def _choices(word: str, text: str, kind: Any) -> Categorical:
    """Return a Categorical of values separated by commas; ValueError for equal or invalid values."""
    values = [_value(word, choice.strip(), kind) for choice in text.split(",")]
    if len(set(values)) < len(values):
        raise ValueError(f"--over {word}: expected different values, got a value twice")
    return Categorical(tuple(values))


def _value(word: str, text: str, kind: Any) -> Any:
    """Return a text as a value of a field's type; ValueError if it is none, or the field is a list.

    Raises:
        ValueError: the text is no value of this type.
    """
    if get_origin(kind) in (Union, types.UnionType):
        if text.lower() == "none":
            return None
        kind = next(one for one in get_args(kind) if one is not type(None))
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is str or get_origin(kind) is Literal:
        return text
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            expected = "integers" if kind is int else "numbers"
            raise ValueError(f"--over {word}: expected {expected}, got {text!r}") from None
    expected = "true or false" if kind is bool else "a field that is no list"
    raise ValueError(f"--over {word}: expected {expected}, got {text!r}")


# -------------------------------------------------------------------- configs of trials
def apply_parameters(base: GPTConfig, params: Mapping[str, Any], set_fields: Sequence[str]) -> GPTConfig:
    """Return the base config with a trial's values; min_learning_rate keeps its ratio to max unless it is set too.

    Args:
        base: the common config of all trials.
        params: values by field name.
        set_fields: the fields that the command line sets.

    Raises:
        ValueError: invalid values.
    """
    changes = dict(params)
    if "max_learning_rate" in params and not {"min_learning_rate"} & {*params, *set_fields}:
        ratio = base.min_learning_rate / base.max_learning_rate
        changes["min_learning_rate"] = float(f"{ratio * params['max_learning_rate']:.6g}")
    return replace(base, **changes)


def check_search_space(base: GPTConfig, over: SearchSpace, set_fields: Sequence[str]) -> None:
    """Raise ValueError if the config of a corner is invalid; of many corners, check those that differ in one field."""
    ends = [field.ends() for field in over.values()]
    corners: Any = itertools.product(*ends)
    if math.prod(map(len, ends)) > MAX_CORNERS:
        first = [values[0] for values in ends]
        corners = ([*first[:i], end, *first[i + 1 :]] for i, values in enumerate(ends) for end in values)
    for corner in corners:
        params = dict(zip(over, corner))
        try:
            apply_parameters(base, params, set_fields)
        except ValueError as error:
            values = ", ".join(f"{name}={value}" for name, value in params.items())
            raise ValueError(f"--over: {error} (with {values})") from None


def grid_points(over: SearchSpace) -> list[dict[str, Any]]:
    """Return a dict of values by field for each grid point, last field varying fastest; ValueError for a `Range`."""
    for name, field in over.items():
        if isinstance(field, Range):
            raise ValueError(
                f"--sampler grid: expected values for {name}, such as {name}={field.low}..{field.high}:5, got a range"
            )
    return [dict(zip(over, values)) for values in itertools.product(*(field.ends() for field in over.values()))]


def flags_of(base: GPTConfig, config: GPTConfig) -> list[str]:
    """Return the command-line flags and values of `tricycle train` that change the base config to another config."""
    words: list[str] = []
    before, hints = base.to_dict(), get_type_hints(type(base))
    for name, value in config.to_dict().items():
        if value == before[name]:
            continue
        flag = name.replace("_", "-")
        is_switch = hints[name] is bool
        words += [f"--{flag}" if value else f"--no-{flag}"] if is_switch else [f"--{flag}", str(value)]
    return words
