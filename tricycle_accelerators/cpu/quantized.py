"""Products with quantized matrices in NumPy and threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.kernels.dispatch import is_16_bit
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle_accelerators import buffers, threads
from tricycle_accelerators.providers import decline_when


def _few_bits_matmul_decline_reason(x: Array, matrix: QuantizedMatrix, *_: Any, **__: Any) -> str | None:
    if not matrix.transposed:
        return "a matrix that is not transposed"
    if is_16_bit(x):
        return "floats of 16 bits"
    return None if x.size and matrix.size else "an empty array"


@decline_when(_few_bits_matmul_decline_reason)
def quantized_matmul(x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32") -> Array:
    """Multiply rows by a quantized matrix, plus bias; each thread dequantizes and multiplies some columns by NumPy."""
    product = buffers.empty((len(x), matrix.shape[1]), x.dtype)

    def work(piece: slice) -> None:
        np.matmul(x, matrix.dequantize_rows(piece).astype(x.dtype, copy=False).T, out=product[:, piece])

    threads.parallel_for(work, matrix.row_chunks())
    if bias is not None:
        product += bias
    return product
