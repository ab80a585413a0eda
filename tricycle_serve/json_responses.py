"""HTTP responses with JSON bodies."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from tricycle_serve.errors import ApiError
from tricycle_serve.responses import encode_json

JSON = "application/json"


def json_response(value: Any) -> Response:
    """Return a response of status 200 with a value as JSON."""
    return Response(encode_json(value), media_type=JSON)


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """Return the response for an error: its status, its body as JSON, and its headers in addition to `headers`."""
    return Response(encode_json(error.body()), error.status, {**(headers or {}), **error.headers()}, JSON)
