"""Matrix product kernels for CuPy arrays by cuBLASLt, conversion of their operands, and sums."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, gemm, sums
from tricycle_accelerators.providers import decline_when


# Cache: valid for the life of the process: errors are not kept.
@cache
def _narrow_dtype(precision: str) -> np.dtype | None:
    """Return the 16-bit dtype of a precision, None for others; bfloat16 needs ml_dtypes (ImportError)."""
    if precision == "float16":
        return np.dtype(np.float16)
    if precision != "bfloat16":
        return None
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("precision bfloat16 on a GPU needs ml_dtypes (pip install ml_dtypes)") from error
    return np.dtype(ml_dtypes.bfloat16)


def matmul_operand(x: Array, precision: str) -> Array:
    """Return x as float16 or bfloat16 by `precision`; x itself for "float32", "tf32" or if it has 16 bits already."""
    narrow = _narrow_dtype(precision)
    return x if narrow is None or x.dtype.itemsize == 2 else arrays.cast(x, narrow)


def matmul_operand_and_sums(x: Array, precision: str) -> tuple[Array, Array]:
    """Return `matmul_operand(x, precision)` and the sum (C,) of the rows of x (N, C), in at least float32."""
    return matmul_operand(x, precision), kernels.sum_rows(x)


def to_compute_dtype(x: Array, precision: str) -> Array:
    """Return x as float16 or bfloat16 by `precision`; x itself for "float32", "tf32" or if it has 16 bits already."""
    return matmul_operand(x, precision)


def matmul(
    a: Array,
    b: Array,
    bias: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> Array:
    """Return a @ b + bias in `out`, else in `dtype`, else float32 for 16-bit operands, by cuBLASLt (`gemm.matmul`)."""
    return gemm.matmul(a, b, bias, out, dtype, precision)


@decline_when(arrays.array_decline_reason)
def sum_squares(x: Array) -> Array:
    """Sum the squares of all elements to 0-d float32 by a CUDA kernel; NotImplemented for float64 or an empty x."""
    return sums.total_sum(x, arrays.cuda_type(x.dtype), "true")


@decline_when(arrays.array_decline_reason)
def sum_rows(x: Array) -> Array:
    """Sum a matrix (R, C) over its rows to float32 (C,) by a CUDA kernel; NotImplemented for float64 or an empty x."""
    return sums.column_sums(arrays.contiguous(x), arrays.cuda_type(x.dtype))
