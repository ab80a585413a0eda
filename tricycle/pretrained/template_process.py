"""Render untrusted chat templates in a child process, whose memory and time the operating system limits.

The checks of `chat_template` measure the values of a template after they were computed. The child process also stops a
filter or method that uses gigabytes or takes minutes for one value: RLIMIT_AS and an alarm do so on Linux, the alarm
alone on macOS, and the parent, which kills the child, on Windows.

This file is also the child's program. It is run by its path and imports only Jinja and `chat_template`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

if TYPE_CHECKING:
    from tricycle.pretrained.chat_template import ChatTemplate

MAX_MEMORY = 200 * 2**20  # bytes in addition to Python and Jinja
MAX_SECONDS = 5.0  # for rendering or compiling a template
MAX_REPLY = 2**26  # bytes of a rendered text
HEADER = struct.Struct("<Q")
DONE, REFUSED = b"d", b"r"
# SHA-256 of templates that were reviewed: they need few resources, and are rendered in this process.
KNOWN_TEMPLATES = frozenset(
    [
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",  # SmolLM2-135M-Instruct
    ]
)


Template: TypeAlias = "ChatTemplate | UntrustedTemplate"


def open_template(source: str) -> Template:
    """Compile a chat template, in a child process unless its hash is known; ImportError without Jinja, else ValueError.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: the source is not a valid template or exceeds a limit; names the line.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError('chat templates need Jinja: pip install "tricycle-gpt[pretrained]"')
    is_known = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest() in KNOWN_TEMPLATES
    if sys.executable and not is_known:
        return UntrustedTemplate(source)
    from tricycle.pretrained.chat_template import ChatTemplate

    return ChatTemplate(source)


# -------------------------------------------------------------------- in the parent
class UntrustedTemplate:
    """A template that is compiled and rendered in a child process, which remains for further renderings.

    A lock serializes renderings of several threads. A child that exceeds a limit is replaced at the next rendering. A
    forked process starts its own child.

    Args:
        source: the text of the template.
        seconds: the time limit of a rendering.

    Raises:
        ValueError: as of `open_template`.
    """

    def __init__(self, source: str, seconds: float = MAX_SECONDS) -> None:
        self._opening = {"path": sys.path, "seconds": seconds, "memory": MAX_MEMORY, "source": source}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        with self._lock:
            self._process = self._start_child()

    def render(self, **variables: Any) -> str:
        """Return the text rendered in the child process (restarted if it ended); ValueError for errors or limits.

        The error names the line of the template.
        """
        from tricycle.pretrained.chat_template import plain_variables

        plain = plain_variables(variables)
        with self._lock:
            if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
                self._finalizer()  # closes the pipes of a child that another process has ended
                self._process = self._start_child()
            return self._request(self._process, plain)

    def _start_child(self) -> subprocess.Popen[bytes]:
        """Start a child process, compile the template in it (else ValueError), and return the process."""
        process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach only the parent
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end_child, process, self._owner)
        self._request(process, self._opening)
        return process

    def _request(self, process: subprocess.Popen[bytes], message: Any) -> str:
        """Return the child's reply to a message; raise ValueError if it refuses, or if it fails (and is then ended)."""
        requests, replies = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
        alarm = None if hasattr(signal, "setitimer") else threading.Timer(self._seconds, process.kill)
        try:
            if alarm is not None:
                alarm.start()
            with suppress(BrokenPipeError):  # then there is no reply
                _send(requests, marshal.dumps(message))
            reply = _receive(replies, MAX_REPLY)
            if reply is None:
                status = process.wait()
                reason = f"the process that rendered it ended with status {status}"
                if status in (-getattr(signal, "SIGALRM", 0), 1 if sys.platform == "win32" else None):
                    reason = f"it takes more than {self._seconds:g} seconds"
                elif status == OUT_OF_MEMORY:
                    reason = f"it takes more than {MAX_MEMORY >> 20} MB of memory"
                raise ValueError(f"chat template: {reason}")
        except BaseException:  # an unread reply would be taken for that of the next message
            self._finalizer()
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
        text = reply[1:].decode("utf-8", "surrogatepass")
        if reply[:1] == REFUSED:
            raise ValueError(text)
        return text


def _end_child(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a child by closing its pipes, and kill it if it continues; in a forked process only close the pipes."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    if owner != os.getpid():
        process.returncode = 0  # the child of another process cannot be waited for
        return
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# -------------------------------------------------------------------- messages
def _send(pipe: BinaryIO, content: bytes) -> None:
    """Write content to a pipe after a header with its length, and flush."""
    pipe.write(HEADER.pack(len(content)) + content)
    pipe.flush()


def _receive(pipe: BinaryIO, max_bytes: int | None = None) -> bytes | None:
    """Return the next message, None if the other side has ended; ValueError if longer than `max_bytes`.

    Raises:
        ValueError: the message has more than `max_bytes` bytes.
    """
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    if max_bytes is not None and length > max_bytes:
        raise ValueError(f"chat template: it writes more than {max_bytes:,} bytes")
    content = pipe.read(length)
    return content if len(content) == length else None


# -------------------------------------------------------------------- in the child
OUT_OF_MEMORY = 77  # the child's exit status


def main() -> None:
    """Run the child process: compile the template in stdin's first message, then render it for each message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    first = _receive(requests)
    if first is None:
        return
    opening = marshal.loads(first)
    sys.path[:] = opening["path"]
    chat_template = _chat_template_module()
    chat_template.MAX_SECONDS = opening["seconds"]
    _limit_memory(opening["memory"])
    template: Any = None
    message: Any = None
    while True:
        _set_alarm(opening["seconds"])
        try:
            if template is None:
                template = chat_template.ChatTemplate(opening["source"])
                text = b""
            else:
                text = template.render(**message).encode("utf-8", "surrogatepass")
            reply = DONE + text
        except ValueError as error:
            reply = REFUSED + str(error).encode("utf-8", "surrogatepass")
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        _set_alarm(0)
        _send(replies, reply)
        if template is None or (request := _receive(requests)) is None:
            return
        message = marshal.loads(request)


def _chat_template_module() -> Any:
    """Return `chat_template`, imported from its file without the package, whose import needs NumPy; preload it."""
    path = Path(__file__).with_name("chat_template.py")
    spec: Any = importlib.util.spec_from_file_location("chat_template", path)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.preload()
    return module


def _limit_memory(n_bytes: int) -> None:
    """Limit the memory of this process to its present size plus `n_bytes`, on Linux only."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _set_alarm(seconds: float) -> None:
    """Let the system end this process after a number of seconds; 0 cancels this; do nothing on Windows."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
