"""What is answered where a request cannot be, in the form that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from tricycle_cli.flags import on_one_line


class ApiError(Exception):
    """An answer that is an error.

    Args:
        message: one line, which says what was expected and what came.
        param: the field of the request that is wrong.
        code: a word for programs.
        wait: seconds after which to try again.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        wait: int | None = None,
    ) -> None:
        super().__init__(on_one_line(message))
        self.status = status
        self.param = param
        self.code = code
        self.wait = wait

    def fields(self) -> dict[str, Any]:
        """The answer's body."""
        about = {"message": str(self), "type": _kind(self.status), "param": self.param, "code": self.code}
        return {"error": about}

    def headers(self) -> dict[str, str]:
        """What goes into the answer's headers."""
        headers = {} if self.wait is None else {"Retry-After": str(self.wait)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
