"""bfloat16 matrix products with float32 results by MKL."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle_accelerators import blas, buffers, parallel_matmul
from tricycle_accelerators.matmul_plan import mkl_decline_reason
from tricycle_accelerators.providers import decline_when


def _matmul_decline_reason(
    a: np.ndarray, b: np.ndarray, bias: Any = None, out: Any = None, dtype: Any = None, *_: Any, **__: Any
) -> str | None:
    """Return why MKL cannot run: operands not bfloat16, a small product, `out` or `dtype` not float32; else None."""
    if not a.dtype.name == b.dtype.name == "bfloat16":
        return "operands of bfloat16 alone"
    why = mkl_decline_reason((*a.shape, b.shape[1]))
    if why is not None:
        return why
    if out is not None and (out.dtype != np.float32 or out.strides[1] != 4 or out.strides[0] < 4 * out.shape[1]):
        return "an out of float32 with contiguous rows"
    return None if dtype is None or np.dtype(dtype) == np.float32 else f"results of float32 alone, got {dtype}"


@decline_when(_matmul_decline_reason)
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> np.ndarray:
    """Return bfloat16 a @ b + bias as float32, in `out` if given, by MKL; NotImplemented if small or other dtypes."""
    product = buffers.empty((len(a), b.shape[1]), np.float32) if out is None else out
    parallel_matmul.multiply_in_parallel(
        _multiply, parallel_matmul.with_contiguous_axis(a), parallel_matmul.with_contiguous_axis(b), bias, product
    )
    return product


def _multiply(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, out: np.ndarray) -> None:
    """Write bfloat16 a @ b + bias into float32 `out` in this thread."""
    blas.multiply_bfloat16(a, b, out)
    if bias is not None:
        out += bias
