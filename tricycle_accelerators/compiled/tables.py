"""The gradient of an embedding, in one pass over memory."""

from __future__ import annotations

from types import NotImplementedType

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.compiled.elementwise import fits
from tricycle_accelerators.compiled.loaded import training_loops

LEAST_COLUMNS = 64  # of a thread


def embedding_backward(grad: np.ndarray, ids: np.ndarray, n_rows: int) -> np.ndarray | NotImplementedType:
    """A thread takes some columns, so that no two add to one row."""
    if not fits(grad) or not (ids.dtype == np.int64 and ids.flags.behaved):
        return NotImplemented
    table = np.zeros((n_rows, grad.shape[1]), np.float32)
    add = training_loops().add_to_rows
    threads.parallel(lambda part: add(grad[:, part], ids, table[:, part]), pieces.parts(grad.shape[1], LEAST_COLUMNS))
    return table
