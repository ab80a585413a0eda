"""Memory for large results of kernels, kept from one training step to the next.

malloc gives the memory of a large array back to the system, which clears every page before it hands it out again: a
tenth of a training step. `empty` takes arrays from a range of addresses of our own, by best fit, and joins what is
free again to what is free beside it, so that the gradients of a step lie where its activations were. The range is as
large as the machine's memory; what was never written to takes none of it. When no array was taken for some seconds,
all that is free goes back to the system.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
import tracemalloc
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

LEAST = 2**20  # bytes: malloc keeps the memory of smaller arrays itself
ALIGNMENT = 64  # bytes: a cache line, and a register of AVX-512
IDLE_SECONDS = 5.0


class _Range(np.ndarray):
    """Bytes. Of another type than the arrays in them, or NumPy would give these as their base, past the lease."""


class _Lease(np.ndarray):
    """Bytes of the range that are the base of one array, and are free when it and all views of it are gone."""

    lent_to_one_array = True  # for `tricycle.devices.owns_memory`
    returned: deque[tuple[int, int]]
    place: tuple[int, int]

    def __del__(self) -> None:
        self.returned.append(self.place)


class _Arena:
    """Which bytes of the range are free. The caller of a method holds the lock.

    Attributes:
        returned: offsets and sizes of what is free, but not joined yet: a `_Lease` may end within any method.
        free: the size and the offset of each free part, sorted.
        starts, ends: the size of the free part that starts, or ends, at an offset.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.returned: deque[tuple[int, int]] = deque()
        self.free: list[tuple[int, int]] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.memory: mmap.mmap | None = None
        self.bytes: Any = None
        self.n_taken = 0
        self.watcher: threading.Thread | None = None

    def reserve(self) -> None:
        """Ask for addresses, once; where the system gives none nothing is ever free here."""
        self.bytes = np.empty(0, np.uint8)
        try:
            size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self.memory = mmap.mmap(-1, size, flags=flags)
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError, ValueError):  # not on Windows; a limit on addresses; no huge pages
            pass
        if self.memory is not None:
            self.bytes = np.ndarray.__new__(_Range, len(self.memory), np.uint8, self.memory)
            self.insert(0, len(self.memory))

    def take(self, size: int) -> np.ndarray | None:
        """Return `size` bytes that nothing uses; None where no free part is as large."""
        if self.bytes is None:
            self.reserve()
        self.n_taken += 1
        if self.watcher is None or not self.watcher.is_alive():
            self.watch()
        self.collect()
        place = bisect_left(self.free, (size, 0))
        if place == len(self.free):
            return None
        found, start = self.free[place]
        self.remove(start, found)
        if found > size:
            self.insert(start + size, found - size)
        lease: _Lease = self.bytes[start : start + size].view(_Lease)
        lease.returned, lease.place = self.returned, (start, size)
        return lease

    def collect(self) -> None:
        """Join what has come back to what is free beside it."""
        while self.returned:
            start, size = self.returned.popleft()
            after = self.starts.get(start + size)
            if after is not None:
                self.remove(start + size, after)
                size += after
            before = self.ends.get(start)
            if before is not None:
                self.remove(start - before, before)
                start, size = start - before, size + before
            self.insert(start, size)

    def insert(self, start: int, size: int) -> None:
        insort(self.free, (size, start))
        self.starts[start] = self.ends[start + size] = size

    def remove(self, start: int, size: int) -> None:
        del self.free[bisect_left(self.free, (size, start))], self.starts[start], self.ends[start + size]

    def watch(self) -> None:
        """Start a thread that releases the memory, and ends, when nothing was taken for IDLE_SECONDS."""
        self.watcher = threading.Thread(target=self.release_when_idle, name="tricycle-buffers", daemon=True)
        with suppress(RuntimeError):  # no more threads, or the interpreter is about to end
            self.watcher.start()

    def release_when_idle(self) -> None:
        n_seen = None
        while n_seen != self.n_taken:
            n_seen = self.n_taken
            time.sleep(IDLE_SECONDS)
        with self.lock:
            self.release()

    def release(self) -> None:
        """Give the free pages back to the system. Their addresses stay."""
        self.collect()
        for size, start in self.free:
            first, last = -(-start // mmap.PAGESIZE), (start + size) // mmap.PAGESIZE
            if self.memory is not None and first < last:
                self.memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


_arena = _Arena()


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array as `np.empty` does; a large one in memory that an earlier array had."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    # tracemalloc cannot see into the range, and a forked process may inherit the lock held
    if size < LEAST or tracemalloc.is_tracing() or not _arena.lock.acquire(blocking=False):
        return np.empty(shape, dtype)
    try:
        lease = _arena.take(-(-size // ALIGNMENT) * ALIGNMENT)
    finally:
        _arena.lock.release()
    return np.empty(shape, dtype) if lease is None else np.ndarray(shape, dtype, lease)


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of zeros, a large one in memory that an earlier array had."""
    array = empty(shape, dtype)
    array.fill(0)
    return array


def release() -> None:
    """Give the memory that no array uses back to the system, such as after the last step of a training."""
    with _arena.lock:
        _arena.release()
