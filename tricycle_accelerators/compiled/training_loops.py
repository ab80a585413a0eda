"""The loops of training that Numba compiles. Importing this compiles them, or loads what was compiled before.

Shapes: R rows, C channels; N numbers; H heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from tricycle_accelerators.compiled.jit import ONE, ZERO, compiled, exp, narrowed, widened
from tricycle_accelerators.compiled.loops import gated_swish as gated_swish

LINEAR = np.float32(2 * math.sqrt(2 / math.pi))
CUBIC = np.float32(LINEAR * 0.044715)


# -------------------------------------------------------------------- activations
@numba.njit(inline="always")
def _gelu(x: np.float32) -> np.float32:
    """By tanh: (1 + tanh(u / 2)) / 2 is 1 / (1 + e^-u)."""
    return x / (ONE + exp(-x * (LINEAR + CUBIC * x * x)))


@numba.njit(inline="always")
def _gelu_slope(x: np.float32) -> np.float32:
    square = x * x
    gate = ONE / (ONE + exp(-x * (LINEAR + CUBIC * square)))
    return gate * (ONE + (ONE - gate) * x * (LINEAR + np.float32(3) * CUBIC * square))


@compiled("void(f4[::1], f4[::1])")
def gelu(x: np.ndarray, y: np.ndarray) -> None:
    for i in range(len(x)):
        y[i] = _gelu(x[i])


@compiled("void(f4[::1], f4[::1], f4[::1])")
def gelu_backward(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    for i in range(len(x)):
        dx[i] = dy[i] * _gelu_slope(x[i])


@compiled("void(u2[::1], u2[::1])")
def gelu_16(x: np.ndarray, y: np.ndarray) -> None:
    """The same with the bits of bfloat16."""
    for i in range(len(x)):
        y[i] = narrowed(_gelu(widened(x[i])))


@compiled("void(u2[::1], u2[::1], u2[::1])")
def gelu_backward_16(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    for i in range(len(x)):
        dx[i] = narrowed(widened(dy[i]) * _gelu_slope(widened(x[i])))


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def gated_swish_backward(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """(R, C) and (R, 2 C) to (R, 2 C)."""
    n_rows, size = dy.shape
    for i in range(n_rows):
        for j in range(size):
            gate = ONE / (ONE + exp(-x[i, size + j]))
            value = x[i, size + j]
            slope = dy[i, j] * gate
            dx[i, j] = slope * value
            dx[i, size + j] = slope * x[i, j] * (ONE + value * (ONE - gate))


@compiled("void(u2[:, ::1], u2[:, ::1])")
def gated_swish_16(x: np.ndarray, y: np.ndarray) -> None:
    """(R, 2 C) to (R, C), with the bits of bfloat16."""
    n_rows, size = y.shape
    for i in range(n_rows):
        for j in range(size):
            value = widened(x[i, size + j])
            y[i, j] = narrowed(widened(x[i, j]) * value / (ONE + exp(-value)))


@compiled("void(u2[:, ::1], u2[:, ::1], u2[:, ::1])")
def gated_swish_backward_16(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    n_rows, size = dy.shape
    for i in range(n_rows):
        for j in range(size):
            value = widened(x[i, size + j])
            gate = ONE / (ONE + exp(-value))
            slope = widened(dy[i, j]) * gate
            dx[i, j] = narrowed(slope * value)
            dx[i, size + j] = narrowed(slope * widened(x[i, j]) * (ONE + value * (ONE - gate)))


@compiled("void(u2[:, ::1], f4[::1])")
def add_rows_16(x: np.ndarray, sums: np.ndarray) -> None:
    """(R, C) of the bits of bfloat16, added to (C,)."""
    for i in range(len(x)):
        row = x[i]
        for j in range(len(sums)):
            sums[j] += widened(row[j])


@compiled("void(f4[:, :, :], f4[:, ::1], f4[:, ::1], f4[:, :, ::1])")
def turned(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray, y: np.ndarray) -> None:
    """(R, H, D); cos and sin (R, D / 2)."""
    n_rows, n_heads, size = heads.shape
    half = size // 2
    for i in range(n_rows):
        for h in range(n_heads):
            for j in range(half):
                first, second = heads[i, h, j], heads[i, h, half + j]
                y[i, h, j] = first * cos[i, j] - second * sin[i, j]
                y[i, h, half + j] = second * cos[i, j] + first * sin[i, j]


# -------------------------------------------------------------------- norms
@compiled("void(f4[:, ::1], f4[::1], f4[::1], f8, f4[:, ::1], f4[::1], f4[::1])")
def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float, y: np.ndarray, means: np.ndarray, scales: np.ndarray
) -> None:
    """What rows were diminished and then multiplied by goes into `means` and `scales`."""
    n_rows, size = x.shape
    for i in range(n_rows):
        total = ZERO
        for j in range(size):
            total += x[i, j]
        mean = np.float32(total / size)
        total = ZERO
        for j in range(size):
            total += (x[i, j] - mean) * (x[i, j] - mean)
        scale = np.float32(1 / math.sqrt(total / size + eps))
        for j in range(size):
            y[i, j] = (x[i, j] - mean) * scale * gain[j] + bias[j]
        means[i] = mean
        scales[i] = scale


@compiled("void(f4[:, ::1], f4[:, ::1], f4[::1], f4[::1], f4[::1], f4[:, ::1], f4[:, ::1])")
def layer_norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gain: np.ndarray,
    means: np.ndarray,
    scales: np.ndarray,
    dx: np.ndarray,
    sums: np.ndarray,
) -> None:
    """
    Args:
        sums: (2, C), to which the gradients of gain and bias are added.
    """
    n_rows, size = x.shape
    for i in range(n_rows):
        mean, scale = means[i], scales[i]
        total, inner = ZERO, ZERO
        for j in range(size):
            slope = dy[i, j] * gain[j]
            total += slope
            inner += slope * (x[i, j] - mean)
        level = total / np.float32(size)
        share = inner * scale * scale / np.float32(size)
        for j in range(size):
            centred = x[i, j] - mean
            sums[0, j] += dy[i, j] * centred * scale
            sums[1, j] += dy[i, j]
            dx[i, j] = (dy[i, j] * gain[j] - level - centred * share) * scale


@compiled("void(f4[:, ::1], f4[:, ::1], f4[::1], f4[::1], f4[:, ::1], f4[:, ::1])")
def rms_norm_backward(
    dy: np.ndarray, x: np.ndarray, gain: np.ndarray, scales: np.ndarray, dx: np.ndarray, sums: np.ndarray
) -> None:
    """
    Args:
        sums: (2, C), to which the gradients of gain and of a bias are added.
    """
    n_rows, size = x.shape
    for i in range(n_rows):
        scale = scales[i]
        inner = ZERO
        for j in range(size):
            inner += dy[i, j] * gain[j] * x[i, j]
        share = inner * scale * scale / np.float32(size)
        for j in range(size):
            sums[0, j] += dy[i, j] * x[i, j] * scale
            sums[1, j] += dy[i, j]
            dx[i, j] = (dy[i, j] * gain[j] - x[i, j] * share) * scale


# -------------------------------------------------------------------- optimisers
@compiled("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1])")
def adamw(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, numbers: np.ndarray) -> None:
    """In place on weights and both moments, each of which is read and written once.

    Args:
        numbers: what the gradient is multiplied by; beta1, 1 - beta1, beta2, 1 - beta2, eps, the rate, what is kept.
    """
    share, beta1, rest1, beta2, rest2, eps, rate, kept = numbers
    for i in range(len(w)):
        slope = share * g[i]
        m[i] = beta1 * m[i] + rest1 * slope
        v[i] = beta2 * v[i] + rest2 * (slope * slope)
        w[i] = kept * w[i] - rate * m[i] / (np.sqrt(v[i]) + eps)
