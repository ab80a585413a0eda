"""The exception for error responses, in the JSON format of OpenAI's API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tricycle_cli.flags import on_one_line

if TYPE_CHECKING:
    from starlette.responses import Response

JSON = "application/json"


def encode_json(value: Any) -> bytes:
    """Return a value as compact JSON in ASCII bytes; raise ValueError for NaN or infinity."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


class ApiError(Exception):
    """A request failed; the server sends this error as the response.

    Args:
        message: one line that says what was expected and what was received.
        status: the HTTP status code.
        param: the name of the invalid request field.
        code: an error code for programs.
        retry_after_seconds: the value of the header Retry-After.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(on_one_line(message))
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def body(self) -> dict[str, Any]:
        """Return the response body {"error": ...} with message, type, param and code, as of OpenAI's API."""
        other = "invalid_request_error" if self.status < 500 else "server_error"
        error_type = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, other)
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}

    def response(self, headers: dict[str, str] | None = None) -> Response:
        """Return the HTTP response with `headers`, Retry-After if seconds are given, and WWW-Authenticate for 401."""
        from starlette.responses import Response

        retry = {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}
        authenticate = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return Response(encode_json(self.body()), self.status, {**(headers or {}), **retry, **authenticate}, JSON)
