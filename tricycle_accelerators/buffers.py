"""Memory for large results of kernels, reused from one training step to the next.

malloc gives the memory of a large array back to the system, which clears every page before it hands it out again: a
tenth of a training step. `empty` takes arrays from ranges of addresses of our own, by best fit, and joins what is free
again to what is free beside it, so that the gradients of a step are stored where its activations were. Addresses that
no array has used take no memory; they are used only when no freed part is large enough. When no array was taken for
some seconds, all that is free goes back to the system.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import time
import tracemalloc
from bisect import bisect_left, bisect_right, insort
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_BYTES = 2**20  # bytes: malloc keeps the memory of smaller arrays itself
ALIGNMENT = 64  # bytes: a cache line, and a register of AVX-512
RANGE_BYTES = 2**30  # bytes: most training steps have enough of one
LIMIT_SHARE = 8  # with a limit on addresses a range is at most this part of it, for other libraries need some, too
IDLE_SECONDS = 5.0


class _Bytes(np.ndarray):
    """The bytes of a range: a subclass, because NumPy skips a base, here the lease, whose base has the same type."""


@dataclass
class _Range:
    """Addresses that the system has given us; those of two ranges do not adjoin, for the last page is never used.

    Attributes:
        used_end: the address after the last that an array has used.
    """

    start: int
    bytes: np.ndarray
    memory: mmap.mmap
    used_end: int

    @property
    def end(self) -> int:
        """Return the address after the last byte of the mapped memory."""
        return self.start + self.bytes.size


class _Lease(np.ndarray):
    """Bytes of a range that are the base of one array, and are free when it and all views of it are gone."""

    lent_to_one_array = True  # for `tricycle.devices.owns_memory`
    returned: deque[tuple[int, int]] = deque(maxlen=0)  # until it is lent: an interrupt may come before
    place: tuple[int, int] = 0, 0

    def __del__(self) -> None:
        """Report the memory of this deleted array as returned to the arena."""
        self.returned.append(self.place)


class _Arena:
    """An allocator that knows which addresses of its ranges are free. The caller of a method holds the lock.

    Attributes:
        returned: addresses and sizes of what is free, but not joined yet: a `_Lease` may end within any method.
        free: the size and the address of each free part that an array has used before, sorted.
        starts, ends: the size of the free part that starts, or ends, at an address.
        ranges: by their addresses.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.returned: deque[tuple[int, int]] = deque()
        self.free: list[tuple[int, int]] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.ranges: list[_Range] = []
        self.n_taken = 0
        self.watcher: threading.Thread | None = None

    def take(self, size: int) -> np.ndarray | None:
        """Return a best-fit uint8 array of `size` bytes that frees itself when deleted; None if out of memory."""
        self.collect()
        place = bisect_left(self.free, (size, 0))
        if place == len(self.free):
            if not self.grow(size):
                return None
            place = bisect_left(self.free, (size, 0))
        self.n_taken += 1
        if self.watcher is None or not self.watcher.is_alive():
            self.watch()
        found, start = self.free[place]
        self.remove(start, found)
        if found > size:
            self.insert(start + size, found - size)
        whole = self.range_of(start)
        lease: _Lease = whole.bytes[start - whole.start : start - whole.start + size].view(_Lease)
        lease.returned, lease.place = self.returned, (start, size)
        return lease

    def grow(self, size: int) -> bool:
        """Add a free part of `size` bytes at addresses not used before; return False if out of memory."""
        for each in self.ranges:
            below = self.ends.get(each.used_end, 0)
            if each.used_end - below + size <= each.end:
                if below:
                    self.remove(each.used_end - below, below)
                each.used_end += size - below
                self.insert(each.used_end - size, size)
                return True
        return self.reserve(size) and self.grow(size)

    def reserve(self, size: int) -> bool:
        """Map another range of `size` bytes, or RANGE_BYTES if more; return False if refused, and on Windows."""
        if sys.platform == "win32":
            return False
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        usual = RANGE_BYTES if limit == resource.RLIM_INFINITY else min(RANGE_BYTES, limit // LIMIT_SHARE)
        n_pages = -(-max(size, usual) // mmap.PAGESIZE) + 1
        try:
            memory = mmap.mmap(-1, n_pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # a limit on addresses
            return False
        if sys.platform == "linux":
            with suppress(AttributeError, OSError):  # not every kernel has huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        usable = np.ndarray.__new__(_Bytes, (n_pages - 1) * mmap.PAGESIZE, np.uint8, memory)
        start = usable.ctypes.data
        insort(self.ranges, _Range(start, usable, memory, start), key=lambda each: each.start)
        return True

    def range_of(self, address: int) -> _Range:
        """Return the mapped range that contains an address."""
        return self.ranges[bisect_right(self.ranges, address, key=lambda each: each.start) - 1]

    def collect(self) -> None:
        """Move the memory of deleted arrays to the free list, merged with adjacent free ranges."""
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
        """Add a free part to the indices by size, by start and by end."""
        place = bisect_left(self.free, (size, start))
        self.free[place:place] = [(size, start)]  # without a call, during which an interrupt could come
        self.starts[start] = self.ends[start + size] = size

    def remove(self, start: int, size: int) -> None:
        """Remove a free part from the indices by size, by start and by end."""
        del self.free[bisect_left(self.free, (size, start))], self.starts[start], self.ends[start + size]

    def watch(self) -> None:
        """Start a thread that releases the memory, and ends, when nothing was taken for IDLE_SECONDS."""
        self.watcher = threading.Thread(target=self.release_when_idle, name="tricycle-buffers", daemon=True)
        with suppress(RuntimeError):  # no more threads, or the interpreter is about to end
            self.watcher.start()

    def release_when_idle(self) -> None:
        """Block until nothing was taken for IDLE_SECONDS, then give all free memory back to the system."""
        n_seen = None
        while n_seen != self.n_taken:
            n_seen = self.n_taken
            time.sleep(IDLE_SECONDS)
        with self.lock:
            self.release()

    def release(self) -> None:
        """Give the pages of all free memory back to the system; the address ranges stay mapped for later arrays."""
        self.collect()
        for size, start in self.free:
            whole = self.range_of(start)
            first, last = start - whole.start, start - whole.start + size
            first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last and sys.platform != "win32":
                whole.memory.madvise(mmap.MADV_DONTNEED, first, last - first)


_arena = _Arena()


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialized array: from 1 MiB on in memory of deleted arrays if possible, else by `np.empty`."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    # tracemalloc cannot see into a range, and a forked process may inherit the lock held
    if size < MIN_BYTES or tracemalloc.is_tracing() or _arena.lock.locked():
        return np.empty(shape, dtype)
    with _arena.lock:  # unlike after `acquire(blocking=False)`, an interrupt cannot leave it locked
        lease = _arena.take(-(-size // ALIGNMENT) * ALIGNMENT)
    return np.empty(shape, dtype) if lease is None else np.ndarray(shape, dtype, lease)


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of zeros; a large array reuses memory that an earlier array has freed."""
    array = empty(shape, dtype)
    array.fill(0)
    return array


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialized array as `empty` does, which starts at a multiple of ALIGNMENT (64) bytes."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = empty((size + ALIGNMENT,), np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:size].view(dtype).reshape(shape)


def release() -> None:
    """Return all unused memory of this allocator to the operating system."""
    with _arena.lock:
        _arena.release()
