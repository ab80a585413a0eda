"""A server in a thread, with a tiny model, and requests that no proper client would send."""

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

from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.generate import generate
from tricycle.pretrained import load
from tricycle_cli.serve import Arguments, address
from tricycle_cli.serve import load as load_served
from tricycle_serve.app import new_app
from tricycle_serve.server import Server, listen

STOP = 2  # the tiny model's end of an answer


@dataclass
class Running:
    """A server that answers."""

    served: Any
    url: str
    server: Any
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any, Any]:
        """Status, body and headers of an answer."""
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        connection = self.connection()
        try:
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, {**self.headers, **headers})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        is_json = answer.getheader("content-type", "").startswith("application/json")
        return answer.status, json.loads(content) if is_json else content, answer.headers


@contextlib.contextmanager
def serving(source: Path, *, start: bool = True, served: Any = None, **settings: Any) -> Iterator[Running]:
    """A server, until the block ends.

    Args:
        start: whether the model begins to compute.
        settings: of `Arguments`, and key for a key.
    """
    key = settings.pop("key", None)
    arguments = Arguments(str(source), port=0, **settings)
    served = served or load_served(arguments)
    app = new_app(
        served,
        names=arguments.allowed_hosts,
        origins=arguments.allowed_origins,
        key=key,
        most_bytes=arguments.max_request_bytes,
    )
    listener = listen("127.0.0.1", 0)
    server = Server(app, served.close)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    if start:
        served.engine.start()
    try:
        yield Running(served, address(listener), server)
    finally:
        served.close()
        server.should_exit = True
        thread.join(20)
        served.engine.join(20)
        listener.close()
    assert not thread.is_alive()


def until(condition: Any, seconds: float = 20) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


class Alone:
    """What the model answers when nobody else asks, by `generate`."""

    def __init__(self, folder: Path) -> None:
        self.loaded = load(folder)
        self.tokeniser = self.loaded.tokeniser

    def tokens(self, ids: list[int], n: int, **settings: Any) -> list[int]:
        way = {"temperature": 0, "stop_tokens": STOP, "n_vocab": self.tokeniser.n_vocab, **settings}
        return [*generate(self.loaded.model, ids, n, PenalizedSamplingParams(**way))]

    def text(self, ids: list[int], n: int, **settings: Any) -> str:
        tokens = self.tokens(ids, n, **settings)
        stream = self.tokeniser.stream(ids)
        stop = settings.get("stop_tokens", STOP)
        return "".join(stream.push([token]) for token in tokens if token != stop) + stream.flush()

    def chat(self, messages: list[dict[str, str]], n: int, **settings: Any) -> str:
        return self.text(self.tokeniser.chat(messages, allowed_special=False), n, **settings)

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """(V,) after a text."""
        logits = self.loaded.model(np.array(ids)).array[-1 if len(ids) else 0]
        logits = logits.reshape(-1, logits.shape[-1])[-1][: self.tokeniser.n_vocab].astype(np.float64)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
