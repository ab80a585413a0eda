"""Products with quantized matrices by oneDNN.

The matrix is stored once, in the layout that oneDNN selects. A float32 row is split into a high and a low row of 8 or
16 bits, so that only the weights are rounded. (With one row of 8 bits SmolLM2's perplexity rises by 4%, with two only
by the rounding of the weights.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle_accelerators import buffers, chunks, split_precision, threads
from tricycle_accelerators.onednn import library
from tricycle_accelerators.providers import decline_when

_one_at_a_time = threading.Lock()


def _packed(matrix: QuantizedMatrix) -> library.PackedMatrix:
    """Return the matrix packed in oneDNN's layout, packed by the first call and cached in `matrix.prepared`."""
    with _one_at_a_time:
        if "onednn" not in matrix.prepared:
            factors = None if matrix.scales is None else matrix.scales[:, 0]
            matrix.prepared["onednn"] = library.PackedMatrix(matrix.values.T, factors)
    laid: library.PackedMatrix = matrix.prepared["onednn"]
    return laid


def _quantized_matmul_decline_reason(x: Array, matrix: QuantizedMatrix, *_: Any, **__: Any) -> str | None:
    """Return a reason unless the matrix is transposed int8 or bfloat16, x of at most 32 bits, none empty; else None."""
    if not matrix.transposed:
        return "a matrix that is not transposed"
    if x.dtype.itemsize > 4:
        return f"floats of at most 32 bits, got {x.dtype}"
    if matrix.dtype.name not in ("int8", "bfloat16"):
        return f"a matrix of int8 or bfloat16 alone, got {matrix!r}"
    return None if x.size and matrix.size else "an empty array"


@decline_when(_quantized_matmul_decline_reason)
def quantized_matmul(
    x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32"
) -> Array | NotImplementedType:
    """Return x @ int8 or bfloat16 matrix + bias in x's dtype; NotImplemented if unsuited, or int8 with inf or NaN."""
    laid: library.PackedMatrix = matrix.prepared.get("onednn") or _packed(matrix)
    rows: np.ndarray = x.astype(np.float32, copy=False)
    is_int8 = laid.factors is not None
    product = _multiply_int8(rows, laid) if is_int8 else _multiply_bfloat16(rows, laid, precision != "bfloat16")
    if product is None:
        return NotImplemented
    if bias is not None:
        product += bias
    return product.astype(x.dtype, copy=False)


# -------------------------------------------------------------------- int8
def _multiply_int8(x: np.ndarray, matrix: library.PackedMatrix) -> np.ndarray | None:
    """Return float32 rows @ int8 matrix (R, M), computed from two int8 parts; None if x has infinity or NaN."""
    n_rows = len(x)
    largest = split_precision.row_max_abs(x)
    if largest is None:
        return None
    product = np.empty((n_rows, matrix.shape[1]), np.float32)

    def work(rows: slice) -> None:
        rest, large = parts = np.empty((2, *x[rows].shape), np.int8)
        split_precision.split_int8(x[rows], largest[rows], parts)
        out = product[rows]
        matrix.product(large, out)
        out *= split_precision.HIGH_STEP
        matrix.product(rest, out, add=True)
        out *= largest[rows] * (1 / split_precision.MAX_STEPS)

    _share_rows(work, n_rows)
    return product


# -------------------------------------------------------------------- bfloat16
def _multiply_bfloat16(x: np.ndarray, matrix: library.PackedMatrix, exact: bool) -> np.ndarray:
    """Return float32 rows @ bfloat16 matrix: rows split in two if `exact`, else rounded."""
    n_rows = len(x)
    halves = buffers.empty((2 if exact else 1, *x.shape), library.bfloat16())
    halves[0] = x
    if exact:
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            rest = x - halves[0].astype(np.float32)
        rest[~np.isfinite(rest)] = 0
        halves[1] = rest
    product = buffers.empty((n_rows, matrix.shape[1]), np.float32)

    def work(rows: slice) -> None:
        for i, half in enumerate(halves):
            matrix.product(half[rows], product[rows], add=i > 0)

    _share_rows(work, n_rows)
    return product


# -------------------------------------------------------------------- threads
def _share_rows(work: Callable[[slice], None], n_rows: int) -> None:
    """Call `work` with slices of the rows in threads."""
    threads.parallel_for(work, [slice(part.start, min(part.stop, n_rows)) for part in chunks.thread_slices(n_rows)])
