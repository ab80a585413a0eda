"""Run the loading of a hostile file in a forked process with limits and an audit hook.

The process is forked from one that has imported everything, so that an attempt takes a hundredth of a second, and only
its own memory counts. It runs a program's `main` with `run_main`, as a user does.
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

MAX_SECONDS = 5.0  # of CPU time
MAX_WAIT_SECONDS = 40.0  # wall-clock seconds after which the process is killed
MAX_MEMORY = 200e6  # bytes, in addition to twice the size of the files
MAX_ADDRESS_SPACE = 6 * 2**30  # bytes; allocations beyond it fail
MAX_FILE_BYTES = 2**27  # of a written file
# Audit events that no file may cause.
FORBIDDEN_EVENTS = set(
    """
    os.system subprocess.Popen os.exec os.fork os.forkpty os.posix_spawn os.spawn pty.spawn
    webbrowser.open os.kill
    """.split()
)
FILE_EVENTS = set("os.remove os.rename os.mkdir os.rmdir os.link os.symlink os.truncate os.chmod os.chown".split())
NETWORK_EVENTS = ("socket.connect", "socket.bind")


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt.

    Attributes:
        kind: "model" (status 0), "refused" (one line, and status 1 or 2), or a failure: "traceback", "lines",
            "status", "crashed", "hang", "slow", "memory", "escaped".
        message: the error message, or details of the failure.
        seconds: CPU time.
        memory: peak memory of the attempt in bytes.
    """

    kind: str
    message: str
    seconds: float
    memory: float

    @property
    def is_acceptable(self) -> bool:
        return self.kind in ("model", "refused")


def attempt(action: Callable[[], object], folder: Path, size: int, network: bool = False) -> Outcome:
    """Run an action in a forked process, which may write only to a folder, and return the outcome.

    Args:
        size: of the loaded files in bytes.
        network: whether the action may open connections.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    out, err, about = (os.memfd_create(name) for name in ("out", "err", "about"))
    started = time.monotonic()
    process = os.fork()
    if not process:
        _run_child(action, folder, network, (out, err, about))
    status, usage, waited = _wait(process, started)
    texts = [_read_all(handle) for handle in (err, about)]
    for handle in (out, err, about):
        os.close(handle)
    return _classify(status, usage, waited, texts[0], texts[1], size)


def _wait(process: int, started: float) -> tuple[int | None, resource.struct_rusage, float]:
    """Wait for a process; return its status (None if it was killed), resource usage and wall-clock seconds."""
    pause = 0.001
    while True:
        done, status, usage = os.wait4(process, os.WNOHANG)
        waited = time.monotonic() - started
        if done:
            return status, usage, waited
        if waited > MAX_WAIT_SECONDS or usage.ru_utime > 4 * MAX_SECONDS:
            os.kill(process, signal.SIGKILL)
            _, _, usage = os.wait4(process, 0)
            return None, usage, waited
        time.sleep(pause)
        pause = min(0.02, pause * 1.3)


def _classify(
    status: int | None, usage: resource.struct_rusage, waited: float, err: str, about: str, size: int
) -> Outcome:
    seconds = usage.ru_utime + usage.ru_stime
    facts = json.loads(about) if about else {"memory": 0.0, "escapes": []}
    memory = facts["memory"]
    lines = lines_without_progress_bars(err)

    def outcome(kind: str, message: str) -> Outcome:
        return Outcome(kind, message, seconds, memory)

    if status is None:
        return outcome("hang", f"after {waited:.0f} s, {seconds:.0f} s of CPU time: {' / '.join(lines)[-200:]}")
    if facts["escapes"]:
        return outcome("escaped", "; ".join(facts["escapes"][:3]))
    if os.WIFSIGNALED(status):
        return outcome("crashed", f"signal {signal.Signals(os.WTERMSIG(status)).name}: {err[-300:]}")
    if "Traceback (most recent call last)" in err:
        return outcome("traceback", err[-2500:])
    if memory > 2 * size + MAX_MEMORY:
        return outcome("memory", f"{memory / 1e6:.0f} MB for a file of {size / 1e6:.3f} MB: {' / '.join(lines)[-200:]}")
    if seconds > MAX_SECONDS:
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


def _read_all(handle: int) -> str:
    os.lseek(handle, 0, os.SEEK_SET)
    with open(handle, "rb", closefd=False) as file:
        return file.read(2**20).decode("utf-8", "replace")


# -------------------------------------------------------------------- in the forked process
def _run_child(action: Callable[[], object], folder: Path, network: bool, handles: tuple[int, int, int]) -> None:
    """Run the action with limits, write its results to `handles`, and exit."""
    code = 71
    faulthandler.disable()
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (handles[0], 1), (handles[1], 2)):
            os.dup2(old, new)
        for stream, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            setattr(sys, stream, os.fdopen(number, mode, encoding="utf-8", closefd=False))
        os.chdir(folder)
        for resource_kind, most in ((resource.RLIMIT_AS, MAX_ADDRESS_SPACE), (resource.RLIMIT_FSIZE, MAX_FILE_BYTES)):
            hard = resource.getrlimit(resource_kind)[1]  # which may be lower, under `ulimit -v`
            limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource_kind, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        escapes: list[str] = []
        before = _reset_memory_peak()
        _install_audit_hook(folder, network, escapes)
        code = _exit_status(action)
        facts = {"memory": _peak_memory() - before, "escapes": escapes}
        os.write(handles[2], json.dumps(facts).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_status(action: Callable[[], object]) -> int:
    from tricycle_cli.flags import run_main

    try:
        run_main(lambda: action() and None)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 70
    return 0


def _reset_memory_peak() -> float:
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _read_memory("VmRSS")


def _peak_memory() -> float:
    return _read_memory("VmHWM")


def _read_memory(name: str) -> float:
    """Return a field of /proc/self/status in bytes."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name):
                return float(line.split()[1]) * 1024
    return 0.0


def _install_audit_hook(folder: Path, network: bool, escapes: list[str]) -> None:
    """Record forbidden audit events in `escapes`; the events are not prevented."""
    home = os.path.realpath(folder)

    def inside(path: object) -> bool:
        if isinstance(path, int) or path is None:
            return True
        full = os.path.realpath(os.fsdecode(path))  # type: ignore[arg-type]
        if "__pycache__" in full:  # caches of Python and Numba
            return True
        return full.startswith(home + os.sep) or full == home or full == os.devnull

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if writes and not inside(path):
                escapes.append(f"it writes to {path!r}")
            return
        forbidden = event in FORBIDDEN_EVENTS or (event in NETWORK_EVENTS and not network)
        if event in FILE_EVENTS:
            names = [os.fsdecode(path) for path in args if isinstance(path, (str, bytes, Path))]
            names = [name for name in names if "__pycache__" not in name]
            # a link itself may be removed or replaced
            forbidden = not all(inside(os.path.dirname(name) or ".") for name in names)
        if event == "subprocess.Popen" and args[1] == [sys.executable, "-I", template_process.__file__]:
            forbidden = False  # the process that renders an untrusted chat template
        if forbidden:
            escapes.append(f"{event} {args!r}"[:300])

    sys.addaudithook(hook)
