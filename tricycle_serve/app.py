"""The addresses that are answered."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tricycle_serve.answers import Answer
from tricycle_serve.errors import ApiError
from tricycle_serve.fields import Fields, read_object
from tricycle_serve.gate import Gate
from tricycle_serve.replies import refusal, reply
from tricycle_serve.served import Served, no_such_model
from tricycle_serve.work import Gone

MOST_BYTES = 2**22  # of a request
MOST_SECONDS = 30.0  # in which it has to arrive
MOST_REQUESTS = 256  # at once, those that are only being sent off included
PAGES = {
    "/": ("chat.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
}

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]

Endpoint = Callable[[Request], Awaitable[Any]]


def new_app(
    served: Served,
    *,
    names: Iterable[str] = (),
    origins: Iterable[str] = (),
    key: str | None = None,
    most_bytes: int = MOST_BYTES,
) -> Gate:
    """An ASGI application; `served.engine` must be started by whoever runs it.

    Args:
        names, origins, key: as of `Gate`.
        most_bytes: of a request.
    """
    desk = _Desk(served, most_bytes)
    routes: Any = [
        Route("/v1/chat/completions", desk.answering(served.chat), methods=["POST"]),
        Route("/v1/completions", desk.answering(served.complete), methods=["POST"]),
        Route("/v1/embeddings", desk.answering(served.embed), methods=["POST"]),
        Route("/v1/models", desk.models, methods=["GET"]),
        Route("/v1/models/{name:path}", desk.model, methods=["GET"]),
        Route("/health", desk.health, methods=["GET"]),
        *(Route(path, _page(*page), methods=["GET"]) for path, page in PAGES.items()),
    ]
    handlers: Any = {HTTPException: _http_error, ApiError: _api_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Gate(app, names, origins, key)


class _Desk:
    """Takes requests, and hands answers out."""

    def __init__(self, served: Served, most_bytes: int) -> None:
        self._served = served
        self._most_bytes = most_bytes
        self._n_open = 0

    def answering(self, ask: Callable[[Fields], Awaitable[Any]]) -> Endpoint:
        """What a POST to an address does."""

        async def answer(request: Request) -> ASGIApp:
            if self._n_open >= MOST_REQUESTS:
                raise ApiError("too many requests are open", 503, code="overloaded", wait=5)
            self._n_open += 1
            try:
                return _Sending(await ask(Fields(read_object(await self._body(request)))), self._finish)
            except BaseException as error:
                self._finish()
                if isinstance(error, (ApiError, asyncio.CancelledError)):
                    raise
                if isinstance(error, ClientDisconnect):
                    return Response(status_code=499)
                return refusal(_unexpected(error, request.url.path))

        return answer

    def _finish(self) -> None:
        self._n_open -= 1

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request; raise ApiError where it is too large, or too slow."""
        too_large = ApiError(f"expected a request of at most {self._most_bytes:,} bytes", 413, code="too_large")
        stated = request.headers.get("content-length", "0")
        if not stated.isdecimal() or int(stated[:20]) > self._most_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(MOST_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self._most_bytes:
                        raise too_large
        except TimeoutError:
            raise ApiError(f"expected the whole request within {MOST_SECONDS:.0f} s", 408, code="too_slow") from None
        return bytes(body)

    async def health(self, request: Request) -> Response:
        """Whether requests for texts are answered: 200, or 503 once the model's thread has ended."""
        if self._served.engine.is_alive:
            return reply({"status": "ok"})
        return refusal(ApiError("the model's thread has ended: start the server again", 503, code="model_failed"))

    async def models(self, request: Request) -> Response:
        """The one that there is."""
        return reply({"object": "list", "data": [self._served.about()]})

    async def model(self, request: Request) -> Response:
        """That of a name."""
        name = request.path_params["name"]
        if name != self._served.name:
            raise no_such_model(name, self._served.name)
        return reply(self._served.about())


class _Sending:
    """Sends an answer while it is made, and lets the model know when nobody is there to read it.

    Args:
        finish: called when all is sent, or nobody wants it.
    """

    def __init__(self, answer: Any, finish: Callable[[], None]) -> None:
        self._answer = answer
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._answer.work

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            work.leave()

        waiting = asyncio.create_task(wait())
        try:
            if isinstance(self._answer, Answer) and self._answer.wish.stream:
                await self._stream(send)
            else:
                await (await self._whole(scope["path"]))(scope, receive, send)
        except Gone:
            pass
        finally:
            waiting.cancel()
            work.leave()
            self._finish()

    async def _whole(self, path: str) -> Response:
        try:
            return reply(await self._answer.whole())
        except (Gone, asyncio.CancelledError):
            raise
        except ApiError as error:
            return refusal(error)
        except BaseException as error:  # a panic in Rust is no Exception
            return refusal(_unexpected(error, path))

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        async for part in self._answer.events():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _page(name: str, kind: str) -> Endpoint:
    """A file of this package, read once."""
    content = (files("tricycle_serve") / "pages" / name).read_bytes()

    async def page(request: Request) -> Response:
        return Response(content, headers={"Cache-Control": "no-cache"}, media_type=kind)

    return page


async def _api_error(request: Request, error: ApiError) -> Response:
    return refusal(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    path, status = request.url.path[:100], error.status_code
    known = {404: f"there is no {path!r} here", 405: f"expected another method than {request.method[:20]} for {path}"}
    code = "not_found" if status == 404 else None
    return refusal(ApiError(known.get(status, error.detail), status, code=code), dict(error.headers or {}))


def _unexpected(error: BaseException, path: str) -> ApiError:
    """A mistake of this program: the client hears that there is one, whoever looks after the server which."""
    print(f"{path}: {''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
    return ApiError("the server made a mistake", status=500, code="internal_error")
