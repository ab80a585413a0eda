"""One attempt at reading something hostile: in a process of its own, watched and limited.

The process is forked from one that has imported everything, so that an attempt costs a hundredth of a second and its
memory is counted from there. It runs what a user runs, a program's `main` by way of `run_main`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from programs import lines_without_progress_bars

from tricycle.pretrained import template_process

MOST_SECONDS = 5.0  # of a processor; others may be at work beside us
MOST_WAIT = 40.0  # seconds by the clock, after which it counts as hanging
MOST_MEMORY = 200e6  # bytes, beside twice the size of the files
MOST_ADDRESSES = 6 * 2**30  # beyond that, memory is refused: what asks for it gives no clear line
MOST_WRITTEN = 2**27  # bytes of one file
# What a program must not do because of a file.
FORBIDDEN = set(
    """
    os.system subprocess.Popen os.exec os.fork os.forkpty os.posix_spawn os.spawn pty.spawn
    webbrowser.open os.kill
    """.split()
)
CHANGES = set("os.remove os.rename os.mkdir os.rmdir os.link os.symlink os.truncate os.chmod os.chown".split())
SENDS = ("socket.connect", "socket.bind")


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt.

    Attributes:
        kind: "model" (status 0), "refused" (one line, and status 1 or 2), or what must not be: "traceback", "lines",
            "status", "crashed", "hang", "slow", "memory", "escaped".
        message: what was printed as an error, or more about what must not be.
        seconds: of a processor.
        memory: bytes at its highest, beyond those that the process began with.
    """

    kind: str
    message: str
    seconds: float
    memory: float

    @property
    def good(self) -> bool:
        return self.kind in ("model", "refused")


def attempt(action: Callable[[], object], folder: Path, size: int, network: bool = False) -> Outcome:
    """Run an action in a process of its own, with a folder as the only place that it may write to.

    Args:
        size: bytes of what it reads.
        network: whether it may open connections.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    out, err, about = (os.memfd_create(name) for name in ("out", "err", "about"))
    started = time.monotonic()
    process = os.fork()
    if not process:
        _be_the_child(action, folder, network, (out, err, about))
    status, usage, waited = _wait(process, started)
    texts = [_content(handle) for handle in (err, about)]
    for handle in (out, err, about):
        os.close(handle)
    return _judged(status, usage, waited, texts[0], texts[1], size)


def _wait(process: int, started: float) -> tuple[int | None, resource.struct_rusage, float]:
    """The status, None where it had to be ended; what it used; seconds by the clock."""
    pause = 0.001
    while True:
        done, status, usage = os.wait4(process, os.WNOHANG)
        waited = time.monotonic() - started
        if done:
            return status, usage, waited
        if waited > MOST_WAIT or usage.ru_utime > 4 * MOST_SECONDS:
            os.kill(process, signal.SIGKILL)
            _, _, usage = os.wait4(process, 0)
            return None, usage, waited
        time.sleep(pause)
        pause = min(0.02, pause * 1.3)


def _judged(
    status: int | None, usage: resource.struct_rusage, waited: float, err: str, about: str, size: int
) -> Outcome:
    seconds = usage.ru_utime + usage.ru_stime
    facts = json.loads(about) if about else {"memory": 0.0, "escapes": []}
    memory = facts["memory"]
    lines = lines_without_progress_bars(err)

    def outcome(kind: str, message: str) -> Outcome:
        return Outcome(kind, message, seconds, memory)

    if status is None:
        return outcome("hang", f"after {waited:.0f} s, {seconds:.0f} s of a processor: {' / '.join(lines)[-200:]}")
    if facts["escapes"]:
        return outcome("escaped", "; ".join(facts["escapes"][:3]))
    if os.WIFSIGNALED(status):
        return outcome("crashed", f"signal {signal.Signals(os.WTERMSIG(status)).name}: {err[-300:]}")
    if "Traceback (most recent call last)" in err:
        return outcome("traceback", err[-2500:])
    if memory > 2 * size + MOST_MEMORY:
        return outcome("memory", f"{memory / 1e6:.0f} MB for a file of {size / 1e6:.3f} MB: {' / '.join(lines)[-200:]}")
    if seconds > MOST_SECONDS:
        return outcome("slow", f"{seconds:.1f} s: {' / '.join(lines)[-200:]}")
    code = os.WEXITSTATUS(status)
    if code == 0:
        return outcome("model", " / ".join(lines))
    if code not in (1, 2):
        return outcome("status", f"{code}: {' / '.join(lines)[-300:]}")
    if len(lines) != 1:
        return outcome("lines", " / ".join(lines)[-1000:])
    if len(lines[0]) > 1500 or "Unable to allocate" in lines[0] or "MemoryError" in lines[0]:
        return outcome("lines", lines[0][:400])
    return outcome("refused", lines[0])


def _content(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    with open(handle, "rb", closefd=False) as file:
        return file.read(2**20).decode("utf-8", "replace")


# -------------------------------------------------------------------- in the child
def _be_the_child(action: Callable[[], object], folder: Path, network: bool, handles: tuple[int, int, int]) -> None:
    """Never returns."""
    code = 71
    faulthandler.disable()
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (handles[0], 1), (handles[1], 2)):
            os.dup2(old, new)
        for stream, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            setattr(sys, stream, os.fdopen(number, mode, encoding="utf-8", closefd=False))
        os.chdir(folder)
        for what, most in ((resource.RLIMIT_AS, MOST_ADDRESSES), (resource.RLIMIT_FSIZE, MOST_WRITTEN)):
            resource.setrlimit(what, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        escapes: list[str] = []
        before = _start_counting()
        _watch(folder, network, escapes)
        code = _status_of(action)
        facts = {"memory": _highest() - before, "escapes": escapes}
        os.write(handles[2], json.dumps(facts).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _status_of(action: Callable[[], object]) -> int:
    from tricycle_cli.flags import run_main

    try:
        run_main(lambda: action() and None)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def _start_counting() -> float:
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _memory("VmRSS")


def _highest() -> float:
    return _memory("VmHWM")


def _memory(name: str) -> float:
    """Bytes."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name):
                return float(line.split()[1]) * 1024
    return 0.0


def _watch(folder: Path, network: bool, escapes: list[str]) -> None:
    """Write down what must not happen, before it does; it happens nonetheless."""
    home = os.path.realpath(folder)

    def inside(path: object) -> bool:
        if isinstance(path, int) or path is None:
            return True
        full = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if "__pycache__" in full:  # what Python and Numba compile is kept beside the sources
            return True
        return full.startswith(home + os.sep) or full == home or full == os.devnull

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if writes and not inside(path):
                escapes.append(f"it writes to {path!r}")
            return
        forbidden = event in FORBIDDEN or (event in SENDS and not network)
        if event in CHANGES:
            names = [os.fsdecode(path) for path in args if isinstance(path, (str, bytes, Path))]
            names = [name for name in names if "__pycache__" not in name]
            # a link itself may be taken away, or another file may take its name
            forbidden = not all(inside(os.path.dirname(name) or ".") for name in names)
        if event == "subprocess.Popen" and args[1] == [sys.executable, "-I", template_process.__file__]:
            forbidden = False  # the process that renders an untrusted chat template
        if forbidden:
            escapes.append(f"{event} {args!r}"[:300])

    sys.addaudithook(hook)
