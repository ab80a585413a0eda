"""Middleware that checks the Host header, the origin and the API key of each request."""

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
from tricycle_serve.metrics import Metrics

# Pages may load files from this server and send requests to it, and nothing else.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# RFC 9110, section 7.2: a name, an IPv4 address, or an IPv6 address in brackets; optionally a port.
HOST_PATTERN = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.-]+))(?::\d{1,5})?", re.ASCII)
PROTECTED_PREFIXES = ("/v1/", "/metrics")  # of the paths that require the API key


class AccessMiddleware:
    """ASGI middleware that rejects requests from other sites and requests without the API key.

    A page of another site can make a browser send requests to this server. With DNS rebinding (its own host name
    resolves to this server's address) it could even read the responses. Therefore the Host header must contain one of
    the allowed names or an IP address, and the Origin header must be this server or one of the allowed origins.

    Args:
        allowed_hosts: host names of this server, in addition to "localhost".
        allowed_origins: origins of other pages that may send requests (CORS), such as "http://localhost:3000".
        api_key: the key that requests must contain; None if no key is required.
        metrics: counts all responses, if it is not None.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Iterable[str],
        allowed_origins: Iterable[str],
        api_key: str | None,
        metrics: Metrics | None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._allowed_hosts = {"localhost", *(name.lower() for name in allowed_hosts)}
        self._allowed_origins = {origin.rstrip("/").lower() for origin in allowed_origins}
        self._api_key_digest = None if api_key is None else _digest(api_key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request by an error response, answer a preflight, or pass it on; add security headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._metrics is not None:
            send = _count_response(send, self._metrics, scope["path"])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin", "").lower()
        extra_headers = dict(SECURITY_HEADERS)
        if origin in self._allowed_origins:
            extra_headers |= {"Access-Control-Allow-Origin": headers["origin"], "Vary": "Origin"}
            extra_headers["Cross-Origin-Resource-Policy"] = "cross-origin"
        try:
            self._check_host_and_origin(headers, origin)
            if scope["method"] == "OPTIONS" and origin in self._allowed_origins:
                cors_headers = extra_headers | {
                    "Access-Control-Allow-Methods": "GET, POST",
                    "Access-Control-Allow-Headers": "*, Authorization",
                }
                await Response("{}", headers=cors_headers, media_type="application/json")(scope, receive, send)
                return
            self._check_api_key(headers, scope["path"])
        except ApiError as error:
            await error.response(extra_headers)(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(extra_headers)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _check_host_and_origin(self, headers: dict[str, str], origin: str) -> None:
        """Raise ApiError of status 403 unless the host is known or an IP address, and an origin known or this one."""
        host = headers.get("host", "")
        name = host_name(host)
        is_allowed = name in self._allowed_hosts
        with suppress(ValueError):  # raised if the name is not an IP address
            is_allowed = is_allowed or bool(ipaddress.ip_address(name))
        if not is_allowed:
            message = f"expected this server's name in the Host header, got {name[:100]!r}"
            raise ApiError(f"{message}; --allowed-hosts adds a name", 403, code="wrong_host")
        if origin and origin not in self._allowed_origins and origin.partition("://")[2] != host.lower():
            message = f"expected a request from this server's own page, got the origin {origin[:100]!r}"
            raise ApiError(f"{message}; --allowed-origins adds an origin", 403, code="wrong_origin")

    def _check_api_key(self, headers: dict[str, str], path: str) -> None:
        """Raise ApiError of status 401 if the path needs the API key and the request has another or none."""
        if self._api_key_digest is None or not path.startswith(PROTECTED_PREFIXES):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))
        if scheme.lower() != "bearer" or not hmac.compare_digest(digest, self._api_key_digest):
            raise ApiError("expected the API key as Authorization: Bearer KEY", 401, code="invalid_api_key")


def _count_response(send: Send, metrics: Metrics, path: str) -> Send:
    """Return a function that sends a message and counts the response that it begins."""

    async def counting_send(message: Any) -> None:
        if message["type"] == "http.response.start":
            metrics.count_response(path, message["status"])
        await send(message)

    return counting_send


def host_name(host: str) -> str:
    """Return the name or address in a Host header in lower case, without port or final dots; "" if malformed."""
    match = HOST_PATTERN.fullmatch(host)
    return "" if match is None else (match["address"] or match["name"]).lower().rstrip(".")


def _digest(key: bytes) -> bytes:
    """Return a key's SHA-256: by its fixed length the duration of a comparison does not reveal the key's length."""
    return hashlib.sha256(key).digest()
