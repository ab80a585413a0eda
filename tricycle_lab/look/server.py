"""HTTP server of the pages of `tricycle look`, for browsers on this machine only.

Python's `http.server` is sufficient for one local user and needs no dependency. Every URL starts with a random token. A
request without the token, or with the host name of another site (DNS rebinding), is rejected.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tricycle.softmaxes import SOFTMAXES
from tricycle_lab.look.inspectable import InspectableModel
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.look.measures import describe_measures, start_measure, table_data
from tricycle_lab.look.page import render_page
from tricycle_lab.look.trace import Trace
from tricycle_lab.measures import Table

HOST = "127.0.0.1"
MAX_REQUEST_BYTES = 2**20
SOCKET_TIMEOUT_SECONDS = 30.0
MAX_TRACES = 6  # traces that are kept of each model

SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Fields = dict[str, Any]

# Requests for a part of a trace: the name is that of a method of `Trace`, the fields are its arguments.
TRACE_REQUESTS: dict[str, dict[str, type]] = {
    "attention_map": {"layer": str, "head": int},
    "router_map": {"name": str},
    "head_statistics": {"start": int, "stop": int},
    "stream_statistics": {},
    "top_predictions": {"position": int},
    "logit_lens": {},
}


class UnknownRequestError(LookupError):
    """A request with a name that the page's service does not have."""


class ViewerService:
    """Responds to requests of the model viewer; one at a time, because each uses all processor cores.

    Args:
        models: one model, or two for a comparison.
        text: the first input text.
    """

    def __init__(self, models: Sequence[InspectableModel], text: str) -> None:
        self.models = models
        self.text = text
        self._traces: list[OrderedDict[int, Trace]] = [OrderedDict() for _ in models]
        self._n_traces = 0
        self._measures: list[tuple[int, Iterator[Table]]] = [(0, iter(())) for _ in models]  # the latest of each model
        self._lock = threading.Lock()

    def page(self) -> str:
        """Return the viewer's HTML page, with the text and the models' descriptions; it requests other data."""
        models = [{"info": model.describe(), "measures": describe_measures(model)} for model in self.models]
        title = " and ".join(model.title for model in self.models)
        data = {"hasServer": True, "text": self.text, "models": models, "softmaxes": list(SOFTMAXES)}
        return render_page("look", title, data, has_server=True, scripts=["experts.js", "measures.js"])

    def prepare(self) -> None:
        """Run each model on the text, so that the page's first request finds a trace; ignore invalid texts."""
        for index in range(len(self.models)):
            with contextlib.suppress(ValueError):  # the request of the page reports the error
                self.respond("run", {"model": index, "text": self.text})

    def respond(self, request: str, fields: Any) -> Any:
        """Run a model or read a trace that `fields` names; return JSON data, or ValueError, UnknownRequestError.

        Args:
            request: "run", "start_measure", "next_table", or a name in `TRACE_REQUESTS`.
            fields: the decoded JSON body.

        Raises:
            UnknownRequestError: another name.
            ValueError: invalid fields.
        """
        methods = {"run": self._run, "start_measure": self._start_measure, "next_table": self._next_table}
        if request not in (*methods, *TRACE_REQUESTS):
            raise UnknownRequestError(request)
        if not isinstance(fields, dict):
            raise ValueError("expected a JSON object")
        index = fields.get("model", 0)
        if type(index) is not int or not 0 <= index < len(self.models):
            raise ValueError(f"expected a model from 0 to {len(self.models) - 1}")
        with self._lock, np.errstate(all="ignore"):  # nan from damaged weights is shown in the results
            return methods[request](index, fields) if request in methods else self._read_trace(request, index, fields)

    def _run(self, index: int, fields: Fields) -> Fields:
        """Run a model on text or tokens, or find an equal trace; return the trace's summary; ValueError if invalid."""
        model = self.models[index]
        ids = self._parse_ids(index, fields)
        interventions = Interventions.from_json(fields.get("interventions"), model.ablatable, model.n_heads)
        if interventions.steering and not model.vectors:
            raise ValueError("interventions: expected a model with steering vectors (--steer FILE), got one without")
        traces = self._traces[index]
        for key, trace in traces.items():
            if (trace.interventions, trace.ids, trace.source_ids) == (interventions, ids, tuple(model.source_ids)):
                traces.move_to_end(key)
                return self._summarize(key, trace, fields)
        most_reusable = max(
            traces.values(), key=lambda trace: model.reusable_fraction(ids, interventions, trace), default=None
        )
        trace = model.run(ids, interventions, most_reusable)
        self._n_traces += 1
        traces[self._n_traces] = trace
        while len(traces) > MAX_TRACES:
            # delete traces with interventions first: each comparison needs the trace without
            changed = [key for key, trace in traces.items() if trace.interventions != Interventions()]
            del traces[changed[0] if len(changed) > 1 else next(iter(traces))]
        return self._summarize(self._n_traces, trace, fields)

    @staticmethod
    def _summarize(key: int, trace: Trace, fields: Fields) -> Fields:
        """Return the summary of a trace, with the attention map of one head if the request names layer and head."""
        summary = {"trace": key, **trace.summary()}
        match fields.get("map"):
            case [int(layer), int(head)] if (
                bool not in (type(layer), type(head))  # bool is a subclass of int
                and 0 <= layer < len(trace.attention_layers)
                and 0 <= head < trace.attention_layers[layer].n_heads
            ):
                summary["map"] = trace.attention_map(trace.attention_layers[layer].name, head)
        return summary

    def _parse_ids(self, index: int, fields: Fields) -> list[int]:
        """Return the token ids of a request: its ids, edited as it asks, or its encoded text; ValueError if invalid."""
        model = self.models[index]
        if "ids" not in fields:
            text = fields.get("text")
            if not isinstance(text, str):
                raise ValueError("expected a text, or ids")
            return model.encode_input(text)
        ids = fields["ids"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError("expected ids to be a list of integers")
        model.check_ids(ids)
        if model.kind == "encoder-decoder":  # its sources are those of the latest text, invalid or of another page
            model.source_ids = self._find_trace(index, fields).source_ids
        edit = fields.get("edit")
        if edit is None:
            return ids
        types = (type(edit.get("position")), type(edit.get("replacement"))) if isinstance(edit, dict) else None
        if types not in ((int, int), (int, str)):
            raise ValueError("expected an edit with a position, and a replacement that is a text or a token")
        return model.replace_token(ids, edit["position"], edit["replacement"])

    def _read_trace(self, request: str, index: int, fields: Fields) -> Any:
        """Call the method `request` of the stored trace that the fields name; ValueError if deleted or badly typed."""
        trace = self._find_trace(index, fields)
        for name, kind in TRACE_REQUESTS[request].items():
            if type(fields.get(name)) is not kind:
                raise ValueError(f"expected {name} to be {'a text' if kind is str else 'an integer'}")
        return getattr(trace, request)(*(fields[name] for name in TRACE_REQUESTS[request]))

    def _find_trace(self, index: int, fields: Fields) -> Trace:
        """Return the stored trace that the fields name; ValueError if it was deleted."""
        key = fields.get("trace")
        if type(key) is not int or key not in self._traces[index]:
            raise ValueError("this trace was deleted: run the model on the text again")
        return self._traces[index][key]

    def _start_measure(self, index: int, fields: Fields) -> Fields:
        """Start a measure of a model in place of its earlier one, and return its number."""
        tables = start_measure(self.models[index], self._find_trace(index, fields), fields)
        self._measures[index] = self._measures[index][0] + 1, tables
        return {"measure": self._measures[index][0]}

    def _next_table(self, index: int, fields: Fields) -> Fields:
        """Return the next table of a measure, or a layer of it, as JSON data, None after the last; ValueError if stale.

        A request for each layer shows the progress, lets other requests of the page in, and ends if the page stops.
        """
        key, tables = self._measures[index]
        if fields.get("measure") != key:
            raise ValueError("another measure was started: compute this one again")
        table = next(tables, None)
        return {"table": None if table is None else table_data(table)}


class StaticPage:
    """The service of a page that sends no requests.

    Args:
        content: the HTML page.
    """

    def __init__(self, content: str) -> None:
        self.content = content

    def page(self) -> str:
        """Return the HTML page as it was given."""
        return self.content

    def prepare(self) -> None:
        """Do nothing, because a static page needs no traces."""

    def respond(self, request: str, fields: Any) -> Any:
        """Raise `UnknownRequestError` for every request."""
        raise UnknownRequestError(request)


class LookServer(ThreadingHTTPServer):
    """An HTTP server for one page, at a URL with a random token.

    Args:
        service: has the methods `page`, `prepare` and `respond`, as `ViewerService` has.
        port: the port; 0 for any free port.

    Raises:
        ValueError: the port is in use or not permitted.
    """

    daemon_threads = True
    request_queue_size = 64  # with the default of 5, connections to a busy machine are lost
    allow_reuse_address = False  # an error is better than two servers on one port

    def __init__(self, service: Any, port: int = 0) -> None:
        self.service = service
        self.token = secrets.token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"port {port} is in use: name another with --port, or 0 for any") from None
            raise ValueError(f"port {port} cannot be used: {error.strerror}; --port 0 takes any") from None
        except OverflowError:
            raise ValueError(f"expected --port from 0 to 65535, got {port}") from None

    @property
    def address(self) -> str:
        """Return the URL of the page, with its random token."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore an error of a connection, such as one that the browser closed, and print nothing."""


class _Handler(BaseHTTPRequestHandler):
    server: LookServer
    timeout = SOCKET_TIMEOUT_SECONDS
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tricycle", ""

    def do_GET(self) -> None:
        """Send the HTML page for the token's own address; reject any other path with 404."""
        if self._request_name() == "":
            self._answer(self.server.service.page, "text/html; charset=utf-8")
        else:
            self._reject(404, "not found: open the address that `tricycle look` printed")

    def do_POST(self) -> None:
        """Answer a JSON request with the JSON of `service.respond`; send an error status if it is invalid."""
        request = self._request_name()
        if request is None:
            self._reject(404, "not found: open the address that `tricycle look` printed")
            return
        if self.headers.get_content_type() != "application/json":
            self._reject(415, "expected JSON")
            return
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            self._reject(411, "expected a request with its length")
            return
        if len(length) > 9 or int(length) > MAX_REQUEST_BYTES:
            self._reject(413, f"expected a request of at most {MAX_REQUEST_BYTES:,} bytes")
            return
        body = self.rfile.read(int(length))

        def respond() -> str:
            response = self.server.service.respond(request, json.loads(body))
            return json.dumps(response, ensure_ascii=False, separators=(",", ":"), allow_nan=False)

        self._answer(respond, "application/json")

    def _answer(self, compute: Callable[[], str], content_type: str) -> None:
        """Send the text that a function returns; send an error status if it raises."""
        try:
            content = compute().encode("utf-8", errors="replace")
        except UnknownRequestError:
            self._reject(404, "unknown request")
        except RecursionError:
            self._reject(400, "expected JSON with less nesting")
        except ValueError as error:  # includes invalid JSON and invalid UTF-8
            self._reject(400, " ".join(str(error).split())[:500])
        except MemoryError:
            self._reject(507, "not enough memory")
        except BaseException as error:  # a bug, or a panic of a Rust extension: the server stays available
            self._reject(500, f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        else:
            self._send(200, content, content_type)

    def _request_name(self) -> str | None:
        """Return the part of the URL after the token; None for a wrong token or host."""
        port = self.server.server_address[1]
        hosts = (f"{HOST}:{port}", f"localhost:{port}")
        parts = urlsplit(self.path).path.split("/", 2)
        has_token = len(parts) == 3 and hmac.compare_digest(parts[1].encode(), self.server.token.encode())
        return parts[2] if has_token and self.headers.get("Host") in hosts else None

    def _reject(self, status: int, message: str) -> None:
        """Send an error as JSON, and close the connection afterwards."""
        self.close_connection = True  # the rest of the request is not read
        self._send(status, json.dumps({"error": message}).encode("utf-8"), "application/json")

    def _send(self, status: int, content: bytes, content_type: str) -> None:
        """Send a complete response with the security headers."""
        self.send_response(status)
        headers = {**SECURITY_HEADERS, "Content-Type": content_type, "Content-Length": str(len(content))}
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""
