"""Gradient of an embedding table by Numba, in one pass over memory."""

from __future__ import annotations

import numpy as np

from tricycle_accelerators import buffers, chunks, threads
from tricycle_accelerators.compiled.elementwise import large_array_decline_reason
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when


def _embedding_backward_decline_reason(grad: np.ndarray, ids: np.ndarray, n_rows: int) -> str | None:
    """Return why the loop cannot run: `grad` not large, contiguous float32, or ids not int64; else None."""
    why = large_array_decline_reason(grad, dtypes=("float32",))
    return why if why or (ids.dtype == np.int64 and ids.flags.behaved) else f"aligned ids of int64, got {ids.dtype}"


@decline_when(_embedding_backward_decline_reason)
def embedding_backward(grad: np.ndarray, ids: np.ndarray, n_rows: int) -> np.ndarray:
    """Sum the rows of `grad` with equal token ids into a table (n_rows, C) with Numba loops; threads divide columns."""
    table = buffers.zeros((n_rows, grad.shape[1]), np.float32)
    add = load_loops("training_loops").scatter_add_rows
    columns = chunks.thread_slices(grad.shape[1])
    threads.parallel_for(lambda part: add(grad[:, part], ids, table[:, part]), columns, calls_blas=False)
    return table
