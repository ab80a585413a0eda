"""Render untrusted chat templates in a child process, whose memory and time the operating system limits.

The checks of `chat_template` measure values that a template makes; a filter or a method that makes a value of gigabytes
before anything can measure it, or that takes minutes for one, is stopped here: by RLIMIT_AS and an alarm on Linux, by
the alarm alone on macOS, and by ending the child from outside on Windows.

This file is also the child's program. It is run by its path and imports Jinja and `chat_template` alone.
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

MOST_MEMORY = 200 * 2**20  # bytes beyond those of Python and Jinja
MOST_SECONDS = 5.0  # of a rendering, or of compiling a template
MOST_REPLY = 2**26  # bytes of a rendered text
HEADER = struct.Struct("<Q")
DONE, REFUSED = b"d", b"r"
# SHA-256 of templates that were read and found to make little of little: they are rendered in this process.
KNOWN_TEMPLATES = frozenset(
    [
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",  # SmolLM2-135M-Instruct
    ]
)


Template: TypeAlias = "ChatTemplate | UntrustedTemplate"


def open_template(source: str) -> Template:
    """Compile a chat template: in this process where it is a known one, else in a child process.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: it is no template, or exceeds a limit; names the line.
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
    """A template that is compiled and rendered in a child process, which stays for further renderings.

    Renderings of several threads follow one another. A child that exceeds a limit is replaced at the next rendering,
    and a forked process starts its own.

    Args:
        seconds: of a rendering at most.

    Raises:
        ValueError: as of `open_template`.
    """

    def __init__(self, source: str, seconds: float = MOST_SECONDS) -> None:
        self._opening = {"path": sys.path, "seconds": seconds, "memory": MOST_MEMORY, "source": source}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        with self._lock:
            self._process = self._start()

    def render(self, **variables: Any) -> str:
        """Return the text for some variables, which are seen as plain values: texts, numbers, lists and dicts.

        Raises:
            ValueError: the template refuses them (`raise_exception`), is broken, or exceeds a limit; names the line.
        """
        from tricycle.pretrained.chat_template import plain_variables

        plain = plain_variables(variables)
        with self._lock:
            if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
                self._process = self._start()
            return self._ask(self._process, plain)

    def _start(self) -> subprocess.Popen[bytes]:
        """Return a child that has compiled the template."""
        process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, process, self._owner)
        self._ask(process, self._opening)
        return process

    def _ask(self, process: subprocess.Popen[bytes], message: Any) -> str:
        """Send a message and return the reply; without a reply the child is ended."""
        requests, replies = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
        alarm = None if hasattr(signal, "setitimer") else threading.Timer(self._seconds, process.kill)
        try:
            if alarm is not None:
                alarm.start()
            with suppress(BrokenPipeError):  # then there is no reply
                _send(requests, marshal.dumps(message))
            reply = _receive(replies, MOST_REPLY)
            if reply is None:
                status = process.wait()
                reason = f"the process that rendered it ended with status {status}"
                if status in (-getattr(signal, "SIGALRM", 0), 1 if sys.platform == "win32" else None):
                    reason = f"it takes more than {self._seconds:g} seconds"
                elif status == OUT_OF_MEMORY:
                    reason = f"it takes more than {MOST_MEMORY >> 20} MB of memory"
                raise ValueError(f"chat template: {reason}")
        except BaseException:  # a reply that is left unread would answer the next message
            self._finalizer()
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
        text = reply[1:].decode("utf-8", "surrogatepass")
        if reply[:1] == REFUSED:
            raise ValueError(text)
        return text


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a child, by closing its input where it waits for more; in a forked process only close the parent's pipes."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    if owner != os.getpid():
        process.returncode = 0  # it is another process's child, which cannot be waited for
        return
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# -------------------------------------------------------------------- both
def _send(pipe: BinaryIO, content: bytes) -> None:
    pipe.write(HEADER.pack(len(content)) + content)
    pipe.flush()


def _receive(pipe: BinaryIO, most: int | None = None) -> bytes | None:
    """Return the next message; None where the other side has ended.

    Raises:
        ValueError: more bytes than `most`.
    """
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    if most is not None and length > most:
        raise ValueError(f"chat template: it writes more than {most:,} bytes")
    content = pipe.read(length)
    return content if len(content) == length else None


# -------------------------------------------------------------------- in the child
OUT_OF_MEMORY = 77  # the child's exit status


def main() -> None:
    """Compile the template of the first message, and render it with the variables of each that follows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    first = _receive(requests)
    if first is None:
        return
    opening = marshal.loads(first)
    sys.path[:] = opening["path"]
    form = _chat_template_module()
    form.MOST_SECONDS = opening["seconds"]
    _limit_memory(opening["memory"])
    template: Any = None
    message: Any = None
    while True:
        _set_alarm(opening["seconds"])
        try:
            if template is None:
                template = form.ChatTemplate(opening["source"])
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
    """Import the module beside this one without the package around it, which would import NumPy and more."""
    path = Path(__file__).with_name("chat_template.py")
    spec: Any = importlib.util.spec_from_file_location("chat_template", path)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.preload()
    return module


def _limit_memory(n_bytes: int) -> None:
    """Let this process take so many bytes more than it has now, where the system can see to that."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _set_alarm(seconds: float) -> None:
    """Have the system end this process after some seconds; 0 for never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
