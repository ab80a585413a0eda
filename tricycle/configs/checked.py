"""A dataclass whose values are checked when it is made."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

# What values fields may have: names, rule, the rule in words.
Rule = tuple[str, Callable[[Any], bool], str]


class Checked:
    """The base of configs: types and rules hold, or the config is refused, naming field and rule."""

    def _check(self, rules: list[Rule]) -> None:
        self._check_types()
        for names, holds, rule in rules:
            for name in names.split():
                self._require(name, holds(getattr(self, name)), rule)

    def _require(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: expected {field} to be {rule}, got {getattr(self, field)!r}")

    def _check_types(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]
            problem = _problem(getattr(self, field.name), hints[field.name])
            self._require(field.name, problem is None, problem or "")

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The config that `to_dict` described; fields that are not there have their defaults.

        Raises:
            ValueError: unknown fields, named, or values that no config may have.
        """
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"{cls.__name__}: expected only known fields, got {', '.join(unknown)}")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _problem(value: Any, wanted: Any) -> str | None:
    """What a value of this type should have been; None where it is."""
    if get_origin(wanted) in (Union, types.UnionType):
        others = [kind for kind in get_args(wanted) if kind is not type(None)]
        return None if value is None else _problem(value, others[0])
    if get_origin(wanted) is Literal:
        choices = get_args(wanted)
        return None if isinstance(value, str) and value in choices else f"one of {', '.join(choices)}"
    if get_origin(wanted) is tuple:
        kind = get_args(wanted)[0]
        if kind is str:
            return None if isinstance(value, tuple) and all(isinstance(item, str) for item in value) else "names"
        whole = isinstance(value, tuple) and not any(_problem(item, int) for item in value)
        return None if whole else "whole numbers"
    if wanted is bool:
        return None if isinstance(value, bool) else "True or False"
    if wanted is str:  # names have rules of their own
        return None
    kinds = int if wanted is int else (int, float)
    holds = isinstance(value, kinds) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return None if holds else f"a {'whole' if wanted is int else 'finite'} number"
