"""Products of a few vectors and a matrix by Numba, shared by spinning threads. The import compiles or loads them.

Each number of the matrix is read once, so the product takes the time in which the matrix comes from memory. Two things
keep that time short. Threads begin within a microsecond, for those that have nothing to do watch a mailbox. And while
they wait for a job they prefetch their part of the matrix that followed the last one before: a model that generates
text uses its matrices in the same order for each token, and memory would be idle between two products.

Shapes: M rows, which are added up, of K numbers each.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tricycle_accelerators.compiled.jit import HAS_FLOAT16 as HAS_FLOAT16
from tricycle_accelerators.compiled.jit import (
    ZERO,
    compile_callback,
    compile_loop,
    inner_function,
    max_abs_if_finite,
    pointer_to,
)
from tricycle_accelerators.compiled.mailbox import atomic_add, atomic_load, atomic_store, compare_exchange, pause
from tricycle_accelerators.compiled.registers import LANES as LANES
from tricycle_accelerators.compiled.registers import prefetch_line
from tricycle_accelerators.compiled.vector_rows import (
    BFLOAT16,
    BYTES,
    FLOAT16,
    FLOAT32,
    FUNCTION,
    INT8,
    ITEM_SIZES,
    KIND,
    N_PARTS,
    N_ROWS,
    N_X,
    OUT,
    ROWS,
    SCALES,
    SIZE,
    STRIDE,
    SUMS,
    X,
    call_function,
    multiply_bfloat16_rows,
    multiply_float16_rows,
    multiply_float32_rows,
    multiply_int8_rows,
    multiply_int8_rows_by_bytes,
    split_into_bytes,
)
from tricycle_accelerators.compiled.vector_rows import HAS_BYTES as HAS_BYTES
from tricycle_accelerators.compiled.vector_rows import KINDS as KINDS

# After a job in the mailbox come how many of its rows are done, how many threads serve, whether they are to stop, the
# address of `compute_all`, and a word for each thread: the number of the job in its upper half, in the lower one the
# rows that are left of its part.
DONE, SERVING, STOP, COMPUTE, LEFT = 24, 32, 33, 34, 40
A_LINE = 8  # 64-bit integers in a cache line: the words of two threads share none
MOST_PARTS = 64
MAILBOX = LEFT + A_LINE * MOST_PARTS
LOWER = 0xFFFFFFFF

CHUNK = 2**15  # bytes of rows that a thread computes at a time
LARGE_CHUNK = 2**17  # of float32 for four or more vectors, of which it reads four for all rows of a chunk
N_KNOWN = 509  # matrices of which a thread remembers the next, by a hash of their addresses
BURST = 512  # bytes that are prefetched at once: a processor drops what it cannot ask for
MOST_PREFETCHED = 2**19  # bytes of the next matrix: a second cache has room for them
SPIN_LIMIT = 100_000  # pauses, 40 to 140 cycles each, until a thread without work stops waiting


@numba.njit(inline="always")
def _chunk_rows(box: Any) -> int:
    """Return how many rows of a job's matrix a thread computes at a time."""
    if box[KIND] == FLOAT32 and box[N_X] >= 4:  # an even number, for they are multiplied in pairs
        return (LARGE_CHUNK // max(1, box[STRIDE]) // 2 + 1) * 2
    return CHUNK // max(1, box[STRIDE]) + 1


@numba.njit(inline="always")
def _compute_chunk(box: Any, place: int, part: int) -> bool:
    """Claim and compute some of the remaining rows of a job's part; return False if none remain."""
    word = atomic_load(place, LEFT + A_LINE * part)
    left = word & LOWER
    if left == 0:
        return False
    n = min(left, _chunk_rows(box))
    stop = box[N_ROWS] * (part + 1) // box[N_PARTS] - (left - n)
    if not compare_exchange(place, LEFT + A_LINE * part, word, word - n):
        return True
    if box[KIND] == FLOAT32:
        multiply_float32_rows(box, stop - n, stop)
    elif box[KIND] == FLOAT16:
        multiply_float16_rows(box, stop - n, stop)
    elif box[KIND] == BFLOAT16:
        multiply_bfloat16_rows(box, stop - n, stop)
    elif box[KIND] == INT8:
        multiply_int8_rows(box, stop - n, stop)
    elif box[KIND] == BYTES:
        multiply_int8_rows_by_bytes(box, stop - n, stop)
    else:
        call_function(box[FUNCTION], place, stop - n, stop)
    atomic_add(place, DONE, n)
    return True


# Called by its address, which is in the mailbox, because compiling it again for each kind of job takes seconds.
@compile_callback("void(i8, i8, i8)")
def compute_all(place: int, part: int, n_parts: int) -> None:
    """Compute the remaining rows of a thread's part, then those of the other threads' parts (work stealing).

    `place` is the address of the mailbox.
    """
    box = numba.carray(pointer_to(place, np.int64(0)), (MAILBOX,))
    for i in range(n_parts):
        while _compute_chunk(box, place, (part + i) % n_parts):
            pass


@inner_function()
def _prefetch_next(box: Any, place: int, part: int, known: Any, last: int) -> int:
    """Prefetch this part of the matrix that followed the current one the last time; return the current one.

    Args:
        known: (N_KNOWN, 4), addresses of matrices, and address, rows and stride of the next of each.
        last: the matrix before the current one.
    """
    job = atomic_load(place, LEFT + A_LINE * part)
    matrix, n_rows, stride, n_parts = box[ROWS], box[N_ROWS], box[STRIDE], box[N_PARTS]
    if atomic_load(place, LEFT + A_LINE * part) != job:  # another job came meanwhile
        return last
    entry = known[(last >> 6) % N_KNOWN]
    entry[0], entry[1], entry[2], entry[3] = last, matrix, n_rows, stride
    following = known[(matrix >> 6) % N_KNOWN]
    if following[0] == matrix:
        start = following[1] + following[3] * (following[2] * part // n_parts)
        stop = following[1] + following[3] * (following[2] * (part + 1) // n_parts)
        for first in range(start, min(stop, start + MOST_PREFETCHED), BURST):
            for address in range(first, first + BURST, 64):
                prefetch_line(address)
            pause()
            if atomic_load(place, LEFT + A_LINE * part) != job:
                break
    return matrix


@compile_loop("void(i8[::1], i8)")
def serve_jobs(box: np.ndarray, part: int) -> None:
    """Spin on a mailbox and compute rows of each job, own part first, until long without a job or STOP is set."""
    place = box.ctypes.data
    known = np.zeros((N_KNOWN, 4), np.int64)
    atomic_add(place, SERVING, 1)
    idle = last = 0
    while idle < SPIN_LIMIT and not atomic_load(place, STOP):
        if atomic_load(place, LEFT + A_LINE * part) & LOWER:
            call_function(box[COMPUTE], place, part, box[N_PARTS])
            last = _prefetch_next(box, place, part, known, last)
            idle = 0
        else:
            idle += 1
            pause()
    atomic_add(place, SERVING, -1)


def new_mailbox() -> np.ndarray:
    """Return a mailbox without a job."""
    box = np.zeros(MAILBOX, np.int64)
    box[COMPUTE] = compute_all.address
    return box


@inner_function()
def run_job(box: Any) -> int:
    """Compute the rows of the job in a mailbox with the threads that serve it; return pauses waited, -1 if too few."""
    place, n_rows, n_threads = box.ctypes.data, box[N_ROWS], box[N_PARTS]
    atomic_store(place, DONE, 0)
    job = ((atomic_load(place, LEFT) >> 32) + 1) & 0x7FFFFFFF
    for part in range(n_threads):
        n = n_rows * (part + 1) // n_threads - n_rows * part // n_threads
        atomic_store(place, LEFT + A_LINE * part, job << 32 | n)
    call_function(box[COMPUTE], place, 0, n_threads)
    waited = 0
    while atomic_load(place, DONE) < n_rows:
        waited += 1
        pause()
    return waited if atomic_load(place, SERVING) >= n_threads - 1 else -1


@compile_loop("i8(f4[:, ::1], UniTuple(i8, 4), f4[:, ::1], i8[::1], i8)")
def multiply_vectors(
    x: np.ndarray, matrix: tuple[int, int, int, int], out: np.ndarray, box: np.ndarray, n_threads: int
) -> int:
    """Write x (R, K) times all rows of a matrix and scales to `out` (R, M); return pauses waited, -1 if too few helped.

    Threads that serve the mailbox help; without any, this one does all of it, and the result has the same bits.

    Args:
        matrix: its type, FLOAT32, FLOAT16, BFLOAT16 or INT8, and addresses: of its numbers (M, K); of float32 scales
            (M,), by which the product is multiplied, or 0; of the sums (M,) of rows of int8, or 0. With sums, a single
            row x is rounded to 16 bits.

    Returns:
        For how many pauses the others were waited for, or -1 where fewer than `n_threads` took part.
    """
    (kind, numbers, scales, sums), (n_x, size), n_rows = matrix, x.shape, out.shape[1]
    splits = sums and n_x == 1
    bytes_of_x = np.empty((2, size if splits else 0), np.uint8)
    largest = max_abs_if_finite(x[0]) if splits else ZERO
    step = split_into_bytes(x[0], largest, bytes_of_x) if largest else ZERO
    box[KIND] = BYTES if step else kind
    box[X] = bytes_of_x.ctypes.data if step else x.ctypes.data
    box[ROWS], box[STRIDE], box[OUT] = numbers, size * ITEM_SIZES[kind], out.ctypes.data
    box[N_X], box[SIZE], box[N_ROWS], box[N_PARTS] = n_x, size, n_rows, n_threads
    box[SCALES], box[SUMS] = scales, sums
    waited = run_job(box)
    if len(bytes_of_x[0]) and step:  # named here, or their memory would be free by now
        for i in range(n_rows):
            out[0, i] *= step
    return waited


# Columns of the table of a matrix: what `multiply_vectors` takes, and its shape (M, K).
ROW_KIND, NUMBERS, ROW_SCALES, ROW_SUMS, COUNT, ROW_SIZE, N_ROW_FIELDS = range(7)


@compile_callback("i8(i8, i8, i8, i8, i8, i8, i8, i8)")
def multiply_by_rows(
    n_x: int, x: int, place: int, n_parts: int, out: int, function: int, box: int, n_threads: int
) -> int:
    """Write n_x vectors times the rows of a matrix to `out` as `multiply_vectors` does, all given by their addresses.

    Args:
        place: the address of the table of the matrix. n_parts, function: not used.
    """
    fields = numba.carray(pointer_to(place, np.int64(0)), (N_ROW_FIELDS,))
    vectors = numba.carray(pointer_to(x, ZERO), (n_x, fields[ROW_SIZE]))
    products = numba.carray(pointer_to(out, ZERO), (n_x, fields[COUNT]))
    mailbox = numba.carray(pointer_to(box, np.int64(0)), (MAILBOX,))
    matrix = fields[ROW_KIND], fields[NUMBERS], fields[ROW_SCALES], fields[ROW_SUMS]
    return multiply_vectors(vectors, matrix, products, mailbox, n_threads)
