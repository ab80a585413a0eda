"""Answers that are whole, as ASGI applications."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tricycle_serve.answers import to_json
from tricycle_serve.errors import ApiError

# As the ASGI specification has them, https://asgi.readthedocs.io/en/latest/specs/main.html
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = "application/json"


class Reply:
    """One answer.

    Args:
        kind: of the content; that of texts is UTF-8.
    """

    def __init__(
        self, content: bytes, status: int = 200, kind: str = JSON, headers: dict[str, str] | None = None
    ) -> None:
        self._content = content
        self._status = status
        content_type = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        self.headers = {"content-type": content_type, "content-length": str(len(content)), **(headers or {})}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self._status, "headers": raw_headers(self.headers)})
        await send({"type": "http.response.body", "body": self._content, "more_body": False})


def raw_headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    """As ASGI has them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def reply(value: Any) -> Reply:
    """A value as JSON."""
    return Reply(to_json(value))


def refusal(error: ApiError, headers: dict[str, str] | None = None) -> Reply:
    """An error as an answer."""
    return Reply(to_json(error.fields()), error.status, headers={**(headers or {}), **error.headers()})
