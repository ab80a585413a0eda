"""Elementwise kernels by Numba, each in one pass over memory: GELU, SwiGLU, RoPE, softmax and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle.kernels import FEW_ROWS
from tricycle.kernels.explanation import UNAVAILABLE
from tricycle.kernels.quantized import quantized_dtype
from tricycle_accelerators import buffers, chunks, threads
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when

MIN_SIZE = 2**13  # numbers below which NumPy takes about 0.1 ms longer, and nothing has to be compiled
FLOAT32 = np.dtype(np.float32)
TOO_SMALL = f"fewer than {MIN_SIZE} elements: NumPy is quick enough"
CONTIGUOUS = "in one piece, aligned and not read-only"


def few_rows_decline_reason(x: np.ndarray) -> str | None:
    """Return why x, of fewer than MIN_SIZE elements, is not 1 to FEW_ROWS rows of float32; None if it is.

    In generation a NumPy call takes longer than its work.
    """
    if not x.ndim or not x.size:
        return "no rows"
    if x.size > FEW_ROWS * x.shape[-1]:
        return f"{TOO_SMALL} with more than {FEW_ROWS} rows"
    return None if x.dtype == FLOAT32 else f"few rows of float32 alone, got {x.dtype}"


def large_array_decline_reason(
    *arrays: np.ndarray, dtypes: tuple[str, ...] = ("float32", "bfloat16"), contiguous: bool = True
) -> str | None:
    """Return why arrays are small (by the first), of mixed dtypes, not of `dtypes` or not `contiguous`, or None."""
    if arrays[0].size < MIN_SIZE:
        return TOO_SMALL
    dtype = arrays[0].dtype
    if ("float32" if dtype == FLOAT32 else str(dtype)) not in dtypes:
        return f"{' or '.join(dtypes)}, got {dtype}"
    for array in arrays:
        if array.dtype != dtype:
            return f"one dtype, got {dtype} and {array.dtype}"
        if contiguous and not array.flags.carray:
            return CONTIGUOUS
    return None


def as_contiguous(array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy of one that is not C-contiguous, aligned and writable, such as half of each row."""
    return array if array.flags.carray else array.copy()


def view_for_loops(array: np.ndarray) -> np.ndarray:
    """Return the array, or a uint16 view of the bits of a bfloat16 array, as the loops take it."""
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def _over_numbers(loop: Any, *arrays: np.ndarray) -> Any:
    """Return a new array: a loop over vectors applied to all numbers of arrays of one shape, in chunks by threads."""
    is_contiguous = all(array.flags.carray for array in arrays)
    rows = [array.reshape(-1, 1 if is_contiguous else array.shape[-1]) for array in arrays]
    result = _over_rows(lambda *parts: loop(*(part.reshape(-1) for part in parts)), rows, rows[0].shape[1])
    return result.reshape(arrays[0].shape)


def _over_rows(loop: Any, arrays: Sequence[np.ndarray], size: int) -> Any:
    """Return a new array (..., size): a loop applied to the rows of arrays (..., C), in chunks by threads."""
    rows = [view_for_loops(array).reshape(-1, array.shape[-1]) for array in arrays]
    result = buffers.empty((len(rows[0]), size), rows[0].dtype)

    def work(part: slice) -> None:
        loop(*(as_contiguous(x[part]) for x in rows), result[part])

    threads.parallel_for(work, chunks.row_chunks(len(result), rows[-1].shape[1]), calls_blas=False)
    return result.reshape(*arrays[0].shape[:-1], size).view(arrays[0].dtype)


def _rows_decline_reason(x: np.ndarray) -> str | None:
    """Return why x is declined: `few_rows_decline_reason` if small, else `large_array_decline_reason`."""
    return few_rows_decline_reason(x) if x.size < MIN_SIZE else large_array_decline_reason(x, contiguous=False)


@decline_when(_rows_decline_reason)
def gelu(x: np.ndarray) -> Any:
    """Return GELU (tanh) of x by Numba; NotImplemented unless x is a few float32 rows or large float32 or bfloat16."""
    return _activate(load_loops("loops").gelu, x)


def _activate(loop: Any, x: np.ndarray) -> Any:
    """Return a new array: a loop applied to all numbers of x, in this thread if x is small, else in threads."""
    if x.size < MIN_SIZE:
        y = np.empty(x.shape, FLOAT32)
        loop(as_contiguous(x).reshape(-1), y.reshape(-1))
        return y
    return _over_numbers(loop, x)


@decline_when(_rows_decline_reason)
def gelu_with_derivative(x: np.ndarray) -> Any:
    """Return (GELU of x, None) by Numba: `gelu_backward` recomputes the slope; NotImplemented where `gelu` is."""
    return _activate(load_loops("loops").gelu, x), None


def _gelu_backward_decline_reason(grad: np.ndarray, x: np.ndarray | None, slope: np.ndarray | None) -> str | None:
    """Return why the loop cannot run: a stored slope, or arrays that are small or do not fit; else None."""
    if slope is not None or x is None:
        return "a slope that was kept"
    return large_array_decline_reason(grad, x, contiguous=False)


@decline_when(_gelu_backward_decline_reason)
def gelu_backward(grad: np.ndarray, x: Any, slope: np.ndarray | None) -> Any:
    """Return `grad` times GELU's derivative at x by Numba loops; NotImplemented with a `slope` or for small arrays."""
    return _over_numbers(load_loops("training_loops").gelu_backward, grad, x)


@decline_when(_rows_decline_reason)
def sigmoid(x: np.ndarray) -> Any:
    """Return the sigmoid of x by Numba; NotImplemented where `gelu` is."""
    return _activate(load_loops("activation_loops").sigmoid, x)


@decline_when(_rows_decline_reason)
def exact_gelu(x: np.ndarray) -> Any:
    """Return the exact GELU of x by Numba; NotImplemented where `gelu` is."""
    return _activate(load_loops("activation_loops").exact_gelu, x)


@decline_when(lambda grad, x: large_array_decline_reason(grad, x, contiguous=False))
def exact_gelu_backward(grad: np.ndarray, x: np.ndarray) -> Any:
    """Return `grad` times the derivative of the exact GELU at x by Numba; NotImplemented for small arrays."""
    return _over_numbers(load_loops("activation_loops").exact_gelu_backward, grad, x)


@decline_when(_rows_decline_reason)
def swiglu(x: np.ndarray) -> Any:
    """Return SwiGLU a * silu(b) of x = [a, b] (..., 2 C) as (..., C), in the dtype of x, by Numba loops."""
    if x.size < MIN_SIZE:
        y = buffers.empty((*x.shape[:-1], x.shape[-1] // 2), FLOAT32)
        load_loops("loops").swiglu(as_contiguous(x).reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))
        return y
    return _over_rows(load_loops("loops").swiglu, [x], x.shape[-1] // 2)


def _softmax_decline_reason(x: np.ndarray, off_by_one: bool = False) -> str | None:
    """Return why x is declined: not of float32, or neither a few rows nor MIN_SIZE elements; None if it is not."""
    if x.size < MIN_SIZE:
        return few_rows_decline_reason(x)
    return large_array_decline_reason(x, dtypes=("float32",), contiguous=False)


@decline_when(_softmax_decline_reason)
def softmax(x: np.ndarray, off_by_one: bool = False) -> Any:
    """Return softmax (softmax1 if `off_by_one`) over the last axis of a few or many float32 rows, by Numba."""
    loop = load_loops("loops").softmax
    if x.size >= MIN_SIZE:
        return _over_rows(lambda rows, y: loop(rows, y, off_by_one), [x], x.shape[-1])
    y = np.empty(x.shape, FLOAT32)
    rows = as_contiguous(x).reshape(-1, x.shape[-1])
    loop(rows, y.reshape(rows.shape), off_by_one)
    return y


@decline_when(lambda grad, y: large_array_decline_reason(grad, y, dtypes=("float32",), contiguous=False))
def softmax_backward(grad: np.ndarray, y: np.ndarray) -> Any:
    """Return the gradient of x from `grad` of y = softmax(x), or softmax1, by Numba; NotImplemented if small."""
    return _over_rows(load_loops("training_loops").softmax_backward, [grad, y], y.shape[-1])


@decline_when(lambda grad, x: large_array_decline_reason(grad, x, contiguous=False))
def swiglu_backward(grad: np.ndarray, x: np.ndarray) -> Any:
    """Return the gradient of x = [a, b] (..., 2 C) from `grad` (..., C) of SwiGLU a * silu(b), by Numba loops."""
    return _over_rows(load_loops("training_loops").swiglu_backward, [grad, x], x.shape[-1])


@decline_when(lambda x: "two axes alone" if x.ndim != 2 else large_array_decline_reason(x))
def sum_rows(x: np.ndarray) -> np.ndarray:
    """Sum a matrix (R, C) over rows to float32 (C,) by Numba in threads; NotImplemented for small or other arrays."""
    rows = view_for_loops(x)

    def work(piece: slice) -> np.ndarray:
        sums = np.zeros(x.shape[1], np.float32)
        load_loops("training_loops").add_rows(rows[piece], sums)
        return sums

    total: np.ndarray = chunks.sum_over_chunks(work, chunks.row_chunks(*x.shape), calls_blas=False)
    return total


def _operand_and_sums_decline_reason(x: np.ndarray, precision: str) -> str | None:
    """Return why x is not a large, contiguous float32 matrix of which bfloat16 are multiplied, or None if it is."""
    if precision != "bfloat16" or "onednn" in UNAVAILABLE:
        return "products of bfloat16 alone, where onednn multiplies any shape of them"
    return "two axes alone" if x.ndim != 2 else large_array_decline_reason(x, dtypes=("float32",))


@decline_when(_operand_and_sums_decline_reason)
def matmul_operand_and_sums(x: np.ndarray, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a float32 matrix (R, C) as bfloat16, and the sum (C,) of its rows, in one pass; or NotImplemented."""
    narrow = buffers.empty(x.shape, quantized_dtype("bfloat16"))
    bits = narrow.view(np.uint16)

    def work(piece: slice) -> np.ndarray:
        sums = np.zeros(x.shape[1], np.float32)
        load_loops("training_loops").narrow_and_add_rows(x[piece], bits[piece], sums)
        return sums

    return narrow, chunks.sum_over_chunks(work, chunks.row_chunks(*x.shape), calls_blas=False)


def _apply_rope_decline_reason(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> str | None:
    """Return why RoPE loops cannot run (several small texts, dtypes, heads not contiguous), or None."""
    if len(x) != 1 or x.dtype != FLOAT32:
        if x.size < MIN_SIZE:
            return TOO_SMALL
        if x.dtype.name not in ("float32", "bfloat16"):
            return f"float32 or bfloat16, got {x.dtype}"
    if x.strides[-1] != x.itemsize or not x.flags.behaved:
        return f"heads {CONTIGUOUS}"
    if not (cos.dtype == FLOAT32 and cos.flags.carray and sin.dtype == FLOAT32 and sin.flags.carray):
        return f"cosines and sines of float32 {CONTIGUOUS}"
    return None


@decline_when(_apply_rope_decline_reason)
def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Apply RoPE to (B, T, H, D): rotate pairs (i, i + D/2) by cos and sin (T, D/2), by Numba; or NotImplemented."""
    y = buffers.empty(x.shape, x.dtype)
    compute = load_loops("loops").rotate
    heads, rotated = view_for_loops(x), view_for_loops(y)
    if len(x) == 1:
        compute(heads[0], cos, sin, rotated[0])
    else:
        threads.parallel_for(lambda i: compute(heads[i], cos, sin, rotated[i]), range(len(x)), calls_blas=False)
    return y


def _sum_squares_decline_reason(x: np.ndarray) -> str | None:
    """Return why the loop cannot run: fewer than CHUNK_SIZE elements, not float32, not contiguous; else None."""
    if x.size < chunks.CHUNK_SIZE:
        return f"fewer than {chunks.CHUNK_SIZE} elements: BLAS is as quick"
    return large_array_decline_reason(x, dtypes=("float32",))


@decline_when(_sum_squares_decline_reason)
def sum_squares(x: np.ndarray) -> np.ndarray:
    """Return the sum of squares of x as a 0-d float32 array by Numba; NotImplemented unless x is large and float32."""
    flat = x.reshape(-1)
    compute = load_loops("training_loops").sum_squares
    return np.asarray(
        chunks.sum_over_chunks(lambda piece: compute(flat[piece]), chunks.row_chunks(flat.size), calls_blas=False),
        np.float32,
    )


# -------------------------------------------------------------------- conversion of 16-bit numbers
def float16_decline_reason(dtype: np.dtype) -> str | None:
    """Return why the loops cannot convert numbers of a dtype: float16, without the instruction; else None."""
    if dtype == np.float16 and not load_loops("vector_loops").HAS_FLOAT16:
        return "a processor that converts float16"
    return None


@decline_when(
    lambda x: large_array_decline_reason(x, dtypes=("float16", "bfloat16")) or float16_decline_reason(x.dtype)
)
def to_float32(x: np.ndarray) -> np.ndarray:
    """Return an array of 16-bit floats in float32 by a Numba loop in this thread."""
    floats = buffers.empty(x.shape, np.float32)
    load_loops("loops").widen(x.view(np.uint16).reshape(-1), x.dtype == np.float16, floats.reshape(-1))
    return floats


def _round_decline_reason(x: np.ndarray, out: np.ndarray) -> str | None:
    """Return why x is not rounded by the loop: not float32, `out` is not bfloat16, small or not contiguous; or None."""
    return large_array_decline_reason(x, dtypes=("float32",)) or large_array_decline_reason(out, dtypes=("bfloat16",))


@decline_when(_round_decline_reason)
def round_float32(x: np.ndarray, out: np.ndarray) -> None:
    """Write float32 numbers into `out` of bfloat16 by a Numba loop in this thread."""
    load_loops("loops").narrow(x.reshape(-1), out.view(np.uint16).reshape(-1))
