"""The gradient of an embedding, in one pass over memory."""

from __future__ import annotations

import numpy as np

from tricycle_accelerators import buffers, pieces, threads
from tricycle_accelerators.compiled.elementwise import why_not_large
from tricycle_accelerators.compiled.loaded import load
from tricycle_accelerators.providers import unless

LEAST_COLUMNS = 64  # of a thread


def _why_not_embedding_backward(grad: np.ndarray, ids: np.ndarray, n_rows: int) -> str | None:
    why = why_not_large(grad, dtypes=("float32",))
    return why if why or (ids.dtype == np.int64 and ids.flags.behaved) else f"aligned ids of int64, got {ids.dtype}"


@unless(_why_not_embedding_backward)
def embedding_backward(grad: np.ndarray, ids: np.ndarray, n_rows: int) -> np.ndarray:
    """A thread takes some columns, so that no two add to one row."""
    table = buffers.zeros((n_rows, grad.shape[1]), np.float32)
    add = load("training_loops").add_to_rows
    threads.parallel(lambda part: add(grad[:, part], ids, table[:, part]), pieces.parts(grad.shape[1], LEAST_COLUMNS))
    return table
