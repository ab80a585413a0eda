"""Test helpers: a server in a thread with a tiny model, requests to it, expected texts, and fixtures of all these.

A test module imports the fixtures that it needs; its TEMPLATE is the model's chat template, by default ChatML.
"""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from chat_templates import CHATML
from tiny_models import write_folder

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.pretrained import load
from tricycle_cli.serve import Arguments, address
from tricycle_cli.serve import load as load_service
from tricycle_serve.app import create_app
from tricycle_serve.server import Server, listen

STOP_TOKEN = 2  # the tiny model's end of an answer
HELLO = [{"role": "user", "content": "the quick brown fox"}]


@dataclass
class RunningServer:
    """A server that accepts requests."""

    service: Any
    url: str
    uvicorn_server: Any
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def request(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any, Any]:
        """Send a request; return status, body and headers of the response."""
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection = self.connection()
        try:
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, {**self.headers, **headers})
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        is_json = response.getheader("content-type", "").startswith("application/json")
        return response.status, json.loads(content) if is_json else content, response.headers


@contextlib.contextmanager
def run_server(source: Path, *, start: bool = True, service: Any = None, **settings: Any) -> Iterator[RunningServer]:
    """Run a server until the end of the block.

    Args:
        start: whether to start the engine.
        service: the service; by default, that of the model at `source`.
        settings: fields of `Arguments`, and `key` for an API key.
    """
    key = settings.pop("key", None)
    arguments = Arguments(str(source), port=0, **settings)
    service = service or load_service(arguments)
    app = create_app(
        service,
        allowed_hosts=arguments.allowed_hosts,
        allowed_origins=arguments.allowed_origins,
        api_key=key,
        max_request_bytes=arguments.max_request_bytes,
    )
    listener = listen("127.0.0.1", 0)
    uvicorn_server = Server(app, service.close)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    if start:
        service.engine.start()
    try:
        yield RunningServer(service, address(listener), uvicorn_server)
    finally:
        service.close()
        uvicorn_server.should_exit = True
        thread.join(20)
        service.engine.join(20)
        listener.close()
    assert not thread.is_alive()


def openai_client(server: RunningServer, key: str = "none") -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def wait_until(condition: Any, timeout_seconds: float = 20) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.01)


class ReferenceGenerator:
    """The texts that `generate` produces without a server, for comparison."""

    def __init__(self, folder: Path) -> None:
        self.loaded = load(folder)
        self.tokeniser = self.loaded.tokeniser

    def tokens(self, ids: list[int], n: int, **settings: Any) -> list[int]:
        params = {"temperature": 0, "stop_tokens": STOP_TOKEN, "n_vocab": self.tokeniser.n_vocab, **settings}
        return [*generate(self.loaded.model, ids, n, PenalizedSamplingParams(**params))]

    def text(self, ids: list[int], n: int, **settings: Any) -> str:
        tokens = self.tokens(ids, n, **settings)
        stream = self.tokeniser.stream(ids)
        stop_token = settings.get("stop_tokens", STOP_TOKEN)
        return "".join(stream.push([token]) for token in tokens if token != stop_token) + stream.flush()

    def chat(self, messages: list[dict[str, str]], n: int, **settings: Any) -> str:
        return self.text(self.tokeniser.chat(messages, allowed_special=False), n, **settings)

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Return the log-probabilities (V,) of the token after a text."""
        logits = self.loaded.model(np.array(ids)).array[-1, : self.tokeniser.n_vocab].astype(np.float64)
        return logits - np.logaddexp.reduce(logits)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    template = getattr(request.module, "TEMPLATE", CHATML)
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", template)


@pytest.fixture(scope="module")
def reference(folder) -> ReferenceGenerator:
    return ReferenceGenerator(folder)


@pytest.fixture(scope="module")
def server(folder) -> Iterator[RunningServer]:
    with run_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[Any]:
    with openai_client(server) as client:
        yield client
