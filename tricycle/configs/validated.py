"""`ValidatedConfig`: a dataclass whose field values are validated on construction."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

__all__ = ["ValidatedConfig", "OneOf", "Rule"]

if TYPE_CHECKING:
    from typing import Annotated as OneOf
else:

    class OneOf:
        """`OneOf[str, TABLE]`: a Literal of the names in a table, evaluated whenever a field is validated."""

        def __class_getitem__(cls, parameters: tuple[type, Any]) -> Any:
            """Return typing.Literal of the names in OneOf[str, names]."""
            return Literal[*parameters[1]]


Rule = tuple[str, Callable[[Any], bool], str]  # field names, a predicate of valid values, and a description


class ValidatedConfig:
    """The base of configs: an invalid value raises a ValueError with the field and the rule."""

    rules: ClassVar[Sequence[Rule]] = ()  # of the fields that a class itself declares

    def __post_init__(self) -> None:
        """Raise a ValueError if a field has another type than its annotation, or breaks a rule of a class or base."""
        hints = get_type_hints(type(self))
        for field in fields(self):  # type: ignore[arg-type]
            expected = _expected(getattr(self, field.name), hints[field.name])
            self._require(field.name, not expected, expected)
        for kind in reversed(type(self).__mro__):
            for names, holds, rule in vars(kind).get("rules", ()):
                for name in names.split():
                    self._require(name, holds(getattr(self, name)), rule)

    def _require(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: expected {field} to be {rule}, got {getattr(self, field)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name as a dict of JSON-serializable values, tuples as lists."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make a config from the dict of `to_dict`; missing fields get defaults, unknown ones raise a ValueError."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})  # type: ignore[arg-type]
        if unknown:
            raise ValueError(f"{cls.__name__}: expected only known fields, got {', '.join(unknown)}")
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _expected(value: Any, kind: Any) -> str:
    """Return a description of the valid values of a type annotation, or "" if `value` is one."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # a type or None
        return "" if value is None else _expected(value, args[0])
    if origin is Literal:
        return "" if isinstance(value, str) and value in args else f"one of {', '.join(args)}"
    if origin is tuple:
        items = value if isinstance(value, tuple) else [None]
        rule = "names" if args[0] is str else "whole numbers" if args[0] is int else "finite numbers"
        return rule if any(not isinstance(x, str) if args[0] is str else _expected(x, args[0]) for x in items) else ""
    if kind is bool:
        return "" if isinstance(value, bool) else "True or False"
    numbers, name = (int, "whole") if kind is int else ((int, float), "finite")
    holds = isinstance(value, numbers) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return "" if holds else f"a {name} number"
