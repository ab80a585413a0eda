"""Many clients of `tricycle serve` at once, good and bad: python -m benchmarks.serving MODEL

Starts the server in a process of its own and asks it with OpenAI's client, from many threads. Among the requests are
some whose answers are read slowly, some whose connections are dropped in the middle, and some that are nonsense. All
others ask for the likeliest tokens, so each answer is compared with what `generate` makes of the same prompt alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tricycle.generate import generate
from tricycle.sampling import SamplingParams
from tricycle_cli.models import load_model, stop_tokens

BAD_SHARES = {"slow reader": 0.04, "dropped connection": 0.06, "nonsense": 0.1}
VALID_KINDS = ("chat", "chat, streamed", "completion", "completion, streamed", "two completions")
PROMPT = "Tell me about {}. Why is the sky {}? How do {} sing when it rains, and what are they called in winter?"
MALFORMED_BODIES = (
    b"{",
    b"[" * 100_000,
    b'{"prompt": NaN}',
    b'{"prompt": "x", "max_tokens": 1e300}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": "\\ud800", "n": -1}',
    b'{"prompt": {"file": "/etc/passwd"}}',
    b'{"prompt": "x", "model": "../../etc/passwd"}',
    b"\xff\xfe\xfd",
)


@dataclass
class RequestResult:
    """What came of a request.

    Attributes:
        right: whether that is what should have come.
        seconds: it took.
    """

    kind: str
    right: bool
    seconds: float
    n_tokens: int = 0
    said: str = ""


class ExpectedAnswers:
    """What a model answers by itself, computed before."""

    def __init__(self, source: str, n_prompts: int, n_tokens: int, device: str = "cpu") -> None:
        loaded = load_model(source, device=device)
        self.tokeniser = loaded.tokeniser
        self.n_tokens = n_tokens
        words = "birds water foxes bread numbers trees rivers music".split()
        self.prompts = [PROMPT.format(words[i % 8], i, words[i // 8 % 8]) for i in range(n_prompts)]
        stops = stop_tokens(loaded)
        self.talks = bool(self.tokeniser.chat_template)
        if self.talks:
            end = self.tokeniser.end_of_answer()
            stops = [*stops, *([] if end is None else [end])]
        self._way = SamplingParams(temperature=0, stop_tokens=stops, n_vocab=self.tokeniser.n_vocab)
        self._model = loaded.model
        self.texts = {prompt: self._text([*map(int, self.tokeniser.encode(prompt))]) for prompt in self.prompts}
        self.answers = {prompt: self._text(self._chat(prompt)) for prompt in self.prompts} if self.talks else {}

    def _chat(self, prompt: str) -> list[int]:
        return [*map(int, self.tokeniser.chat([{"role": "user", "content": prompt}], allowed_special=False))]

    def _text(self, ids: list[int]) -> str:
        stream = self.tokeniser.stream(ids)
        parts = []
        for token in generate(self._model, ids, self.n_tokens, self._way):
            if not self._way.is_stop_token(token):
                parts.append(stream.push([token]))
        return "".join(parts) + stream.flush()


class TestClients:
    """Sends requests of all kinds.

    Args:
        port: of the server, on this machine.
        pause: seconds between two reads of a slow reader.
    """

    def __init__(self, port: int, expected: ExpectedAnswers, pause: float) -> None:
        import openai

        self.port = port
        self.expected = expected
        self.pause = pause
        # a server that is busy says so, and the client comes again
        self._client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20)
        (model,) = self._client.models.list().data
        self._common: dict[str, Any] = {
            "model": model.id,
            "max_tokens": expected.n_tokens,
            "temperature": 0,
            "extra_body": {"repetition_penalty": 1},
        }

    def ask(self, kind: str, prompt: str) -> RequestResult:
        """Send one request, and look at what comes."""
        began = time.monotonic()
        ways: dict[str, Callable[[str], tuple[bool, int, str]]] = {
            "slow reader": self._read_slowly,
            "dropped connection": self._leave,
            "nonsense": self._say_nonsense,
        }
        try:
            right, n_tokens, said = ways.get(kind, lambda prompt: self._ask(kind, prompt))(prompt)
        except Exception as error:
            right, n_tokens, said = False, 0, f"{type(error).__name__}: {error}"
        return RequestResult(kind, right, time.monotonic() - began, n_tokens, said)

    def _ask(self, kind: str, prompt: str) -> tuple[bool, int, str]:
        streamed = kind.endswith("streamed")
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        if kind.startswith("chat"):
            messages: Any = [{"role": "user", "content": prompt}]
            answer: Any = self._client.chat.completions.create(messages=messages, **self._common, **more)
            wanted = [self.expected.answers[prompt]]
        else:
            n = 2 if kind == "two completions" else 1
            answer = self._client.completions.create(prompt=prompt, n=n, **self._common, **more)
            wanted = [self.expected.texts[prompt]] * n
        texts = [""] * len(wanted)
        parts = list(answer) if streamed else [answer]
        for part in parts:
            for choice in part.choices:
                texts[choice.index] += _text_of(choice)
        return texts == wanted, parts[-1].usage.completion_tokens, "" if texts == wanted else f"{texts} for {wanted}"

    def _open(self, body: bytes, room: int = 2**16) -> socket.socket:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        plain.settimeout(300)
        plain.connect(("127.0.0.1", self.port))
        lines = (
            "POST /v1/completions HTTP/1.1",
            "Host: localhost",
            "Connection: close",
            f"Content-Length: {len(body)}",
        )
        plain.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return plain

    def _stream(self, prompt: str, **more: Any) -> bytes:
        fields = {"prompt": prompt, "max_tokens": self.expected.n_tokens, "temperature": 0, "repetition_penalty": 1}
        return json.dumps({**fields, "stream": True, **more}).encode()

    def _read_slowly(self, prompt: str) -> tuple[bool, int, str]:
        """A few bytes at a time, of many: the probabilities of rivals come along."""
        raw = b"HTTP/1.1 429"
        while raw.startswith(b"HTTP/1.1 429"):  # busy: it comes again
            raw = b""
            with self._open(self._stream(prompt, logprobs=5), room=2048) as plain:
                while part := plain.recv(1024):
                    raw += part
                    time.sleep(self.pause)
        events = re.findall(rb"^data: (\{.*\})\r?$", raw, re.MULTILINE)
        text = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
        wanted = self.expected.texts[prompt]
        return text == wanted, 0, "" if text == wanted else f"{text!r} for {wanted!r}"

    def _leave(self, prompt: str) -> tuple[bool, int, str]:
        """In the middle of an answer, or before it has begun."""
        with self._open(self._stream(prompt)) as plain:
            if len(prompt) % 2:
                plain.recv(100)
        return True, 0, ""

    def _say_nonsense(self, prompt: str) -> tuple[bool, int, str]:
        body = MALFORMED_BODIES[self.expected.prompts.index(prompt) % len(MALFORMED_BODIES)]
        with self._open(body) as plain:
            raw = b"".join(iter(lambda: plain.recv(4096), b""))
        head, _, content = raw.partition(b"\r\n\r\n")
        is_error = re.match(rb"HTTP/1\.1 4\d\d ", head) is not None and "message" in json.loads(content)["error"]
        return is_error, 0, "" if is_error else raw.decode("utf-8", "replace")[:200]


def _text_of(choice: Any) -> str:
    message = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return (message.content if message is not None else choice.text) or ""


def request_kinds(n: int, talks: bool, seed: int = 0) -> list[str]:
    """So many requests of all kinds, mixed."""
    good = [kind for kind in VALID_KINDS if talks or not kind.startswith("chat")]
    kinds = [kind for kind, share in BAD_SHARES.items() for _ in range(max(1, round(share * n)))]
    kinds += [good[i % len(good)] for i in range(n - len(kinds))]
    random.Random(seed).shuffle(kinds)
    return kinds


def send_requests(clients: TestClients, kinds: list[str], n_clients: int) -> list[RequestResult]:
    """Send requests of these kinds from so many clients, each one after the other."""
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    prompts = clients.expected.prompts
    for i, kind in enumerate(kinds):
        waiting.put((kind, prompts[i % len(prompts)]))
    done: list[RequestResult] = []

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(clients.ask(*waiting.get_nowait()))

    threads = [threading.Thread(target=work) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


@contextlib.contextmanager
def running_server(source: str, *words: str) -> Iterator[int]:
    """A server's port, until the block ends.

    Raises:
        RuntimeError: it does not start, does not end as it should, or has complained.
    """
    command = [sys.executable, "-m", "tricycle", "serve", source, "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = re.search(r":(\d+) \(Ctrl-C", line)
        if port is None:
            raise RuntimeError(f"the server does not start: {line}{process.communicate(timeout=60)[1]}")
        yield int(port[1])
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
        if complaints or process.returncode:
            raise RuntimeError(f"the server ended with {process.returncode}: {complaints}")
    finally:
        process.kill()
        process.wait()


def result_table(done: list[RequestResult], seconds: float) -> str:
    """What came of all requests, by kind."""
    lines = ["| request | sent | answered rightly | median (s) | slowest (s) |", "|:---|---:|---:|---:|---:|"]
    for kind in (*VALID_KINDS, *BAD_SHARES):
        some = [asked for asked in done if asked.kind == kind]
        if some:
            times = sorted(asked.seconds for asked in some)
            n_right = sum(asked.right for asked in some)
            lines.append(f"| {kind} | {len(some)} | {n_right} | {times[len(times) // 2]:.2f} | {times[-1]:.2f} |")
    n_right = sum(asked.right for asked in done)
    n_tokens = sum(asked.n_tokens for asked in done)
    lines.append(f"| all | {len(done)} | {n_right} | | {seconds:.1f} together, {n_tokens / seconds:.0f} tokens/s |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16, help="different ones")
    parser.add_argument("--length", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two reads of a slow reader")
    words = parser.parse_args()
    expected = ExpectedAnswers(words.model, words.prompts, words.length)
    with running_server(words.model, "--device", "cpu") as port:
        clients = TestClients(port, expected, words.pause)
        kinds = request_kinds(words.requests, expected.talks)
        began = time.monotonic()
        done = send_requests(clients, kinds, words.clients)
        seconds = time.monotonic() - began
    print(result_table(done, seconds))
    for asked in done:
        if not asked.right:
            print(f"{asked.kind}: {asked.said}")
    return int(not all(asked.right for asked in done))


if __name__ == "__main__":
    sys.exit(main())
