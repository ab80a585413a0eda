"""Products of one row and a float32, bfloat16 or int8 matrix with contiguous columns, for generating tokens."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from tricycle.devices import Array
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle_accelerators import threads
from tricycle_accelerators.compiled.elementwise import FLOAT32
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.matmul_plan import vector_decline_reason
from tricycle_accelerators.providers import decline_when
from tricycle_accelerators.spin_threads import SpinPolicy

TOO_FEW = -1  # what a job returns if fewer threads took part than were asked for
LATE_PAUSES = 5_000  # pauses: a thread that is waited for longer was put aside by the system
PAUSE_SECONDS = 2e-8  # 40 to 140 cycles
NO_SCALES, NO_SUMS = np.empty(0, np.float32), np.empty(0, np.int32)


class _Mailboxes(threading.local):
    """The mailbox of each thread, for products that it makes alone."""

    def __init__(self) -> None:
        self.own = load_loops("vector_loops").new_mailbox()


class SpinTeam:
    """The calling thread and the worker threads, which watch one mailbox while products follow each other.

    Attributes:
        n_long_jobs: how many long jobs have begun; workers that stop look for new ones by it.
    """

    def __init__(self) -> None:
        self.loops = load_loops("vector_loops")
        self.shared = self.loops.new_mailbox()
        self.boxes = _Mailboxes()
        self.policy = SpinPolicy()
        self.n_long_jobs = 0

    def multiply(
        self, x: np.ndarray, matrix: np.ndarray, scales: np.ndarray, sums: np.ndarray, out: np.ndarray
    ) -> None:
        """Write x (1, K) times float32, bfloat16 or int8 rows into `out` by spinning threads; alone if busy or late."""
        self.run(partial(self.loops.multiply_vector, x, matrix, scales, sums, out))

    def run(self, job: Callable[[np.ndarray, int], int], is_long: bool = False) -> int:
        """Run a job with spinning threads, alone if they are busy or late; return what the job returns.

        Args:
            job: called with a mailbox and the number of threads; returns the pauses waited, -1 if too few took part.
            is_long: whether it takes milliseconds, so that workers which do not serve are started first, in 30 us.
        """
        if not self.policy or not threads.pool_lock.acquire(blocking=False):
            return job(self.boxes.own, 1)
        start = perf_counter()
        try:
            if is_long:
                self.n_long_jobs += 1
                threads.start_serving(self.serve, self.stop)
            waited = job(self.shared, min(threads.n_threads(), self.loops.MOST_PARTS))
            if waited == TOO_FEW:
                threads.start_serving(self.serve, self.stop)
        finally:
            threads.pool_lock.release()
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
    """Return why the loop cannot run: not one float32 row, b small or by rows, `out` or `dtype` given; else None."""
    flags = b.flags
    why = vector_decline_reason(len(a), b.nbytes, "columns" if flags.f_contiguous else "rows")
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
    """Return row a @ column-major b + bias by spinning threads; NotImplemented if small or given `out`, `dtype`."""
    product = np.empty((1, b.shape[1]), np.float32)
    spin_team().multiply(a, b.T, NO_SCALES, NO_SUMS, product)
    if bias is not None:
        product += bias
    return product


class _Rows(NamedTuple):
    """A matrix of few bits as the loops take it: its numbers (M, K), bfloat16 by their bits, and scales (M,)."""

    numbers: np.ndarray
    scales: np.ndarray
    sums: np.ndarray


def _matrix_rows(matrix: QuantizedMatrix) -> _Rows:
    """Return a quantized matrix as _Rows: writable numbers, row scales, and int32 row sums if the loops use bytes."""
    numbers = np.ascontiguousarray(matrix.values).view(np.int8 if matrix.dtype.name == "int8" else np.uint16)
    if not numbers.flags.writeable:  # loops take no array that is read-only, though they write nothing here
        memory: Any = (ctypes.c_char * numbers.nbytes).from_address(numbers.ctypes.data)
        memory.owner = matrix.values
        numbers = np.frombuffer(memory, numbers.dtype).reshape(numbers.shape)
    scales = NO_SCALES if matrix.scales is None else np.ascontiguousarray(matrix.scales[:, 0], np.float32)
    loops = load_loops("vector_loops")
    has_sums = loops.HAS_BYTES and len(scales) and numbers.shape[1] % (4 * loops.LANES) == 0
    return _Rows(numbers, scales, numbers.sum(axis=1, dtype=np.int32) if has_sums else NO_SUMS)


def matrix_decline_reason(matrix: QuantizedMatrix) -> str | None:
    """Return why the loop cannot multiply a row with a matrix: not transposed, not int8 or bfloat16; else None."""
    if not matrix.transposed:
        return "a matrix whose columns lie in one piece each, got one that lies by rows"
    if "rows" not in matrix.prepared and (matrix.dtype.name not in ("int8", "bfloat16") or not matrix.size):
        return f"a matrix of int8 or bfloat16 with numbers, got {matrix!r}"
    return None


def _few_bits_matmul_decline_reason(
    x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32"
) -> str | None:
    """Return why the loop cannot run: not one float32 row, or not a transposed int8 or bfloat16 matrix; else None."""
    if len(x) != 1:
        return f"one row alone, got {len(x)}"
    if (why := matrix_decline_reason(matrix)) is not None:
        return why
    if x.dtype != FLOAT32 or not x.flags.carray:
        return f"a row of float32 in one piece, aligned and not read-only, got {x.dtype}"
    return None


def _prepared_rows(matrix: QuantizedMatrix) -> _Rows:
    """Return a quantized matrix as _Rows, cached in the matrix."""
    rows: _Rows | None = matrix.prepared.get("rows")
    if rows is None:
        rows = matrix.prepared["rows"] = _matrix_rows(matrix)
    return rows


def describe_rows(matrix: QuantizedMatrix) -> np.ndarray:
    """Return the table of a matrix for `vector_loops.multiply_row_by_rows`, cached in the matrix."""
    table: np.ndarray | None = matrix.prepared.get("row_table")
    if table is None:
        loops, (numbers, scales, sums) = load_loops("vector_loops"), _prepared_rows(matrix)
        kind = loops.INT8 if numbers.itemsize == 1 else loops.BFLOAT16
        addresses = [array.ctypes.data if array.size else 0 for array in (numbers, scales, sums)]
        matrix.prepared["row_table"] = table = np.array([[kind, *addresses, *numbers.shape]], np.int64)
    return table


@decline_when(_few_bits_matmul_decline_reason)
def quantized_matmul(x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32") -> Array:
    """Return a float32 row times a matrix (rows cached in it) plus bias by spinning threads; else NotImplemented."""
    rows = _prepared_rows(matrix)
    product = np.empty((1, matrix.shape[1]), np.float32)
    spin_team().multiply(x, rows.numbers, rows.scales, rows.sums, product)
    if bias is not None:
        product += bias
    return product
