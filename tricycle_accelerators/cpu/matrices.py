"""Matrix products by NumPy's BLAS in threads, and sums over rows."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.kernels import batched
from tricycle.kernels.dispatch import is_16_bit, upcasting
from tricycle.kernels.explanation import UNAVAILABLE
from tricycle.kernels.quantized import to_float32
from tricycle_accelerators import blas, buffers, chunks, matmul_plan, parallel_matmul, spin_threads, threads
from tricycle_accelerators.providers import decline_when

UPCAST_SIZE = 2**22  # numbers of 16 bits that are made 32 at once for a product; smaller products take longer in all
MAX_UNCOPIED_WORK = 2**19  # multiplications up to which OpenBLAS (with AVX-512) reads matrices as they lie


def matmul_operand(x: np.ndarray, precision: str) -> np.ndarray:
    """Return x unchanged, and warn once if 16-bit products were requested, because NumPy computes in float32."""
    if precision in ("bfloat16", "float16"):
        _warn_float32(precision)
    return x


def matmul_operand_and_sums(x: np.ndarray, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the matmul operand of x and the sum (C,) of the rows of x (N, C), in at least float32."""
    return kernels.matmul_operand(x, precision), kernels.sum_rows(x)


# Cache: valid for the life of the process: each precision is warned of once.
@cache
def _warn_float32(precision: str) -> None:
    """Warn, once per precision, that products of this 16-bit precision are made in float32, and why."""
    why = UNAVAILABLE.get("onednn") if precision == "bfloat16" else "a CPU's 16 bits are bfloat16"
    warnings.warn(f"precision {precision}: products are made in float32 here: {why}", stacklevel=2)


# -------------------------------------------------------------------- products
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> np.ndarray:
    """Return a @ b + bias, in `out` if given, by BLAS in threads; 16-bit operands give float32 without `dtype`."""
    if len(a) == 1 and out is None and dtype is None and a.dtype == b.dtype == np.float32 and b.flags.f_contiguous:
        row = spin_threads.multiply_vector(a, b)  # most of all calls: nothing else is looked at
        if row is not None:
            if bias is not None:
                row += bias
            return row
    n_rows, n_inner = a.shape
    n_columns = b.shape[1]
    if _is_unshared(n_rows, n_inner, n_columns):
        return kernels.matmul.reference(a, b, bias, out, dtype)
    if is_16_bit(a) or is_16_bit(b):
        return _multiply_upcast(a, b, bias, out, dtype)
    right = "rows" if b.flags.c_contiguous else "columns" if b.flags.f_contiguous else ""
    share = matmul_plan.blas_partition((n_rows, n_inner, n_columns), right, out is not None)
    if share == "nothing" or not threads.blas_libraries() or threads.in_worker():
        with _single_thread_if_large(n_rows, n_inner, n_columns):
            return kernels.matmul.reference(a, b, bias, out, dtype)
    if share == "terms" and n_rows <= matmul_plan.MAX_INNER_SPLIT_ROWS and right == "rows":
        product = _multiply_few_rows(a, b)
    elif share == "terms":
        terms = chunks.thread_slices(n_inner)
        product = chunks.sum_over_chunks(lambda part: blas.multiply(a[:, part], b[part]), terms)
    elif share == "pieces of columns":
        product = _multiply_column_chunks(a, b)
    else:
        product = buffers.empty((n_rows, n_columns), np.result_type(a, b)) if out is None else out
        parallel_matmul.multiply_in_parallel(_multiply, a, b, bias, product)
        bias = None
    if bias is not None:
        product += bias
    return product if dtype is None else product.astype(dtype, copy=False)


def _multiply_upcast(
    a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, out: np.ndarray | None, dtype: Any
) -> np.ndarray:
    """Return 16-bit a @ b + bias (float32, in `out` or in `dtype`), some columns of b upcast to float32 at a time."""
    a = a.astype(np.float32, copy=False)
    product = buffers.empty((len(a), b.shape[1]), np.float32) if out is None else out
    width = max(1, UPCAST_SIZE // max(1, len(b)))
    for i in range(0, b.shape[1], width):
        columns = slice(i, i + width)
        part = b[:, columns] if b.dtype == np.float32 else to_float32(b.T[columns]).T
        kernels.matmul(a, part, None, product[:, columns])
    if bias is not None:
        product += bias
    return product if dtype is None else product.astype(dtype, copy=False)


def _multiply_few_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a @ b (no bias), the inner dimension divided among threads, whose partial products are added up."""
    n_inner = len(b)
    n_parts = min(threads.n_threads(), n_inner)
    sums = np.empty((n_parts, len(a), b.shape[1]), np.result_type(a, b))

    def work(i: int) -> None:
        part = slice(i * n_inner // n_parts, (i + 1) * n_inner // n_parts)
        np.matmul(a[:, part], b[part], out=sums[i])

    threads.parallel_for(work, range(n_parts))
    product: np.ndarray = np.add.reduce(sums) if n_parts > 1 else sums[0]
    return product


def _multiply_column_chunks(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a @ b by threads, in small column chunks of a transposed b, such as a tied embedding table."""
    n_columns = b.shape[1]
    least = matmul_plan.MAX_COLUMN_CHUNK_ROWS
    step = max(least, MAX_UNCOPIED_WORK // max(1, a.size) // least * least)
    product = buffers.empty((len(a), n_columns), np.result_type(a, b))

    def work(part: slice) -> None:
        for start in range(part.start, min(part.stop, n_columns), step):
            columns = slice(start, min(start + step, part.stop))
            np.matmul(a, b[:, columns], out=product[:, columns])

    threads.parallel_for(work, chunks.thread_slices(n_columns))
    return product


def _multiply(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, out: np.ndarray) -> None:
    """Write a @ b + bias into `out` in this thread."""
    blas.multiply(a, b, out)
    if bias is not None:
        out += bias


def _single_thread_if_large(n_rows: int, n_inner: int, n_columns: int) -> AbstractContextManager[None]:
    """Return a context manager that limits BLAS to one thread for products that BLAS would share."""
    return nullcontext() if _is_unshared(n_rows, n_inner, n_columns) else threads.single_blas_thread()


def _is_unshared(n_rows: int, n_inner: int, n_columns: int) -> bool:
    """Return whether a product is so small that BLAS would never divide it among its threads."""
    most = matmul_plan.MIN_SHARED_WORK // 2 if n_rows > 1 < n_columns else chunks.UNSHARED_SIZE
    return n_rows * n_inner * n_columns < most


def _batched_matmul_decline_reason(a: np.ndarray, b: np.ndarray) -> str | None:
    """Return a reason for 16-bit or empty arrays, else None."""
    if is_16_bit(a) or is_16_bit(b):
        return "floats of 16 bits"
    return None if a.size and b.size else "an empty array"


@decline_when(_batched_matmul_decline_reason)
def batched_matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a (..., N, K) @ b (..., K, M), equal batch axes, by BLAS threads; NotImplemented if empty or 16-bit."""
    n_rows, n_inner = a.shape[-2:]
    n_columns = b.shape[-1]
    if a.ndim == 2 and _is_unshared(n_rows, n_inner, n_columns):
        return np.matmul(a, b)
    if a.ndim == 2 and a.dtype == b.dtype and a.dtype in (np.float32, np.float64):
        return kernels.matmul(a, b)
    if a.size * n_columns < 2 * matmul_plan.MIN_SHARED_WORK or threads.in_worker():
        with _single_thread_if_large(n_rows, n_inner, n_columns):
            return batched.batched_matmul.reference(a, b)
    out = buffers.empty((*a.shape[:-1], n_columns), np.result_type(a, b))
    items_a, items_b, items_out = (x.reshape(-1, *x.shape[-2:]) for x in (a, b, out))

    def multiply_items(part: slice) -> None:
        np.matmul(items_a[part], items_b[part], out=items_out[part])

    step = max(1, -(-len(items_out) // (2 * threads.n_threads())))
    threads.parallel_for(multiply_items, [slice(start, start + step) for start in range(0, len(items_out), step)])
    return out


# -------------------------------------------------------------------- sums
@upcasting(0)
def sum_rows(x: np.ndarray) -> np.ndarray:
    """Sum a matrix (R, C) over its rows to (C,), at least float32, by BLAS, chunks of rows divided among threads."""
    if x.size <= chunks.UNSHARED_SIZE:
        few: np.ndarray = chunks.ones_vector(len(x), x) @ x
        return few
    sums: np.ndarray = chunks.sum_over_chunks(
        lambda piece: chunks.ones_vector(len(x[piece]), x) @ x[piece], chunks.row_chunks(*x.shape)
    )
    return sums


@upcasting(0)
def sum_squares(x: np.ndarray) -> np.ndarray:
    """Return the sum of squares of all elements as a 0-d array, by BLAS, chunks added up in a fixed order.

    BLAS alone would add up in another order with another number of threads.
    """
    if x.size < chunks.CHUNK_SIZE:
        with _single_thread_if_large(1, x.size, 1):
            return kernels.sum_squares.reference(x)
    flat = x.reshape(-1)

    def work(piece: slice) -> np.ndarray:
        return np.asarray(np.dot(flat[piece], flat[piece]))  # `@` of two vectors keeps Python's lock

    total: np.ndarray = chunks.sum_over_chunks(work, chunks.row_chunks(flat.size))
    return total
