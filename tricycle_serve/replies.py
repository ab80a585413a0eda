"""Answers that are whole, as JSON."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from tricycle_serve.answers import to_json
from tricycle_serve.errors import ApiError

JSON = "application/json"


def reply(value: Any) -> Response:
    """Return a value as JSON."""
    return Response(to_json(value), media_type=JSON)


def refusal(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """Return an error as an answer."""
    return Response(to_json(error.fields()), error.status, {**(headers or {}), **error.headers()}, JSON)
