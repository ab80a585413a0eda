"""Matrix products, what they take, and sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import widening

FEW_ROWS = 16  # a product with so few takes the time in which the other matrix comes from memory
WIDENED = 2**20  # numbers of 16 bits that are made 32 at once for a product


@kernel
def operand(x: Array, precision: str) -> Array:
    """x as a matrix product of that precision takes it: itself, or a copy of 16 bits where that is faster."""
    return x


@kernel
def operand_and_sums(x: Array, precision: str) -> tuple[Array, Array]:
    """That of (N, C), and its `sum_rows`: a gradient is multiplied, and summed for the bias."""
    return operand.plain(x, precision), sum_rows.plain(x)


@kernel
def to_compute_dtype(x: Array, precision: str) -> Array:
    """x in the dtype that is computed in at that precision: its own, or one of 16 bits where that is faster."""
    return x


@kernel
def matmul(
    a: Array,
    b: Array,
    bias: Array | None = None,
    out: Array | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> Array:
    """a b + bias for matrices (N, K) and (K, M), either of which may be a transposed view, and a bias (M,).

    Args:
        out: where the result goes, if that is known; (N, M), whatever it holds.
        dtype: of the result; that of the operands unless given, float32 if these have 16 bits. Sums have 32 at least.
        precision: "tf32" may round float32 operands to 11 bits for the product.
    """
    if a.dtype.itemsize == 2 or b.dtype.itemsize == 2:
        product = _widened_product(a.astype(np.float32), b, out)
    else:
        product = array_module(a).matmul(a, b, out=out)
    if bias is not None:
        product += bias
    return product if dtype is None else product.astype(dtype, copy=False)


def _widened_product(a: Array, b: Array, out: Array | None) -> Array:
    """a b in float32, b being of 16 bits or not: widened some columns at a time, which stay in the cache."""
    n_columns = b.shape[1]
    product = array_module(a).empty((len(a), n_columns), np.float32) if out is None else out
    width = max(1, WIDENED // max(1, len(b)))
    for start in range(0, n_columns, width):
        columns = slice(start, start + width)
        product[:, columns] = a @ b[:, columns].astype(np.float32)
    return product


@kernel
@widening(1)
def batched_matmul(a: Array, b: Array) -> Array:
    """Products of (..., N, K) and (..., K, M), whose leading axes are the same, in the dtype of the operands."""
    return array_module(a).matmul(a, b)


@kernel
@widening(0)
def sum_rows(x: Array) -> Array:
    """(N, C) to (C,)."""
    return x.sum(axis=0)


@kernel
@widening(0)
def sum_squares(x: Array) -> Array:
    """The sum of the squares of all elements, a 0-d array."""
    return x.ravel() @ x.ravel()
