"""Products with quantized matrices in NumPy and threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.devices import Array
from tricycle.kernels import FEW_ROWS
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle_accelerators import buffers, chunks, threads
from tricycle_accelerators.matmul_plan import multiplies_bfloat16
from tricycle_accelerators.providers import decline_when


def _quantized_matmul_decline_reason(x: Array, matrix: QuantizedMatrix, *_: Any, **__: Any) -> str | None:
    """Return a reason for few rows with an untransposed matrix, or empty operands; else None."""
    if not matrix.transposed and len(x) <= FEW_ROWS:
        return f"at most {FEW_ROWS} rows, with a matrix that is not transposed"
    return None if x.size and matrix.size else "an empty array"


@decline_when(_quantized_matmul_decline_reason)
def quantized_matmul(x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32") -> Array:
    """Multiply rows by a quantized matrix, plus bias; each thread dequantizes the matrix and multiplies a part.

    Products that may round x use bfloat16 on processors with instructions for it. Threads share the columns of the
    result, or its rows if each dequantized row of the matrix contributes to all columns.
    """
    dtype = np.result_type(x.dtype, np.float32)
    product = buffers.empty((len(x), matrix.shape[1]), dtype)
    may_round = x.dtype.name in ("float32", "bfloat16") and isinstance(matrix, BlockMatrix) and not matrix.exact
    precision = "bfloat16" if may_round and multiplies_bfloat16() else "float32"
    rows = x if x.dtype.name == precision else kernels.matmul_operand(x.astype(dtype, copy=False), precision)

    def dequantize(piece: slice) -> Array:
        return kernels.matmul_operand(matrix.dequantize_rows(piece).astype(dtype, copy=False), precision)

    def multiply_columns(piece: slice) -> None:
        kernels.matmul(rows, dequantize(piece).T, None, product[:, piece], None, precision)

    def multiply_rows(some: slice) -> None:
        product[some] = 0
        for piece in matrix.row_chunks():
            product[some] += kernels.matmul(rows[some, piece], dequantize(piece), None, None, None, precision)

    if matrix.transposed:
        threads.parallel_for(multiply_columns, matrix.row_chunks(threads.n_threads()))
    else:
        threads.parallel_for(multiply_rows, chunks.thread_slices(len(x)))
    if bias is not None:
        product += bias
    return product.astype(x.dtype, copy=False)
