"""Kernels for NumPy arrays that oneDNN makes faster: the same names and results as in `cpu.py`.

Each gives NotImplemented for what it leaves to NumPy. Products take bfloat16 operands; all else, and every result, is
float32. The threads are ours: each calls oneDNN for its piece of the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.backend import parallel
from tricycle.kernels.reference import POLAR
from tricycle_accelerators import onednn
from tricycle_accelerators.cpu import _ones, _parts, _pieces, _sum_over
from tricycle_accelerators.onednn_attention import attention, attention_backward

__all__ = [
    "operand", "operand_and_sums", "matmul", "gelu", "gelu_with_slope", "gelu_backward", "layer_norm",
    "layer_norm_backward", "attention", "attention_backward", "orthogonalise",
]

SAFETY = 1.01


def _is_float32(*arrays: np.ndarray | None) -> bool:
    return all(array is None or (array.dtype == np.float32 and array.size) for array in arrays)


# -------------------------------------------------------------------- matrices
def operand(x: np.ndarray, precision: str) -> Any:
    """A bfloat16 copy with the layout of x."""
    if precision != "bfloat16" or x.dtype != np.float32:
        return NotImplemented if precision == "float16" else x
    if x.ndim == 2 and x.flags.f_contiguous:  # a transposed matrix stays one
        return operand(x.T, precision).T if not x.flags.c_contiguous else _converted(x)
    return _converted(np.ascontiguousarray(x))


def _converted(x: np.ndarray) -> np.ndarray:
    out = np.empty(x.shape, onednn.bfloat16())
    flat, flat_out = x.reshape(-1), out.reshape(-1)
    parallel(lambda piece: onednn.convert(flat[piece], flat_out[piece]), _pieces(x.size))
    return out


def operand_and_sums(x: np.ndarray, precision: str) -> Any:
    """The sums are made of pieces that the conversion has just brought near."""
    if precision != "bfloat16" or not _is_float32(x) or x.ndim != 2 or not x.flags.c_contiguous:
        return NotImplemented
    out = np.empty(x.shape, onednn.bfloat16())

    def work(piece: slice) -> np.ndarray:
        onednn.convert(x[piece], out[piece])
        return _ones(len(x[piece]), x) @ x[piece]

    return out, _sum_over(work, _pieces(*x.shape))


def matmul(
    a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None, out: np.ndarray | None = None, dtype: Any = None,
    precision: str = "float32",
) -> Any:
    """Threads take some rows or some columns of the result each."""
    if not a.dtype == b.dtype == onednn.bfloat16() or (out is not None and out.dtype != np.float32):
        return NotImplemented
    n_rows, n_columns = len(a), b.shape[1]
    fits = out is not None and out.strides[1] == out.itemsize
    result: Any = out if fits else np.empty((n_rows, n_columns), np.float32)
    if not a.size or not b.size:
        result[...] = 0 if bias is None else bias
    else:
        a, b, bias = _regular(a), _regular(b), None if bias is None else np.ascontiguousarray(bias, np.float32)[None]
        by_rows = n_rows >= n_columns

        def work(part: slice) -> None:
            if by_rows:
                onednn.product(a[part], b, result[part], bias)
            else:
                onednn.product(a, b[:, part], result[:, part], None if bias is None else bias[:, part])

        parallel(work, _parts(n_rows if by_rows else n_columns, 512))
    if out is not None and not fits:
        out[...] = result
        return out
    return result if dtype is None else result.astype(dtype, copy=False)


def _regular(matrix: np.ndarray) -> np.ndarray:
    """The matrix, copied unless its rows or its columns lie in one piece each and do not overlap."""
    size, (n_rows, n_columns), (down, across) = matrix.itemsize, matrix.shape, matrix.strides
    if (across == size and down >= n_columns * size) or (down == size and across >= n_rows * size):
        return matrix
    return np.array(matrix, order="C")


def orthogonalise(x: np.ndarray, precision: str = "float32") -> Any:
    """A matrix for each thread at a time. What the iteration multiplies has 16 bits, its sums have 32.

    Rounding takes singular values a little above 1, from where the iteration would take them far away: so its weights
    are those of values that may be larger by SAFETY (Amsel et al. 2025, on finite precision).
    """
    if precision != "bfloat16" or not _is_float32(x):
        return NotImplemented
    if x.shape[1] > x.shape[2]:
        return orthogonalise(x.swapaxes(1, 2), precision).swapaxes(1, 2)
    found, (_, n_rows, _) = np.empty(x.shape, np.float32), x.shape

    def work(i: int) -> None:
        matrix, square = np.ascontiguousarray(x[i]), np.empty((n_rows, n_rows), np.float32)
        rounded, factors = np.empty(x.shape[1:], onednn.bfloat16()), np.empty((2, n_rows, n_rows), onednn.bfloat16())
        onednn.convert(matrix * (1 / (1.01 * np.linalg.norm(matrix) + 1e-7)), rounded)
        diagonal = square.reshape(-1)[:: n_rows + 1]
        for step, weights in enumerate(POLAR):  # a + b s + c s^2 as a + s (b + c s), where s = x x^T
            a, b, c = (weight / SAFETY ** (2 * i + 1) for i, weight in enumerate(weights))
            onednn.product(rounded, rounded.T, square)
            onednn.convert(square, factors[0])
            square *= c
            diagonal += b
            onednn.convert(square, factors[1])
            onednn.product(factors[0], factors[1], square)
            diagonal += a
            onednn.convert(square, factors[0])
            result = found[i] if step == len(POLAR) - 1 else np.empty_like(rounded)
            onednn.product(factors[0], rounded, result)
            rounded = result

    parallel(work, range(len(x)))
    return found


# -------------------------------------------------------------------- elementwise
def gelu(x: np.ndarray) -> Any:
    if not _is_float32(x):
        return NotImplemented
    flat, y = np.ascontiguousarray(x).reshape(-1), np.empty(x.size, x.dtype)
    parallel(lambda piece: onednn.gelu(flat[piece], y[piece]), _pieces(x.size))
    return y.reshape(x.shape)


def gelu_with_slope(x: np.ndarray) -> Any:
    y = gelu(x)
    return y if y is NotImplemented else (y, None)


def gelu_backward(grad: np.ndarray, x: np.ndarray | None, slope: np.ndarray | None) -> Any:
    if slope is not None or x is None or not _is_float32(grad, x):
        return NotImplemented
    flat_grad, flat = (np.ascontiguousarray(array).reshape(-1) for array in (grad, x))
    dx = np.empty(x.size, x.dtype)
    parallel(lambda piece: onednn.gelu_backward(flat_grad[piece], flat[piece], dx[piece]), _pieces(x.size))
    return dx.reshape(x.shape)


# -------------------------------------------------------------------- normalisation
def _rows(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def layer_norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centred: bool) -> Any:
    if not centred or not _is_float32(x, gain, bias):
        return NotImplemented
    rows, gain, bias = _rows(x), np.ascontiguousarray(gain), None if bias is None else np.ascontiguousarray(bias)
    y, mean, scale = np.empty_like(rows), np.empty(len(rows), x.dtype), np.empty(len(rows), x.dtype)

    def work(piece: slice) -> None:
        onednn.layer_norm(rows[piece], gain, bias, eps, y[piece], mean[piece], scale[piece])
        spread = scale[piece]  # the variance until here
        spread += eps
        np.sqrt(spread, out=spread)
        np.divide(1, spread, out=spread)

    parallel(work, _pieces(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), mean.reshape(statistics), scale.reshape(statistics)


def layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, centred: bool
) -> Any:
    if not centred or not _is_float32(grad, x, gain, mean, scale):
        return NotImplemented
    rows, row_grads, gain = _rows(x), _rows(grad), np.ascontiguousarray(gain)
    means, variance = np.ascontiguousarray(mean).reshape(-1), np.ascontiguousarray(scale).reshape(-1) ** -2
    dx = np.empty_like(rows)

    def work(piece: slice) -> np.ndarray:
        sums = np.empty((2, x.shape[-1]), x.dtype)
        onednn.layer_norm_backward(
            row_grads[piece], rows[piece], gain, means[piece], variance[piece], dx[piece], sums[0], sums[1]
        )
        return sums

    dgain, dbias = _sum_over(work, _pieces(*rows.shape))
    return dx.reshape(x.shape), dgain, dbias
