"""Who is let in: by the name that a browser thinks it talks to, by the page that asks, and by the key."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tricycle_serve.errors import ApiError
from tricycle_serve.replies import refusal

# A page may load what lies beside it, and talk to this server, and nothing else.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# RFC 9110, section 7.2: a name or an IPv4 address, or an IPv6 address in brackets; and perhaps a port.
HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{1,5})?", re.ASCII)
PRIVATE = "/v1/"  # what begins addresses that ask for a key


class Gate:
    """Stands before the whole application.

    A page of another site can make a browser send requests here, and by DNS rebinding even read the answers, if its own
    name is made to lead here. So the name that a request is addressed to must be one of this server's or a plain IP
    address, and a page that asks must have come from here or be one of those that are admitted.

    Args:
        names: host names under which this server is known, beside "localhost".
        origins: of pages elsewhere that may ask, such as "http://localhost:3000".
        key: what a request has to bring along; None for nothing.
    """

    def __init__(
        self, app: ASGIApp, names: Iterable[str] = (), origins: Iterable[str] = (), key: str | None = None
    ) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}
        self._origins = {origin.rstrip("/").lower() for origin in origins}
        self._key = None if key is None else _digest(key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin", "").lower()
        extra = dict(HEADERS)
        if origin in self._origins:
            extra |= {"Access-Control-Allow-Origin": headers["origin"], "Vary": "Origin"}
            extra["Cross-Origin-Resource-Policy"] = "cross-origin"
        try:
            self._check_names(headers, origin)
            if scope["method"] == "OPTIONS" and origin in self._origins:
                allowed = {
                    "Access-Control-Allow-Methods": "GET, POST",
                    "Access-Control-Allow-Headers": "*, Authorization",
                }
                await Response("{}", headers=extra | allowed, media_type="application/json")(scope, receive, send)
                return
            self._check_key(headers, scope["path"])
        except ApiError as error:
            await refusal(error, extra)(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(extra)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _check_names(self, headers: dict[str, str], origin: str) -> None:
        name = host_name(headers.get("host", ""))
        is_known = name in self._names
        with suppress(ValueError):  # a name is no address
            is_known = is_known or bool(ipaddress.ip_address(name))
        if not is_known:
            message = f"expected Host to be this server's, got {name[:100]!r}; --allowed-hosts adds a name"
            raise ApiError(message, 403, code="wrong_host")
        if origin and origin not in self._origins and origin.partition("://")[2] != headers.get("host", "").lower():
            message = f"expected a page of this server, got one of {origin[:100]!r}; --allowed-origins adds an origin"
            raise ApiError(message, 403, code="wrong_origin")

    def _check_key(self, headers: dict[str, str], path: str) -> None:
        if self._key is None or not path.startswith(PRIVATE):
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._key):
            raise ApiError("expected the server's key as Authorization: Bearer KEY", 401, code="invalid_api_key")


def host_name(host: str) -> str:
    """Return what a Host header names, without the port; "" where it is not a host and a port."""
    match = HOST.fullmatch(host)
    return "" if match is None else (match["address"] or match["name"]).lower().rstrip(".")


def _digest(key: bytes) -> bytes:
    """All of one length, so that the time of a comparison tells nothing."""
    return hashlib.sha256(key).digest()
