"""Products with matrices of few bits, shared by threads."""

from __future__ import annotations

from types import NotImplementedType

import numpy as np

from tricycle.devices import Array
from tricycle.kernels.dispatch import is_narrow
from tricycle.kernels.quantized import FewBits
from tricycle_accelerators import threads


def few_bits_matmul(
    x: Array, matrix: FewBits, bias: Array | None = None, precision: str = "float32"
) -> Array | NotImplementedType:
    """Threads make float32 numbers of some columns each, and multiply with these while they are in the cache."""
    if not matrix.turned or is_narrow(x) or not x.size or not matrix.size:
        return NotImplemented
    product = np.empty((len(x), matrix.shape[1]), x.dtype)

    def work(piece: slice) -> None:
        np.matmul(x, matrix.rows(piece).astype(x.dtype, copy=False).T, out=product[:, piece])

    threads.parallel(work, matrix.pieces())
    if bias is not None:
        product += bias
    return product
