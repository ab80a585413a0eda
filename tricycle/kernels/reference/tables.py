"""Tables of embeddings."""

from __future__ import annotations

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import widening


@kernel
@widening(0)
def embedding_backward(grad: Array, ids: Array, n_rows: int) -> Array:
    """The gradient of a table whose rows `ids` (N,) gave an output with gradient `grad` (N, C)."""
    xp = array_module(grad)
    table = xp.zeros((n_rows, grad.shape[-1]), grad.dtype)
    xp.add.at(table, ids, grad)
    return table
