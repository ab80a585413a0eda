"""Spinning threads for short products: a policy of when to use them, and a product in BLAS's own threads.

The threads of BLAS, of OpenMP and of `compiled/vector_loops.py` wait for work by spinning, so they begin within a
microsecond, where those that sleep (`threads.py`) take thirty: in the hundred products of a token that is a third of
its time. But where the system has put one aside for another program, a product waits for it, for milliseconds. So they
are used while less time is lost in this way than one thread alone would lose; otherwise the calling thread does without
them for a while. The bits are the same.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from tricycle_accelerators import threads

LATE_SECONDS, LATE_BYTES_PER_SECOND = 0.0004, 2e9  # what a product takes beyond both is lost
MIN_SHARED_BYTES = 2**17  # bytes of a matrix from which on it takes longer to read than to share
DECAY = 0.995  # of the seconds spent and lost, with each product
MAX_LOST = 0.2  # of the seconds spent in products: with more, one thread was about as fast
MIN_SPENT_SECONDS = 0.03  # the loss is compared with at least this time, so that one wait of 4 ms is not enough
MIN_REST_SECONDS, MAX_REST_SECONDS = 0.1, 2.0  # seconds


class SpinPolicy:
    """Policy that decides whether spinning threads are used, from the time that products waited for late threads.

    Attributes:
        spent, lost: seconds of the latest products, and how many of them were lost by waiting; each product counts less
            than the next.
        rest: seconds for which the threads will not be used when too much time is lost again.
        until: when they are used again.
    """

    def __init__(self) -> None:
        self.spent = self.lost = 0.0
        self.rest = MIN_REST_SECONDS
        self.until = 0.0

    def __bool__(self) -> bool:
        """Return whether threads may spin now: more than one, not resting, and not within a worker."""
        return perf_counter() >= self.until and threads.n_threads() > 1 and not threads.in_worker()

    def record_seconds(self, seconds: float, n_bytes: int) -> None:
        """Record the duration of a product with a matrix of `n_bytes` bytes; what exceeds a limit was lost."""
        self.record(seconds, max(0.0, seconds - LATE_SECONDS - n_bytes / LATE_BYTES_PER_SECOND))

    def record(self, seconds: float, lost: float) -> None:
        """Record a product's seconds and how many were lost; if too many, rest the threads for 0.1 s, doubling to 2."""
        self.spent, self.lost = DECAY * self.spent + seconds, DECAY * self.lost + lost
        if self.lost > MAX_LOST * max(self.spent, MIN_SPENT_SECONDS):
            self.spent = self.lost = 0.0
            self.until = perf_counter() + self.rest
            self.rest = min(2 * self.rest, MAX_REST_SECONDS)
        elif self.lost < 0.01 * MAX_LOST * MIN_SPENT_SECONDS:
            self.rest = MIN_REST_SECONDS


spin_policy = SpinPolicy()


# Cache: valid for the life of the process: registered once; a forked process inherits that.
@cache
def disable_after_fork() -> None:
    """Register a fork hook that disables spinning threads in child processes, where OpenMP's threads are gone."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=lambda: setattr(spin_policy, "until", math.inf))


# -------------------------------------------------------------------- BLAS
class _Blas(NamedTuple):
    """Functions that get and set the number of threads of NumPy's OpenBLAS."""

    get: Callable[[], int]
    set: Callable[[int], None]


# Cache: valid for the life of the process: NumPy's BLAS is loaded with NumPy.
@cache
def _blas() -> _Blas | None:
    """Return OpenBLAS's thread functions; None for another BLAS, or if several are loaded."""
    libraries = threads.blas_libraries()
    if len(libraries) != 1 or libraries[0].internal_api != "openblas" or libraries[0].threading_layer != "pthreads":
        return None
    library: Any = ctypes.PyDLL(libraries[0].filepath)  # it is loaded already
    for prefix in ("", "scipy_"):
        for suffix in ("", "64_", "_64"):
            names = [f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set")]
            if all(hasattr(library, name) for name in names):
                return _Blas(*(getattr(library, name) for name in names))
    return None


def multiply_vector(a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    """Return a @ b for one row `a` by OpenBLAS with all threads; None if b is small or BLAS must stay limited.

    BLAS adds up the terms of each column in the same order, whatever its threads.
    """
    blas = _blas()
    if blas is None or b.nbytes < MIN_SHARED_BYTES or not spin_policy:
        return None
    with threads.pool_lock, threads.blas_limit.lock:
        if len(threads.blas_limit.holders) > threads.blas_limit.is_permanent:
            return None  # a caller has limited BLAS to one thread
        before = blas.get()
        try:
            blas.set(threads.n_threads())
            start = perf_counter()
            product: np.ndarray = a @ b
            spin_policy.record_seconds(perf_counter() - start, b.nbytes)
        finally:
            blas.set(before)
    return product
