"""The ASGI application: routes, endpoints and the transmission of responses."""

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

from tricycle_serve.embeddings import EmbeddingsResponse
from tricycle_serve.engine_request import RequestCancelled
from tricycle_serve.errors import JSON, ApiError, encode_json
from tricycle_serve.metrics import MISSING, create_metrics
from tricycle_serve.middleware import AccessMiddleware
from tricycle_serve.request_fields import RequestFields, parse_json_object
from tricycle_serve.responses import CompletionResponse
from tricycle_serve.services import ModelService, model_not_found

BODY_TIMEOUT_SECONDS = 30.0  # maximum time until the whole body of a request has arrived
MAX_OPEN_REQUESTS = 256  # includes requests whose responses are still being sent
PAGES = {
    "/": ("chat.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
}

STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]

Endpoint = Callable[[Request], Awaitable[Any]]
ModelResponse = CompletionResponse | EmbeddingsResponse


def create_app(
    service: ModelService,
    *,
    allowed_hosts: Iterable[str],
    allowed_origins: Iterable[str],
    api_key: str | None,
    max_request_bytes: int,
) -> AccessMiddleware:
    """Return the ASGI app of OpenAI's endpoints, /health, /metrics and web pages; set `service.engine.metrics`.

    The caller starts `service.engine`.

    Args:
        allowed_hosts, allowed_origins, api_key: see `AccessMiddleware`.
        max_request_bytes: maximum size of a request body.
    """
    endpoints = _Endpoints(service, max_request_bytes)
    routes: Any = [
        Route("/v1/chat/completions", endpoints.post_endpoint(service.chat), methods=["POST"]),
        Route("/v1/completions", endpoints.post_endpoint(service.complete), methods=["POST"]),
        Route("/v1/responses", endpoints.post_endpoint(service.respond), methods=["POST"]),
        Route("/v1/embeddings", endpoints.post_endpoint(service.embed), methods=["POST"]),
        Route("/v1/models", endpoints.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.get_model, methods=["GET"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        *(Route(path, _page_endpoint(*page), methods=["GET"]) for path, page in PAGES.items()),
    ]
    handlers: Any = {HTTPException: _handle_http_exception, ApiError: _handle_api_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    service.engine.metrics = create_metrics(routes, service.engine.gauges)
    return AccessMiddleware(app, allowed_hosts, allowed_origins, api_key, service.engine.metrics)


class _Endpoints:
    """The endpoints of the API, and the count of open requests."""

    def __init__(self, service: ModelService, max_request_bytes: int) -> None:
        self._service = service
        self._max_request_bytes = max_request_bytes
        self._n_open = 0

    def post_endpoint(self, submit: Callable[[RequestFields], Awaitable[Any]]) -> Endpoint:
        """Return an endpoint: parse JSON, await `submit`, send its response or error; 503 if too many are open."""

        async def endpoint(request: Request) -> ASGIApp:
            if self._n_open >= MAX_OPEN_REQUESTS:
                raise ApiError("too many open requests", 503, code="overloaded", retry_after_seconds=5)
            self._n_open += 1
            try:
                fields = RequestFields(parse_json_object(await self._read_body(request)))
                return _ResponseSender(await submit(fields), self._on_done)
            except BaseException as error:
                self._on_done()
                if isinstance(error, asyncio.CancelledError):
                    raise
                if isinstance(error, ClientDisconnect):
                    return Response(status_code=499)
                return _to_api_error(error, request.url.path).response()

        return endpoint

    def _on_done(self) -> None:
        """Count an open request as done."""
        self._n_open -= 1

    async def _read_body(self, request: Request) -> bytes:
        """Return the body of a request; raise ApiError if it is too large or arrives too slowly."""
        limit = self._max_request_bytes
        too_large = ApiError(f"expected a request of at most {limit:,} bytes", 413, code="too_large")
        content_length = request.headers.get("content-length", "0")
        if not content_length.isdecimal() or int(content_length[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            message = f"expected the whole request within {BODY_TIMEOUT_SECONDS:.0f} s"
            raise ApiError(message, 408, code="too_slow") from None
        return bytes(body)

    async def health(self, request: Request) -> Response:
        """Return status 200 while the engine thread runs, and 503 after it has ended."""
        if self._service.engine.is_alive:
            return _json_response({"status": "ok"})
        message = "the model's thread has ended: restart the server"
        return ApiError(message, 503, code="model_failed").response()

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of the server in Prometheus's text format; status 501 without prometheus_client."""
        metrics = self._service.engine.metrics
        if metrics is None:
            raise ApiError(MISSING, 501, code="metrics_unavailable")
        content, media_type = metrics.report()
        return Response(content, media_type=media_type)

    async def list_models(self, request: Request) -> Response:
        """Return a JSON response with OpenAI's list of models, which contains only the served one."""
        return _json_response({"object": "list", "data": [self._service.model_info()]})

    async def get_model(self, request: Request) -> Response:
        """Return a JSON response about the model named in the path; raise ApiError of status 404 if not served."""
        name = request.path_params["name"]
        if name != self._service.name:
            raise model_not_found(name, self._service.name)
        return _json_response(self._service.model_info())


class _ResponseSender:
    """ASGI application that sends a response while the model generates it, and cancels the request on a disconnect.

    Args:
        on_done: called when the response is sent or the request is cancelled.
    """

    def __init__(self, response: ModelResponse, on_done: Callable[[], None]) -> None:
        self._response = response
        self._on_done = on_done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or its events if streamed; cancel the request if the client disconnects."""
        engine_request = self._response.engine_request

        async def cancel_on_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            engine_request.cancel()

        disconnect_task = asyncio.create_task(cancel_on_disconnect())
        try:
            if isinstance(self._response, CompletionResponse) and self._response.request.stream:
                await self._send_events(self._response, scope["path"], send)
            else:
                await (await self._complete_response(scope["path"]))(scope, receive, send)
        except RequestCancelled:
            pass
        finally:
            disconnect_task.cancel()
            engine_request.cancel()
            self._on_done()

    async def _complete_response(self, path: str) -> Response:
        """Return the collected result, or the error, as a JSON response; let cancellations pass."""
        try:
            return _json_response(await self._response.collect())
        except (RequestCancelled, asyncio.CancelledError):
            raise
        except BaseException as error:  # panics of Rust extensions are not of type Exception
            return _to_api_error(error, path).response()

    async def _send_events(self, response: CompletionResponse, path: str, send: Send) -> None:
        """Send status 200 and each event of a stream when it is generated, an error as the last; end the body."""
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        last = b""
        try:
            async for event in response.events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except (RequestCancelled, asyncio.CancelledError):
            raise
        except BaseException as error:  # as in `_complete_response`
            last = response.error_event(_to_api_error(error, path))
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _json_response(value: Any) -> Response:
    """Return a response with the status 200 whose body is a value as JSON."""
    return Response(encode_json(value), media_type=JSON)


def _page_endpoint(name: str, media_type: str) -> Endpoint:
    """Return an endpoint that sends a file of `pages`, read once when this is called."""
    content = (files("tricycle_serve") / "pages" / name).read_bytes()

    async def page(request: Request) -> Response:
        return Response(content, headers={"Cache-Control": "no-cache"}, media_type=media_type)

    return page


async def _handle_api_error(request: Request, error: ApiError) -> Response:
    """Return the error as an HTTP response."""
    return error.response()


async def _handle_http_exception(request: Request, error: HTTPException) -> Response:
    """Return an HTTP error, such as 404 or 405, as an OpenAI error object with its headers."""
    path, status = request.url.path[:100], error.status_code
    messages = {
        404: f"there is no endpoint {path!r}",
        405: f"expected another method than {request.method[:20]} for {path}",
    }
    code = "not_found" if status == 404 else None
    return ApiError(messages.get(status, error.detail), status, code=code).response(dict(error.headers or {}))


def _to_api_error(error: BaseException, path: str) -> ApiError:
    """Return an ApiError as it is; print another exception's traceback, and return an error without details."""
    if isinstance(error, ApiError):
        return error
    print(f"{path}: {''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
    return ApiError("internal server error", status=500, code="internal_error")
