"""The body of a request: JSON from anybody, and its fields, each checked as it is taken."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection
from typing import Any, NoReturn

from tricycle_serve.errors import ApiError

_HALVES = re.compile("[\ud800-\udfff]")
MOST_WORDS = 40  # characters of a value that a message shows


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is; raise ApiError where it is none."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ApiError("expected a body in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise ApiError("expected JSON, got some that nests too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"expected JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"expected a JSON object, got {shown(value)}", code="invalid_json")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def shown(value: Any) -> str:
    """A value for a message."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge number"
    return json.dumps(value) if value is None or isinstance(value, (bool, int, float)) else reprlib.repr(value)


def clean(text: str) -> str:
    """A text that is Unicode: half a pair of surrogates becomes U+FFFD."""
    return _HALVES.sub("\ufffd", text)


class Fields:
    """The fields of a request. null counts as absent.

    Raises:
        ApiError: by each method, for a value that is not as it says.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Anything."""
        self._taken.add(name)
        return self._values.get(name, default)

    def has(self, name: str) -> bool:
        return name in self._values

    def refuse(self, name: str, wanted: str) -> NoReturn:
        raise ApiError(f"expected {name} to be {wanted}, got {shown(self._values.get(name))}", param=name)

    def whole(self, name: str, default: Any, least: int, most: int | None = None) -> Any:
        """A whole number in a range."""
        value = self.take(name, default)
        wanted = f"a whole number from {least} to {most}" if most is not None else f"a whole number, {least} or more"
        if not self.has(name):
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least or (most is not None and value > most):
            self.refuse(name, wanted)
        return value

    def number(self, name: str, default: Any, least: float, most: float) -> Any:
        """A number in a range."""
        value = self.take(name, default)
        if not self.has(name):
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> Any:
        """A text."""
        value = self.take(name, default)
        if value is not None and not isinstance(value, str):
            self.refuse(name, "a text")
        return None if value is None else clean(value)

    def only(self, name: str, allowed: Collection[Any], why: str) -> None:
        """Something that can be asked for in one way alone: any of these values, of which nothing comes."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise ApiError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")

    def ignore(self, *names: str) -> None:
        """What has no bearing on the answer."""
        self._taken.update(names)

    def expect_no_more(self) -> None:
        """Nothing is there that nobody took."""
        for name in self._values:
            if name not in self._taken:
                short = name[:MOST_WORDS]
                raise ApiError(f"unrecognised field: {short}", param=short, code="unknown_field")
