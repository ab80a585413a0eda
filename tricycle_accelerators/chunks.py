"""Divide the work of NumPy kernels into chunks for threads, and sum over chunks in a fixed order.

Pieces stay in a core's cache. Sums over them are added up in order, and how work is cut depends on sizes and on the
number of threads alone: so results do not change from run to run, whatever else the machine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tricycle_accelerators import threads

CHUNK_SIZE = 262_144  # elements: a few such arrays stay in a third-level cache, and threads seldom meet at a lock
UNSHARED_SIZE = 4096  # elements: BLAS computes the product of such a small matrix with a vector in one thread
SAFE_EXPONENT = 50.0  # e^50 and e^-50, and sums of a hundred million such, are far from the ends of float32
MAX_EXP = math.exp(SAFE_EXPONENT)


def row_chunks(n_rows: int, row_size: int = 1) -> list[slice]:
    """Return slices of rows, at most CHUNK_SIZE elements each, equally many per thread; the last may pass `n_rows`."""
    most = max(1, CHUNK_SIZE // max(1, row_size))
    n_pieces = -(-n_rows // most)
    if n_pieces > 1:  # as many for each thread
        n_pieces += -n_pieces % threads.n_threads()
    step = max(1, -(-n_rows // max(1, n_pieces)))
    return [slice(start, start + step) for start in range(0, n_rows, step)]


def flatten_alike(weights: np.ndarray, grad: np.ndarray, *moments: np.ndarray) -> list[np.ndarray] | None:
    """Flatten all in one memory order (views; `grad` may be copied); None unless the others are all C- or F-contiguous.

    Weights that were loaded lie column by column, and what is made like them does so too; gradients seldom do.
    """
    changed = [weights, *moments]
    if all(a.flags.f_contiguous for a in changed):
        grad, changed = grad.T, [a.T for a in changed]
    if not all(a.flags.c_contiguous for a in changed):
        return None
    return [a.reshape(-1) for a in (changed[0], np.ascontiguousarray(grad), *changed[1:])]


def thread_slices(n_rows: int) -> list[slice]:
    """Return a slice of rows for each thread, of a multiple of 16 rows; the last may end after `n_rows`.

    Two slices per thread were slower, also beside other programs: matrices are packed for each slice.
    """
    step = max(1, -(-n_rows // threads.n_threads() // 16) * 16)  # BLAS likes even blocks
    return [slice(start, start + step) for start in range(0, n_rows, step)]


def sum_over_chunks(work: Callable[[slice], Any], pieces: list[slice], calls_blas: bool = True) -> Any:
    """Call `work` for each slice (one or more) in threads; return the sum of results, added to the first in order.

    Args:
        calls_blas: as of `threads.parallel_for`.
    """
    results: list[Any] = [None] * len(pieces)

    def keep(i: int) -> None:
        results[i] = work(pieces[i])

    threads.parallel_for(keep, range(len(pieces)), calls_blas)
    total = results[0]
    for result in results[1:]:
        total += result
    return total


def ones_vector(n: int, like: np.ndarray) -> np.ndarray:
    """Return a vector of n ones in the dtype of `like`; a product with the vector sums rows or columns quickly."""
    row = np.empty(n, like.dtype)
    row.fill(1)  # a third of the time that np.ones takes for a few
    return row
