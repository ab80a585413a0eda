"""Load test of `tricycle serve` with valid and malformed requests (`python -m benchmarks.serving MODEL`).

The benchmark starts the server in a separate process, and sends requests with OpenAI's client from several threads.
Some responses are read slowly, some connections are dropped, and some requests are malformed. All other requests decode
greedily, and each response is compared with the result of `generate` for the same prompt.

With --port, another server of the same model, such as `python -m llama_cpp.server`, gets the valid streaming requests
alone; its texts are not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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
from pathlib import Path
from typing import Any

from tricycle.generate import generate
from tricycle.sampling import SamplingParams
from tricycle_cli.models import chat_stop_tokens, load_model

ADVERSE_FRACTIONS = {"slow reader": 0.1, "dropped connection": 0.1, "invalid request": 0.1}
VALID_KINDS = ("chat", "chat, streaming", "completion", "completion, streaming", "two completions")
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
    """The outcome of a request.

    Attributes:
        seconds: until the end of the response.
        first_seconds: until the first text of a streamed response; 0 for other kinds.
        error: a difference or an exception; "" if the response was the expected one.
    """

    kind: str
    seconds: float
    n_tokens: int
    error: str
    first_seconds: float


class ExpectedAnswers:
    """Prompts and the expected responses, computed with `generate`."""

    def __init__(self, source: str, n_prompts: int, n_tokens: int) -> None:
        loaded = load_model(source, device="cpu")
        self.tokeniser = loaded.tokeniser
        self.n_tokens = n_tokens
        words = "birds water foxes bread numbers trees rivers music".split()
        self.prompts = [PROMPT.format(words[i % 8], i, words[i // 8 % 8]) for i in range(n_prompts)]
        self.has_chat = bool(self.tokeniser.chat_template)
        stops = chat_stop_tokens(loaded)
        self._params = SamplingParams(temperature=0, stop_tokens=stops, n_vocab=self.tokeniser.n_vocab)
        self._model = loaded.model
        self.texts = {prompt: self._generate([*map(int, self.tokeniser.encode(prompt))]) for prompt in self.prompts}
        self.answers = {}
        if self.has_chat:
            self.answers = {prompt: self._generate(self._encode_chat(prompt)) for prompt in self.prompts}

    def _encode_chat(self, prompt: str) -> list[int]:
        """Return the token ids of a chat of one user message; names of special tokens in it are plain text."""
        return [*map(int, self.tokeniser.chat([{"role": "user", "content": prompt}], allowed_special=False))]

    def _generate(self, ids: list[int]) -> str:
        """Return the greedy continuation of a prompt's ids by at most `n_tokens` as text, without stop tokens."""
        stream = self.tokeniser.stream(ids)
        parts = []
        for token in generate(self._model, ids, self.n_tokens, self._params):
            if token not in self._params.stop_tokens:  # type: ignore[operator]
                parts.append(stream.push([token]))
        return "".join(parts) + stream.flush()


class LoadGenerator:
    """A client that sends requests of all kinds.

    Args:
        port: of the server on localhost.
        pause: seconds between two reads of a slow reader.
        is_other: whether the server is not Tricycle's: its texts are not compared.
    """

    def __init__(self, port: int, expected: ExpectedAnswers, pause: float, is_other: bool = False) -> None:
        import openai

        self.port = port
        self.expected = expected
        self.pause = pause
        self.is_other = is_other
        # The client retries when the server answers that it is busy.
        self._client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20)
        (model,) = self._client.models.list().data
        self._common: dict[str, Any] = {"model": model.id, "max_tokens": expected.n_tokens, "temperature": 0}

    def send(self, kind: str, prompt: str) -> RequestResult:
        """Send a request of a kind, wait, and check the response; an exception becomes the result's `error`."""
        start = time.monotonic()
        adverse: dict[str, Callable[[str], str]] = {
            "slow reader": self._read_slowly,
            "dropped connection": self._drop_connection,
            "invalid request": self._send_malformed,
        }
        n_tokens, first_time = 0, start
        try:
            if kind in adverse:
                error = adverse[kind](prompt)
            else:
                error, n_tokens, first_time = self._send_valid(kind, prompt)
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
        return RequestResult(kind, time.monotonic() - start, n_tokens, error, max(0.0, first_time - start))

    def _send_valid(self, kind: str, prompt: str) -> tuple[str, int, float]:
        """Send a valid request; return (error or "", tokens, time of the first text or 0.0)."""
        streamed = kind.endswith("streaming")
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        if kind.startswith("chat"):
            messages: Any = [{"role": "user", "content": prompt}]
            response: Any = self._client.chat.completions.create(messages=messages, **self._common, **options)
            expected = [self.expected.answers[prompt]]
        else:
            n = 2 if kind == "two completions" else 1
            response = self._client.completions.create(prompt=prompt, n=n, **self._common, **options)
            expected = [self.expected.texts[prompt]] * n
        texts = [""] * len(expected)
        first_time, n_chunks, usage = 0.0, 0, None
        for chunk in response if streamed else [response]:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text = _choice_text(choice)
                texts[choice.index] += text
                n_chunks += bool(text)
                first_time = first_time or (time.monotonic() if streamed and text else 0.0)
        n_tokens = usage.completion_tokens if usage else n_chunks  # some servers do not count tokens of a stream
        is_correct = texts == expected or (self.is_other and any(texts))
        return "" if is_correct else f"expected {expected}, got {texts}", n_tokens, first_time

    def _streaming_body(self, prompt: str, **fields: Any) -> bytes:
        """Return the JSON of a streamed greedy completion request as bytes, with further `fields`."""
        common = {"prompt": prompt, "max_tokens": self.expected.n_tokens, "temperature": 0, "repetition_penalty": 1}
        return json.dumps({**common, "stream": True, **fields}).encode()

    def _read_slowly(self, prompt: str) -> str:
        """Read a long response in small parts with pauses; return an error message, "" if its text is as expected."""
        raw = b"HTTP/1.1 429"
        while raw.startswith(b"HTTP/1.1 429"):  # retry while the server is busy
            raw = b""
            with post(self.port, self._streaming_body(prompt, logprobs=5), receive_buffer=2048) as connection:
                while received := connection.recv(1024):
                    raw += received
                    time.sleep(self.pause)
        text, expected = stream_text(raw), self.expected.texts[prompt]
        return "" if text == expected else f"expected {expected!r}, got {text!r}"

    def _drop_connection(self, prompt: str) -> str:
        """Close the connection in the middle of a response, or before its start; return ""."""
        with post(self.port, self._streaming_body(prompt)) as connection:
            if len(prompt) % 2:
                connection.recv(100)
        return ""

    def _send_malformed(self, prompt: str) -> str:
        """Send a malformed body; return "" if the answer is an error of status 4xx, else the answer."""
        body = MALFORMED_BODIES[self.expected.prompts.index(prompt) % len(MALFORMED_BODIES)]
        with post(self.port, body) as connection:
            raw = b"".join(iter(lambda: connection.recv(4096), b""))
        head, _, content = raw.partition(b"\r\n\r\n")
        is_error = re.match(rb"HTTP/1\.1 4\d\d ", head) is not None and "message" in json.loads(content)["error"]
        return "" if is_error else raw.decode("utf-8", "replace")[:200] or "expected an answer, got none"


def post(port: int, body: bytes, receive_buffer: int = 2**16) -> socket.socket:
    """Send a POST of `body` to /v1/completions; return the open socket, with the response unread."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(300)
    connection.connect(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def stream_text(raw: bytes) -> str:
    """Return the text of all choices in a completely received stream of events."""
    events = re.findall(rb"^data: (\{.*\})\r?$", raw, re.MULTILINE)
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def _choice_text(choice: Any) -> str:
    """Return the text of a choice of a chat or completion, complete or streamed; "" if it has none."""
    message = getattr(choice, "message", None) or getattr(choice, "delta", None)
    return (message.content if message is not None else choice.text) or ""


def request_kinds(n: int, has_chat: bool, seed: int = 0) -> list[str]:
    """Return `n` (or more) shuffled kinds: each of ADVERSE_FRACTIONS at least once; then valid ones in equal numbers.

    Args:
        has_chat: include chat requests.
    """
    valid = [kind for kind in VALID_KINDS if has_chat or not kind.startswith("chat")]
    kinds = [kind for kind, fraction in ADVERSE_FRACTIONS.items() for _ in range(max(1, round(fraction * n)))]
    kinds += [valid[i % len(valid)] for i in range(n - len(kinds))]
    random.Random(seed).shuffle(kinds)
    return kinds


def send_requests(
    generator: LoadGenerator, kinds: list[str], n_clients: int, seconds: float = math.inf
) -> list[RequestResult]:
    """Send a request of each kind from `n_clients` threads; return results as they complete, errors inside them.

    Args:
        seconds: no request is sent after this time.
    """
    deadline = time.monotonic() + seconds
    pending: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    prompts = generator.expected.prompts
    for i, kind in enumerate(kinds):
        pending.put((kind, prompts[i % len(prompts)]))
    results: list[RequestResult] = []

    def run_client() -> None:
        with contextlib.suppress(queue.Empty):
            while time.monotonic() < deadline:
                results.append(generator.send(*pending.get_nowait()))

    threads = [threading.Thread(target=run_client) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@contextlib.contextmanager
def running_server(source: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """Run `tricycle serve` in a context that yields its port and process id, then stop it; RuntimeError if it fails.

    Raises:
        RuntimeError: it does not start, exits with an error, or prints to standard error.
    """
    command = [sys.executable, "-m", "tricycle", "serve", source, "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = re.search(r":(\d+) \(Ctrl-C", line)
        if port is None:
            raise RuntimeError(f"the server does not start: {line}{process.communicate(timeout=60)[1]}")
        yield int(port[1]), process.pid
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        if errors or process.returncode:
            raise RuntimeError(f"the server ended with status {process.returncode}: {errors}")
    finally:
        process.kill()
        process.wait()


def result_table(results: list[RequestResult], seconds: float) -> str:
    """Return a Markdown table by kind of request: number sent, correct, median and slowest seconds; and of totals.

    Args:
        seconds: duration of the whole test.
    """
    lines = ["| request | sent | correct | median (s) | slowest (s) |", "|:---|---:|---:|---:|---:|"]
    for kind in (*VALID_KINDS, *ADVERSE_FRACTIONS):
        of_kind = [result for result in results if result.kind == kind]
        if of_kind:
            times = sorted(result.seconds for result in of_kind)
            n_correct = sum(not result.error for result in of_kind)
            lines.append(f"| {kind} | {len(of_kind)} | {n_correct} | {times[len(times) // 2]:.2f} | {times[-1]:.2f} |")
    n_correct = sum(not result.error for result in results)
    n_tokens = sum(result.n_tokens for result in results)
    lines.append(
        f"| all | {len(results)} | {n_correct} | | {seconds:.1f} in total, {n_tokens / seconds:.0f} tokens/s |"
    )
    return "\n".join(lines)


def first_text_times(results: list[RequestResult]) -> tuple[float, float]:
    """Return median and 95% quantile of the seconds to the first text of streamed responses; zeros without one."""
    times = sorted(result.first_seconds for result in results if result.first_seconds) or [0.0]
    return times[len(times) // 2], times[int(0.95 * (len(times) - 1))]


def resident_megabytes(pid: int, kind: str = "VmRSS") -> float:
    """Return the memory of a process in MB, on Linux, without pages of files if `kind` is RssAnon; 0 elsewhere."""
    with contextlib.suppress(OSError):
        return int(re.findall(rf"{kind}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1000
    return 0.0


def sample_memory(pid: int, done: threading.Event, samples: list[float]) -> None:
    """Append the memory of a process in MB to `samples`, 50 times a second until `done` is set."""
    while not done.wait(0.02):
        samples.append(resident_megabytes(pid))


def run_load_test(generator: LoadGenerator, options: argparse.Namespace, pid: int | None) -> list[RequestResult]:
    """Send the requests, and print the table, times until the first text, memory and errors; return the results.

    Args:
        pid: of the server; None if its memory is not reported. The first tenth of the requests warms the server up.
    """
    kinds = request_kinds(options.requests, generator.expected.has_chat)
    if pid is None:
        kinds = [kind for kind in kinds if kind.endswith("streaming")]
    n_first = len(kinds) // 10
    first = send_requests(generator, kinds[:n_first], options.clients)
    samples: list[float] = []
    done = threading.Event()
    if pid is not None:
        threading.Thread(target=sample_memory, args=(pid, done, samples), daemon=True).start()
    start = time.monotonic()
    results = send_requests(generator, kinds[n_first:], options.clients, options.seconds)
    seconds = time.monotonic() - start
    done.set()
    print(result_table(results, seconds))
    median, late = first_text_times(results)
    print(f"until the first text: {median:.2f} s median, {late:.2f} s for 95%")
    thirds = [samples[i * len(samples) // 3 : (i + 1) * len(samples) // 3] for i in range(3)]
    if all(map(any, thirds)):
        largest = ", ".join(f"{max(third):.0f}" for third in thirds)
        print(f"memory of the server, at most, in each third of the time: {largest} MB")
    results += first
    for result in results:
        if result.error:
            print(f"{result.kind}: {result.error}")
    return results


def main() -> int:
    """Parse sys.argv, run the load test, and print the table and errors; return 1 if a response was wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16, help="number of different prompts")
    parser.add_argument("--length", type=int, default=24, help="maximum number of new tokens")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two reads of a slow reader")
    parser.add_argument("--seconds", type=float, default=math.inf, help="send no request after this time")
    parser.add_argument("--port", type=int, help="of another server on this machine")
    options = parser.parse_args()
    expected = ExpectedAnswers(options.model, options.prompts, options.length)
    if options.port:
        results = run_load_test(LoadGenerator(options.port, expected, options.pause, is_other=True), options, None)
    else:
        # As `ExpectedAnswers`: the products of quantized blocks round the activations to 8 bits.
        with running_server(options.model, "--device", "cpu", "--weights", "float32") as (port, pid):
            results = run_load_test(LoadGenerator(port, expected, options.pause), options, pid)
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
