"""Elementwise kernels in NumPy and threads, in chunks that stay in a core's cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.kernels import SQRT_2_OVER_PI
from tricycle.kernels.dispatch import upcast, upcasting
from tricycle_accelerators import buffers, chunks, threads


@upcasting(1)
def gelu(x: np.ndarray) -> np.ndarray:
    """Return GELU (tanh approximation) of x in its dtype by NumPy, chunks divided among threads."""
    return _gelu(x, None)


@upcasting(2)
def gelu_with_derivative(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return GELU of x and its derivative, both in the dtype of x, by NumPy, chunks divided among threads."""
    slope = buffers.empty(x.shape, x.dtype)
    return _gelu(x, slope), slope


def gelu_backward(grad: np.ndarray, x: np.ndarray | None, slope: np.ndarray | None) -> Any:
    """Return `grad` times `slope`, the derivative of GELU, which is computed from x if it is None."""
    if slope is None and x is not None:
        _, slope = gelu_with_derivative(x)
    return kernels.multiply(grad, slope)


def _gelu(x: np.ndarray, slope: np.ndarray | None) -> np.ndarray:
    """Return GELU of x by all threads; write its derivative to `slope`, a contiguous array, unless it is None."""
    flat = np.ascontiguousarray(x).reshape(-1)
    y = buffers.empty(flat.shape, flat.dtype)
    slopes = None if slope is None else slope.reshape(-1)

    def work(piece: slice) -> None:
        a, out = flat[piece], y[piece]
        square = a * a
        gate = square * (0.044715 * SQRT_2_OVER_PI)
        gate += SQRT_2_OVER_PI
        gate *= a
        np.tanh(gate, out=gate)
        gate *= 0.5
        gate += 0.5
        np.multiply(a, gate, out=out)
        if slopes is not None:  # gate (1 + (1 - gate) u'), where tanh(u / 2) gave the gate
            square *= 6 * 0.044715 * SQRT_2_OVER_PI
            square += 2 * SQRT_2_OVER_PI
            square *= a
            rest = np.subtract(1, gate, out=slopes[piece])
            rest *= square
            rest += 1
            rest *= gate

    threads.parallel_for(work, chunks.row_chunks(flat.size))
    return y.reshape(x.shape)


def relu_squared(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return relu(x) ** 2 and its derivative 2 relu(x) by NumPy, chunks divided among threads."""
    flat = np.ascontiguousarray(x).reshape(-1)
    y = buffers.empty(flat.shape, flat.dtype)
    slope = buffers.empty(flat.shape, flat.dtype)

    def work(piece: slice) -> None:
        positive = np.maximum(flat[piece], 0, out=slope[piece])
        np.multiply(positive, positive, out=y[piece])
        positive *= 2

    threads.parallel_for(work, chunks.row_chunks(flat.size))
    return y.reshape(x.shape), slope.reshape(x.shape)


@upcasting(1)
def swiglu(x: np.ndarray) -> np.ndarray:
    """Compute SwiGLU a * silu(b) of [a, b] (..., 2 C) to (..., C) with NumPy, chunks of rows divided among threads."""
    half = x.shape[-1] // 2
    rows = _rows(x)
    y = buffers.empty((len(rows), half), x.dtype)

    def work(piece: slice) -> None:
        b = rows[piece, half:]
        out = _sigmoid(b, y[piece])
        out *= b
        out *= rows[piece, :half]

    threads.parallel_for(work, chunks.row_chunks(*y.shape))
    return y.reshape(*x.shape[:-1], half)


@upcasting(1)
def swiglu_backward(grad: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the gradient of SwiGLU a * silu(b) at x = [a, b] (..., 2 C) by NumPy, chunks of rows in threads."""
    half = x.shape[-1] // 2
    rows, slopes = _rows(upcast(x)), _rows(grad)
    dx = buffers.empty(rows.shape, grad.dtype)

    def work(piece: slice) -> None:
        a, b, dy = rows[piece, :half], rows[piece, half:], slopes[piece]
        to_a, to_b = dx[piece, :half], dx[piece, half:]
        gate = _sigmoid(b, np.empty(b.shape, b.dtype))
        np.multiply(b, gate, out=to_a)
        to_a *= dy
        np.multiply(dy, a, out=to_b)
        to_b *= gate
        np.subtract(1, gate, out=gate)
        gate *= b
        gate += 1
        to_b *= gate

    threads.parallel_for(work, chunks.row_chunks(*slopes.shape))
    return dx.reshape(x.shape)


def _rows(x: np.ndarray) -> np.ndarray:
    """Return x (..., C) as contiguous rows (N, C), copied if x is not contiguous."""
    return np.ascontiguousarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _sigmoid(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write 1 / (1 + exp(-x)) into `out` and return it: 0 where exp(-x) overflows."""
    np.negative(x, out=out)
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += 1
    return np.divide(1, out, out=out)


def empty(like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an uninitialized array of the dtype of `like`: from 1 MiB on in memory of deleted arrays if possible."""
    return buffers.empty(shape, like.dtype)


@upcasting(1)
def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Apply RoPE to (B, T, H, D): rotate pairs (i, i + D/2) by cos and sin (T, D/2), with NumPy, items in threads."""
    half = x.shape[-1] // 2
    y = buffers.empty(x.shape, x.dtype)
    cos, sin = cos[:, None, :], sin[:, None, :]

    def work(i: int) -> None:
        first, second = x[i, ..., :half], x[i, ..., half:]
        np.multiply(first, cos, out=y[i, ..., :half])
        np.multiply(second, cos, out=y[i, ..., half:])
        y[i, ..., :half] -= second * sin
        y[i, ..., half:] += first * sin

    threads.parallel_for(work, range(len(x)))
    return y
