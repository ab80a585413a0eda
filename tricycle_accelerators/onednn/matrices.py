"""Matrix product kernels by oneDNN: bfloat16 operands, and a few rows of float32."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np

from tricycle_accelerators import blas, buffers, chunks, matmul_plan, parallel_matmul, spin_threads, threads
from tricycle_accelerators.onednn import library
from tricycle_accelerators.providers import decline_when

UPCAST_TERMS = 2048  # of a product's sums, that are made float32 at a time


def _operand_decline_reason(x: np.ndarray, precision: str) -> str | None:
    """Return why oneDNN cannot multiply at a precision ("float16" only), or None; x is not examined."""
    return "precision float16: a CPU's 16 bits are bfloat16" if precision == "float16" else None


@decline_when(_operand_decline_reason)
def matmul_operand(x: np.ndarray, precision: str) -> np.ndarray:
    """Return float32 x as bfloat16 in its layout if `precision` is that, else x itself; NotImplemented for float16."""
    if precision != "bfloat16" or x.dtype != np.float32:
        return x
    if x.ndim == 2 and x.flags.f_contiguous and not x.flags.c_contiguous:  # a transposed matrix stays one
        return matmul_operand(x.T, precision).T
    x = np.ascontiguousarray(x)
    out = buffers.empty(x.shape, library.bfloat16())
    flat = x.reshape(-1)
    flat_out = out.reshape(-1)
    threads.parallel_for(lambda piece: library.convert(flat[piece], flat_out[piece]), chunks.row_chunks(x.size))
    return out


def rounding_decline_reason(x: np.ndarray, precision: str = "float32") -> str | None:
    """Return why x is not converted to bfloat16 (another precision, not float32, or empty); None if it is."""
    if precision != "bfloat16":
        return "a precision other than bfloat16"
    if x.dtype != np.float32:
        return f"float32 alone, got {x.dtype}"
    return None if x.size else "an empty array"


def _operand_and_sums_decline_reason(x: np.ndarray, precision: str) -> str | None:
    """Return why x is not a contiguous float32 matrix, not empty, to be rounded to bfloat16; None if it is."""
    in_one_piece = x.ndim == 2 and x.flags.c_contiguous
    return rounding_decline_reason(x, precision) or (None if in_one_piece else "a matrix in one piece")


@decline_when(_operand_and_sums_decline_reason)
def matmul_operand_and_sums(x: np.ndarray, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 x (N, C) as bfloat16, and its column sums; NotImplemented for other x or another `precision`."""
    out = buffers.empty(x.shape, library.bfloat16())

    def work(piece: slice) -> np.ndarray:
        library.convert(x[piece], out[piece])
        return chunks.ones_vector(len(x[piece]), x) @ x[piece]

    return out, chunks.sum_over_chunks(work, chunks.row_chunks(*x.shape))


def _matmul_decline_reason(
    a: np.ndarray, b: np.ndarray, bias: Any = None, out: Any = None, dtype: Any = None, *_: Any, **__: Any
) -> str | None:
    """Return why oneDNN cannot run: neither bfloat16 operands nor a few contiguous float32 rows; else None."""
    if a.dtype != np.float32:
        if not a.dtype == b.dtype == library.bfloat16():
            return "operands other than float32 or bfloat16"
        return None if out is None or out.dtype == np.float32 else f"an out of float32 alone, got {out.dtype}"
    right = "rows" if b.flags.c_contiguous else "columns"
    why = matmul_plan.few_rows_decline_reason((*a.shape, b.shape[1]), right)
    if why is not None:
        return why
    if b.dtype != np.float32:
        return f"operands of one dtype, got float32 and {b.dtype}"
    if out is not None or dtype is not None:
        return "an out or a dtype for a product of float32"
    return None if a.flags.c_contiguous else "rows in one piece"


@decline_when(_matmul_decline_reason)
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> np.ndarray:
    """Return a @ b + bias of bfloat16 (result float32 unless `dtype`), or of few float32 rows; else NotImplemented."""
    if a.dtype == np.float32:
        return _few_rows(a, b, bias)
    n_rows = len(a)
    n_columns = b.shape[1]
    fits = out is not None and out.strides[1] == out.itemsize and parallel_matmul.has_contiguous_axis(out)
    narrow = out is None and dtype == library.bfloat16()
    result: Any = out if fits else buffers.empty((n_rows, n_columns), library.bfloat16() if narrow else np.float32)
    if not a.size or not b.size:
        result[...] = 0 if bias is None else bias
    else:
        a, b = parallel_matmul.with_contiguous_axis(a), parallel_matmul.with_contiguous_axis(b)
        shifts = None if bias is None else np.ascontiguousarray(bias, np.float32)
        if matmul_plan.upcasts_bfloat16(matmul_plan.this_machine()):
            _multiply_upcast(a, b, shifts, result)
        else:
            parallel_matmul.multiply_in_parallel(_multiply, a, b, shifts, result)
    if out is not None and not fits:
        out[...] = result
        return out
    return result if dtype is None else result.astype(dtype, copy=False)


def _few_rows(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Return a @ b + bias for a few float32 rows, by oneDNN, which does not copy b first as OpenBLAS does."""
    result = np.empty((len(a), b.shape[1]), np.float32)
    # some columns for each thread would give other bits, and so a result that depends on what else the machine does
    multiply = library.matmul_openmp if spin_threads.spin_policy else library.matmul
    multiply(a, b, result)
    if bias is not None:
        result += bias
    return result


def _multiply(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, result: np.ndarray) -> None:
    """Write bfloat16 a @ b + bias into `result` in this thread."""
    library.matmul(a, b, result, None if bias is None else bias[None])


def _multiply_upcast(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, result: np.ndarray) -> None:
    """Write bfloat16 a @ b + bias into `result`, computed in float32; each thread upcasts its part."""

    def multiply(a: np.ndarray, b: np.ndarray, bias: np.ndarray | None, out: np.ndarray) -> None:
        _write(blas.multiply(_to_float32(a), _to_float32(b)), bias, out)

    def some_terms(part: slice) -> np.ndarray:
        cuts = [*range(part.start, min(part.stop, n_inner), UPCAST_TERMS), min(part.stop, n_inner)]
        parts = (blas.multiply(_to_float32(a[:, i:j]), _to_float32(b[i:j])) for i, j in pairwise(cuts))
        return reduce(lambda total, product: np.add(total, product, out=total), parts)

    n_inner = len(b)
    share = matmul_plan.inner_or_longer_axis((*a.shape, b.shape[1]))
    if share == "terms":
        _write(chunks.sum_over_chunks(some_terms, chunks.thread_slices(n_inner)), bias, result)
    elif share == "rows":
        parallel_matmul.multiply_by_rows(multiply, a, _to_float32(b), bias, result)
    else:
        parallel_matmul.multiply_by_columns(multiply, _to_float32(a), b, bias, result)


def _write(product: np.ndarray, bias: np.ndarray | None, result: np.ndarray) -> None:
    """Add a bias to `product` in place, if given, and write `product` into `result`, converted to its dtype."""
    if bias is not None:
        product += bias
    library.convert(product, result)


def _to_float32(x: np.ndarray) -> np.ndarray:
    """Return a bfloat16 matrix as float32 in the same layout; a float32 matrix itself."""
    if x.dtype == np.float32:
        return x
    if x.strides[0] == x.itemsize and x.strides[1] != x.itemsize:
        return _to_float32(x.T).T
    out = buffers.empty(x.shape, np.float32)
    library.convert(x, out)
    return out
