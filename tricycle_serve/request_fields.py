"""Parsing of untrusted JSON request bodies, and validation of their fields."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Collection
from typing import Any, NoReturn

from tricycle_serve.errors import ApiError

_SURROGATES = re.compile("[\ud800-\udfff]")
MAX_NAME_CHARACTERS = 40  # of an unknown field's name, or a number, in an error message


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a UTF-8 request body; raise ApiError for any other content."""
    try:
        value = STRICT_JSON.decode(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise ApiError("expected a body in UTF-8", code="invalid_json") from None
    except RecursionError:
        raise ApiError("expected JSON, got JSON that is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(f"expected JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"expected a JSON object, got {format_value(value)}", code="invalid_json")
    return value


def _reject_constant(name: str) -> NoReturn:
    """Raise ValueError: NaN and infinity are no JSON."""
    raise ValueError(f"{name} is not valid JSON")


def _finite_float(digits: str) -> float:
    """Return a JSON number as a float; raise ValueError if it is too large for one."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"expected numbers of float64, got {digits[:MAX_NAME_CHARACTERS]}")
    return value


# Raises ValueError for NaN, and for infinite numbers, which no JSON can contain again.
STRICT_JSON = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite_float)


def format_value(value: Any) -> str:
    """Return a short description of a JSON value for an error message: "an object", "a list of 3", or the value."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    return json.dumps(value) if value is None or isinstance(value, (bool, int, float)) else reprlib.repr(value)


def replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode, by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


class RequestFields:
    """The fields of a JSON request body; null counts as absent.

    Each `get_` method returns the default for an absent field, and raises `ApiError` for an invalid value.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._known: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field without validation, or `default` if it is absent; mark the field as read."""
        self._known.add(name)
        return self._values.get(name, default)

    def reject(self, name: str, expected: str) -> NoReturn:
        """Raise ApiError of status 400: expected `name` to be `expected`, got its value."""
        raise ApiError(f"expected {name} to be {expected}, got {format_value(self._values.get(name))}", param=name)

    def get_int(self, name: str, default: Any, minimum: int, maximum: int) -> Any:
        """Return an integer field in a range (2.0 counts as 2), or `default` if absent; raise ApiError if invalid."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not minimum <= value <= maximum:
            self.reject(name, f"an integer from {minimum} to {maximum}")
        return value

    def get_float(self, name: str, default: Any, minimum: float, maximum: float) -> Any:
        """Return a number field in a range as a float, or `default` if absent; raise ApiError if invalid."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.reject(name, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def get_bool(self, name: str, default: bool = False) -> bool:
        """Return a Boolean field, or `default` if it is absent; raise ApiError for another type."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.reject(name, "true or false")
        return value

    def get_str(self, name: str) -> str | None:
        """Return a string field, unpaired surrogates as U+FFFD, or None if absent; ApiError for another type."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self.reject(name, "a string")
        return None if value is None else replace_surrogates(value)

    def allow_only(self, name: str, allowed: Collection[Any], reason: str) -> None:
        """Mark an unsupported field as read; ApiError unless it is absent, null or one of `allowed`, without effect."""
        value = self.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise ApiError(f"{name} is not supported: {reason}", param=name, code="unsupported_parameter")

    def ignore(self, *names: str) -> None:
        """Mark fields that do not affect the response as read, for `reject_unknown`, without checking their values."""
        self._known.update(names)

    def reject_unknown(self) -> None:
        """Raise ApiError for a field that no other method has read or ignored."""
        for name in self._values:
            if name not in self._known:
                short = name[:MAX_NAME_CHARACTERS]
                raise ApiError(f"unrecognised field: {short}", param=short, code="unknown_field")
