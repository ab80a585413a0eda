"""Gradients of an embedding table, and of elements that an array of indices selects, in NumPy and threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.kernels.dispatch import upcasting
from tricycle_accelerators import buffers, chunks, threads
from tricycle_accelerators.providers import decline_when


@upcasting(0)
def embedding_backward(grad: np.ndarray, ids: np.ndarray, n_rows: int) -> np.ndarray:
    """Sum the rows of `grad` with equal token ids into a table (n_rows, C), by a sort and `np.add.reduceat` in threads.

    `np.add.reduceat` sums each run of equal ids at once; `np.add.at` is slower. Threads divide the columns.
    """
    table = buffers.zeros((n_rows, grad.shape[-1]), grad.dtype)
    if ids.size:
        order = np.argsort(ids, kind="stable")
        present, starts = np.unique(ids[order], return_index=True)

        def columns(part: slice) -> None:
            table[present, part] = np.add.reduceat(grad[order, part], starts, axis=0)

        threads.parallel_for(columns, chunks.thread_slices(grad.shape[1]))
    return table


def _add_at_decline_reason(total: np.ndarray, index: Any, array: np.ndarray) -> str | None:
    """Return why numbers are not added as rows: not one array of integers after whole axes, or nothing; else None."""
    *before, ids = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(part, slice) or part != slice(None) for part in before):
        return "one array of indices, after whole axes"
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        return "an array of whole numbers as the index"
    return None if array.size else "an empty array"


@decline_when(_add_at_decline_reason)
def add_at(total: np.ndarray, index: Any, array: np.ndarray) -> None:
    """Add rows of `array` to `total` at `index` in place; rows of equal indices are summed first; or NotImplemented."""
    *before, ids = index if isinstance(index, tuple) else (index,)
    axis, total = len(before), np.moveaxis(total, len(before), 0)
    rows = array.reshape(*array.shape[:axis], ids.size, *array.shape[axis + ids.ndim :])
    rows = np.moveaxis(rows, axis, 0).reshape(ids.size, math.prod(total.shape[1:]))
    present, places = np.unique(ids.astype(np.int64, copy=False) % len(total), return_inverse=True)
    sums = kernels.embedding_backward(rows, places.reshape(-1), len(present))
    total[present] += sums.reshape(len(present), *total.shape[1:])
