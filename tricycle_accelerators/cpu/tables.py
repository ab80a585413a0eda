"""Gradient of an embedding table in NumPy and threads."""

from __future__ import annotations

import numpy as np

from tricycle.kernels.dispatch import upcasting
from tricycle_accelerators import buffers, chunks, threads


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
