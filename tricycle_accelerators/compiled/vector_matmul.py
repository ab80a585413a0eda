"""Products of a row, or a few, and a matrix of 8, 16 or 32 bits with contiguous columns, for generating tokens."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.kernels.quantized import DTYPE_NAMES, QuantizedMatrix
from tricycle_accelerators import buffers, threads
from tricycle_accelerators.compiled.elementwise import FLOAT32, float16_decline_reason
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.matmul_plan import MAX_VECTORS, this_machine, vector_decline_reason
from tricycle_accelerators.providers import decline_when
from tricycle_accelerators.spin_threads import SpinPolicy

TOO_FEW = -1  # what a job returns if fewer threads took part than were asked for
MIN_LONG_WORK = 2**24  # multiplications, a tenth of a millisecond
MIN_ALIGNED_ROWS = 8  # to copy which takes less time than to read parts of two cache lines for each register
LATE_PAUSES = 5_000  # pauses: a thread that is waited for longer was put aside by the system
PAUSE_SECONDS = 2e-8  # 40 to 140 cycles


class _ThreadMemory(threading.local):
    """Memory of each thread: a mailbox for products that it makes alone, and rows that start at a cache line."""

    def __init__(self) -> None:
        self.mailbox = load_loops("vector_loops").new_mailbox()
        self._rows = np.empty(0, np.float32)

    def aligned(self, x: np.ndarray) -> np.ndarray:
        """Return float32 rows x, or a copy from the start of a cache line, valid until the next call in this thread."""
        if len(x) < MIN_ALIGNED_ROWS or address_of(x) % buffers.ALIGNMENT == 0:
            return x
        if self._rows.size < x.size:
            self._rows = buffers.aligned_empty((x.size,), np.float32)
        copy = self._rows[: x.size].reshape(x.shape)
        copy[...] = x
        return copy


class SpinTeam:
    """The calling thread and the worker threads, which watch one mailbox while products follow each other.

    Attributes:
        n_long_jobs: how many long jobs have begun; workers that stop look for new ones by it.
    """

    def __init__(self) -> None:
        self.loops = load_loops("vector_loops")
        self.shared = self.loops.new_mailbox()
        self.memory = _ThreadMemory()
        self.policy = SpinPolicy()
        self.n_long_jobs = 0

    def run(self, job: Callable[[np.ndarray, int], int], is_long: bool = False) -> int:
        """Run a job with spinning threads, alone if they are busy or late; return what the job returns.

        Args:
            job: called with a mailbox and the number of threads; returns the pauses waited, -1 if too few took part.
            is_long: whether it takes milliseconds, so that workers which do not serve are started first, in 30 us.
        """
        if not self.policy or threads.pool_lock.locked():
            return job(self.memory.mailbox, 1)
        with threads.pool_lock:  # unlike after `acquire(blocking=False)`, an interrupt cannot leave it locked
            start = perf_counter()
            if is_long:
                self.n_long_jobs += 1
                threads.start_serving(self.serve, self.stop)
            waited = job(self.shared, min(threads.n_threads(), self.loops.MOST_PARTS))
            if waited == TOO_FEW:
                threads.start_serving(self.serve, self.stop)
        self.policy.record(perf_counter() - start, waited * PAUSE_SECONDS if waited > LATE_PAUSES else 0.0)
        return waited

    def serve(self, part: int) -> None:
        """Compute rows of jobs in a worker thread until stopped, or idle for long."""
        n_seen = -1
        # `start_serving` leaves out a thread that has stopped spinning and still waits for the GIL: it goes on here
        while part < self.loops.MOST_PARTS and n_seen != self.n_long_jobs:
            n_seen = self.n_long_jobs
            self.loops.serve_jobs(self.shared, part)

    def stop(self, stopped: bool) -> None:
        """Set or clear the flag at which workers stop serving."""
        self.shared[self.loops.STOP] = stopped


# Cache: valid for the life of the process; a forked one, in which no helpers live on, begins with a new one.
@cache
def spin_team() -> SpinTeam:
    """Return the team of the process, cached from the first call."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=spin_team.cache_clear)
    return SpinTeam()


def matmul_decline_reason(
    a: np.ndarray, b: np.ndarray, bias: Any = None, out: Any = None, dtype: Any = None, *_: Any, **__: Any
) -> str | None:
    """Return why the loop cannot run: many rows, not float32, b small or by rows, `out` or `dtype` given; else None."""
    flags = b.flags
    why = vector_decline_reason(len(a), b.nbytes, "columns" if flags.f_contiguous else "rows", this_machine())
    if why is not None:
        return why
    if out is not None or dtype is not None:
        return "a place or a dtype for the result"
    if not (a.dtype == b.dtype == FLOAT32):
        return f"float32 alone, got {a.dtype} and {b.dtype}"
    return None if flags.behaved and a.flags.carray else "operands in one piece each, aligned and not read-only"


@decline_when(matmul_decline_reason)
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> np.ndarray:
    """Return a few rows a @ column-major b + bias by spinning threads; else NotImplemented."""
    return _multiply(a, b, bias)


def matrix_decline_reason(matrix: QuantizedMatrix) -> str | None:
    """Return why the loop cannot multiply a row with a matrix: by rows, of another type, without numbers; else None."""
    if not matrix.transposed:
        return "a matrix whose columns lie in one piece each, got one that lies by rows"
    if "rows" not in matrix.prepared and (matrix.dtype.name not in DTYPE_NAMES or not matrix.size):
        return f"a matrix of {' or '.join(DTYPE_NAMES)} with numbers, got {matrix!r}"
    return float16_decline_reason(matrix.dtype)


def _quantized_matmul_decline_reason(
    x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32"
) -> str | None:
    """Return why the loop cannot run: not a few float32 rows, or not a transposed matrix of few bits; else None."""
    if not 1 <= len(x) <= MAX_VECTORS:
        return f"from 1 to {MAX_VECTORS} rows, got {len(x)}"
    if (why := matrix_decline_reason(matrix)) is not None:
        return why
    if x.dtype != FLOAT32 or not x.flags.carray:
        return f"rows of float32 in one piece, aligned and not read-only, got {x.dtype}"
    return None


@decline_when(_quantized_matmul_decline_reason)
def quantized_matmul(x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32") -> Array:
    """Return a few float32 rows times a matrix plus bias by spinning threads; else NotImplemented."""
    return _multiply(x, matrix, bias)


def _multiply(x: np.ndarray, matrix: np.ndarray | QuantizedMatrix, bias: np.ndarray | None) -> np.ndarray:
    """Return float32 rows x (R, K) times a matrix (K, M) with contiguous columns, plus bias, by spinning threads."""
    product = np.empty((len(x), matrix.shape[1]), np.float32)
    team = spin_team()
    rows = team.memory.aligned(x) if isinstance(matrix, np.ndarray) else x  # those of fewer bits take long to convert
    job = partial(load_loops("vector_loops").multiply_vectors, rows, _matrix_fields(matrix), product)
    team.run(job, is_long=len(x) * matrix.size >= MIN_LONG_WORK)
    if bias is not None:
        product += bias
    return product


def describe_matrix(matrix: np.ndarray | QuantizedMatrix) -> np.ndarray:
    """Return the table of a matrix (K, M) for `vector_loops.multiply_by_rows`, valid while the matrix lives."""
    return np.array([[*_matrix_fields(matrix), *matrix.shape[::-1]]], np.int64)


def _matrix_fields(matrix: np.ndarray | QuantizedMatrix) -> tuple[int, int, int, int]:
    """Return a matrix as `multiply_vectors` takes it; the arrays of quantized ones are cached in them."""
    loops = load_loops("vector_loops")
    if isinstance(matrix, np.ndarray):
        return loops.KINDS["float32"], address_of(matrix), 0, 0
    if "rows" not in matrix.prepared:
        matrix.prepared["rows"] = _row_arrays(matrix)
    numbers, scales, sums = map(address_of, matrix.prepared["rows"])
    return loops.KINDS[matrix.dtype.name], numbers, scales, sums


def _row_arrays(matrix: QuantizedMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers (M, K) of a quantized matrix, row scales, and int32 row sums if the loops use bytes."""
    numbers, loops, nothing = np.ascontiguousarray(matrix.values), load_loops("vector_loops"), np.empty(0, np.int32)
    if matrix.scales is None:
        return numbers, nothing, nothing
    has_sums = loops.HAS_BYTES and numbers.shape[1] % (4 * loops.LANES) == 0
    scales = np.ascontiguousarray(matrix.scales[:, 0], np.float32)
    return numbers, scales, numbers.sum(axis=1, dtype=np.int32) if has_sums else nothing


def address_of(array: np.ndarray) -> int:
    """Return the address of an array, in less time than `ctypes` takes; 0 for an empty one."""
    address: int = array.__array_interface__["data"][0]
    return address if array.size else 0
