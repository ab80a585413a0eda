"""Settings of the host process that make training faster; programs, not the library, call `tune_host` at the start."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from typing import NamedTuple

from tricycle_accelerators import threads

SWITCH = "TRICYCLE_TUNE_HOST"


class Tuning(NamedTuple):
    """The process settings that `tune_host` changed."""

    keeps_memory: bool = False  # malloc keeps freed memory
    holds_blas: bool = False  # NumPy's BLAS computes in one thread, for threads share its work already


def tune_host() -> Tuning:
    """Make malloc keep freed memory and BLAS use one thread, unless TRICYCLE_TUNE_HOST=0; return what was changed.

    Two things change.

    - Memory that is freed stays with the process, in pages of 2 MB where the system has them, for the next step. The
      process then never gets smaller. This needs Linux and the GNU C library.
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


# Cache: valid for the life of the process: a forked process inherits what was tuned.
@cache
def _tune() -> Tuning:
    """Keep freed memory, limit BLAS to one thread until exit, and return what was changed; once per process."""
    return Tuning(_keep_memory(), threads.limit_blas_until_exit())


# -------------------------------------------------------------------- memory
def _keep_memory() -> bool:
    """Configure glibc's malloc to keep freed memory, in 2 MB pages where available; return whether it does.

    Otherwise large arrays go back to the system when they are freed, and it clears every page that it hands out to
    the next step; and with pages of 4 kB the processor spends time on address translation. Most large arrays are
    results of kernels, which are in memory that `buffers.py` keeps; with the others it is 0 to 3% of a training step.
    Under a limit of addresses (`ulimit -v`), all threads share one arena.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # musl's C library
        return False
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        libc.mallopt(m_arena_max, 1)  # the arena of each further thread would reserve 64 MB of the limit
    kept = libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, -1)
    if kept:
        _reserve_huge_pages(libc, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2)
    return bool(kept)


def _reserve_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Allocate `size` bytes of addresses without touching them, mark them for huge pages, free them to malloc."""
    madv_hugepage = 14
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(size))
    if block:
        start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size - mmap.PAGESIZE), madv_hugepage)
        libc.free(ctypes.c_void_p(block))
