"""The exception for error responses, in the JSON format of OpenAI's API."""

from __future__ import annotations

from typing import Any

from tricycle_cli.flags import on_one_line


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
        error = {"message": str(self), "type": _error_type(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the additional headers: Retry-After if seconds are given, WWW-Authenticate for status 401; else {}."""
        headers = {} if self.retry_after_seconds is None else {"Retry-After": str(self.retry_after_seconds)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
