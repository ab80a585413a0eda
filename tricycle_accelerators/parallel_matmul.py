"""Divide a matrix product among threads by rows or by columns of the result; each part is one library call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tricycle_accelerators import chunks, threads
from tricycle_accelerators.matmul_plan import longer_axis

# Writes a b + bias into the last: (N, K), (K, M), (M,) or None, (N, M), in one thread.
Multiply = Callable[[np.ndarray, np.ndarray, "np.ndarray | None", np.ndarray], None]


def multiply_in_parallel(
    multiply: Multiply, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, out: np.ndarray
) -> None:
    """Write a @ b + bias into `out` by `multiply(a, b, bias, out)` on slices of the result's longer axis in threads."""
    share_out = multiply_by_rows if longer_axis((*a.shape, b.shape[1])) == "rows" else multiply_by_columns
    share_out(multiply, a, b, bias, out)


def multiply_by_rows(
    multiply: Multiply, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, out: np.ndarray
) -> None:
    """Write a @ b + bias into `out` by `multiply(a, b, bias, out)` on slices of the rows, divided among threads."""
    threads.parallel_for(lambda part: multiply(a[part], b, bias, out[part]), chunks.thread_slices(len(a)))


def multiply_by_columns(
    multiply: Multiply, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, out: np.ndarray
) -> None:
    """Write a @ b + bias into `out` by `multiply(a, b, bias, out)` on slices of the columns, divided among threads."""

    def work(part: slice) -> None:
        multiply(a, b[:, part], None if bias is None else bias[part], out[:, part])

    threads.parallel_for(work, chunks.thread_slices(b.shape[1]))


def has_contiguous_axis(matrix: np.ndarray) -> bool:
    """Return whether the rows or the columns of a matrix are contiguous and do not overlap."""
    size, (n_rows, n_columns), (down, across) = matrix.itemsize, matrix.shape, matrix.strides
    return (across == size and down >= n_columns * size) or (down == size and across >= n_rows * size)


def with_contiguous_axis(matrix: np.ndarray) -> np.ndarray:
    """Return the matrix, copied to C order unless its rows or its columns are contiguous and do not overlap."""
    return matrix if has_contiguous_axis(matrix) else np.array(matrix, order="C")
