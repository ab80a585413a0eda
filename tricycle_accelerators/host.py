"""What a program may change of the host process to train faster, in one call.

The library leaves the process as it is. The programs own theirs and call `tune_host()` when they start.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tricycle_accelerators import threads

SWITCH = "TRICYCLE_TUNE_HOST"


class Tuning(NamedTuple):
    """What `tune_host` changed.

    Attributes:
        keeps_memory: malloc keeps freed memory.
        holds_blas: NumPy's BLAS computes in one thread, for threads share its work already.
        pins_helpers: helper threads will stay on processors of their own, if enough are free when they start.
    """

    keeps_memory: bool = False
    holds_blas: bool = False
    pins_helpers: bool = False


def tune_host() -> Tuning:
    """Make this process a good place to train in, until it ends. For programs; the library never calls it.

    Three things change. The first two need Linux, the first also the GNU C library.

    - Memory that is freed stays with the process, in pages of 2 MB where the system has them, for the next step. The
      process then never gets smaller.
    - Helper threads stay on a processor each, which no other program that called this has claimed. Where there are
      fewer such processors than threads, all threads go where the system puts them.
    - NumPy's BLAS computes in one thread. Threads share what it is given, and to hold it back anew each time costs more
      than a small product.

    The environment variable TRICYCLE_TUNE_HOST=0 switches all of it off. A second call changes nothing more.

    Raises:
        ValueError: TRICYCLE_TUNE_HOST is neither 0 nor 1, or TRICYCLE_NUM_THREADS no whole number above 0.
    """
    said = os.environ.get(SWITCH, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}: expected 0 or 1, got {said!r}")
    return Tuning() if said == "0" else _tune()


@cache
def _tune() -> Tuning:
    can_pin = hasattr(os, "sched_setaffinity")
    if can_pin:
        threads.on_start(_pin)
    return Tuning(_keep_memory(), threads.hold_blas(), can_pin)


# -------------------------------------------------------------------- memory
def _keep_memory() -> bool:
    """Where the C library is glibc: freed memory stays with the process, in pages of 2 MB where the system has them.

    Otherwise large arrays go back to the system when they are freed, and it clears every page that it hands out to
    the next step; and with pages of 4 kB the processor spends time on looking up where they lie. Together a tenth of
    a training step.

    Returns:
        Whether it is so now.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):
        return False
    m_trim_threshold = -1
    m_mmap_max = -4
    kept = libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, -1)
    if kept:
        _ask_for_huge_pages(libc)
    return bool(kept)


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Addresses alone are taken here, no memory: half as many as the machine has, marked, and given back to malloc."""
    madv_hugepage = 14
    page = 4096
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(size))
    if block:
        start = -(-block // page) * page
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - page), madv_hugepage)
        libc.free(ctypes.c_void_p(block))


# -------------------------------------------------------------------- processors
_claims: list[int] = []  # open files, whose locks the system frees when the process ends, however it ends


def _pin(thread_ids: list[int]) -> None:
    """Put each helper thread on a processor of its own; one more is claimed for the thread that calls them.

    Linux likes to wake a thread on the processor of its waker, where both then take turns while another idles.
    """
    if not thread_ids or _claims:
        return
    processors = claim_processors(len(thread_ids) + 1)
    for thread_id, processor in zip(thread_ids, processors[1:]):
        with suppress(OSError):  # the processors of this process were changed meanwhile
            os.sched_setaffinity(thread_id, {processor})


def claim_processors(n: int) -> list[int]:
    """So many processors that no other process has claimed, until this process ends. Linux only.

    A claim is a lock on a file for each processor, `tricycle-processor-0.lock` and so on in the system's folder of
    temporary files. A file that is left there means nothing; only its lock does.

    Returns:
        Processors that this process may run on, each on a core of its own first; [] if there are not so many.
    """
    locks: list[int] = []
    processors: list[int] = []
    for processor in _spread_over_cores(sorted(os.sched_getaffinity(0))):
        if len(processors) == n:
            break
        lock = _lock(Path(tempfile.gettempdir()) / f"tricycle-processor-{processor}.lock")
        if lock is not None:
            locks.append(lock)
            processors.append(processor)
    if len(processors) < n:
        for lock in locks:
            os.close(lock)
        return []
    _let_go_after_fork()
    _claims.extend(locks)
    return processors


def _lock(path: Path) -> int | None:
    """The open file if nobody else has its lock, or None. The file may be another user's: it is only read."""
    import fcntl  # Unix alone has it

    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW
        try:
            file = os.open(path, flags)
        except FileNotFoundError:
            file = os.open(path, flags | os.O_CREAT, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _spread_over_cores(processors: Sequence[int]) -> list[int]:
    """One of each core first, then the others of cores that have several."""
    seen: dict[str, int] = {}
    places = {}
    for processor in processors:
        core = _core_of(processor)
        places[processor] = seen.get(core, 0)
        seen[core] = places[processor] + 1
    return sorted(processors, key=lambda processor: (places[processor], processor))


def _core_of(processor: int) -> str:
    """What all processors of a core have in common; the processor itself where the system does not tell."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(processor)


@cache
def _let_go_after_fork() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """A forked process that outlives this one must not go on holding its locks."""
    for file in _claims:
        os.close(file)
    _claims.clear()
