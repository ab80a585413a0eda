"""Numba loops for training. The import compiles the loops or loads cached machine code.

Shapes: R rows, C channels; N numbers; H heads, D head size. Where a loop is compiled for uint16, these are the bits of
bfloat16.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from tricycle_accelerators.compiled.jit import (
    ONE,
    ZERO,
    compile_loop,
    contiguous_row,
    convert_for,
    exp_underflowing_to_zero,
    maximum,
    multiply_by_sigmoid,
    to_float32,
)
from tricycle_accelerators.compiled.loops import CUBIC, LINEAR


# -------------------------------------------------------------------- activations
@numba.njit(inline="always")
def _gelu_slope(x: np.float32) -> np.float32:
    """Return the derivative of the tanh approximation of GELU at x."""
    square = x * x
    gate = multiply_by_sigmoid(ONE, x * (LINEAR + CUBIC * square))
    return gate * (ONE + (ONE - gate) * x * (LINEAR + np.float32(3) * CUBIC * square))


@compile_loop(["void(f4[::1], f4[::1], f4[::1])", "void(u2[::1], u2[::1], u2[::1])"])
def gelu_backward(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """Write `dy` times the derivative of GELU at x into `dx`; vectors of float32 or of bfloat16 bits (uint16)."""
    for i in range(len(x)):
        dx[i] = convert_for(dx, to_float32(dy[i]) * _gelu_slope(to_float32(x[i])))


@compile_loop(["void(f4[:, ::1], f4[:, ::1], f4[:, ::1])", "void(u2[:, ::1], u2[:, ::1], u2[:, ::1])"])
def swiglu_backward(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """Write the gradient of SwiGLU a * silu(b), x = [a, b] (R, 2 C), into `dx` (R, 2 C), from dy (R, C)."""
    n_rows, size = dy.shape
    for i in range(n_rows):
        for j in range(size):
            value = to_float32(x[i, size + j])
            gate = multiply_by_sigmoid(ONE, value)
            slope = to_float32(dy[i, j])
            dx[i, j] = convert_for(dx, slope * (value * gate))
            dx[i, size + j] = convert_for(dx, slope * to_float32(x[i, j]) * gate * (ONE + value * (ONE - gate)))


@compile_loop(["void(f4[:, ::1], f4[::1])", "void(u2[:, ::1], f4[::1])"])
def add_rows(x: np.ndarray, sums: np.ndarray) -> None:
    """Add the sum of the rows of x (R, C), float32 or bfloat16 bits (uint16), to float32 `sums` (C,) in place."""
    in_fours = len(x) // 4 * 4  # so that `sums` is read and written once for four rows
    for i in range(0, in_fours, 4):
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        for j in range(len(sums)):
            sums[j] += (to_float32(a[j]) + to_float32(b[j])) + (to_float32(c[j]) + to_float32(d[j]))
    for i in range(in_fours, len(x)):
        row = x[i]
        for j in range(len(sums)):
            sums[j] += to_float32(row[j])


@compile_loop("void(f4[:, ::1], u2[:, ::1], f4[::1])")
def narrow_and_add_rows(x: np.ndarray, bits: np.ndarray, sums: np.ndarray) -> None:
    """Write float32 rows x (R, C) as bits of bfloat16, and add their sum to `sums` (C,) in place."""
    for i in range(len(x)):
        row, new = contiguous_row(x, i), contiguous_row(bits, i)
        for j in range(len(row)):
            new[j] = convert_for(new, row[j])
        for j in range(len(row)):
            sums[j] += row[j]


# -------------------------------------------------------------------- tables
@compile_loop("void(f4[:, :], i8[:], f4[:, :])")
def scatter_add_rows(grad: np.ndarray, ids: np.ndarray, table: np.ndarray) -> None:
    """Add each row (R, C), in order, to the row of a table (N, C) that its id (R,) selects."""
    for i in range(len(ids)):
        row, total = contiguous_row(grad, i), contiguous_row(table, ids[i])
        for j in range(len(row)):
            total[j] += row[j]


# -------------------------------------------------------------------- norms
@compile_loop(
    [f"void({dy}[:, ::1], f4[:, ::1], f4[::1], f4[::1], f4[::1], f4[:, ::1], f4[:, ::1])" for dy in ("f4", "u2")]
)
def layer_norm_backward(
    dy: np.ndarray,
    x: np.ndarray,
    gain: np.ndarray,
    means: np.ndarray,
    scales: np.ndarray,
    dx: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Write the gradient of layer norm into `dx`, and add the gradients of gain and bias to `sums` (2, C)."""
    n_rows, size = x.shape
    for i in range(n_rows):
        mean, scale = means[i], scales[i]
        total, inner = ZERO, ZERO
        for j in range(size):
            slope = to_float32(dy[i, j]) * gain[j]
            total += slope
            inner += slope * (x[i, j] - mean)
        level = total / np.float32(size)
        share = inner * scale * scale / np.float32(size)
        for j in range(size):
            slope, centred = to_float32(dy[i, j]), x[i, j] - mean
            sums[0, j] += slope * centred * scale
            sums[1, j] += slope
            dx[i, j] = (slope * gain[j] - level - centred * share) * scale


@compile_loop(
    [
        f"void({dy}[:, ::1], {x}[:, ::1], f4[::1], f4[::1], {x}[:, ::1], f4[:, ::1])"
        for dy, x in [("f4", "f4"), ("u2", "f4"), ("u2", "u2")]
    ]
)
def rms_norm_backward(
    dy: np.ndarray, x: np.ndarray, gain: np.ndarray, scales: np.ndarray, dx: np.ndarray, sums: np.ndarray
) -> None:
    """Write RMS norm's input gradient into `dx`; add the gradients of gain and of a bias to `sums` (2, C)."""
    n_rows, size = x.shape
    for i in range(n_rows):
        scale = scales[i]
        inner = ZERO
        for j in range(size):
            inner += to_float32(dy[i, j]) * gain[j] * to_float32(x[i, j])
        share = inner * scale * scale / np.float32(size)
        for j in range(size):
            slope, value = to_float32(dy[i, j]), to_float32(x[i, j])
            sums[0, j] += slope * value * scale
            sums[1, j] += slope
            dx[i, j] = convert_for(dx, (slope * gain[j] - value * share) * scale)


@compile_loop("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def softmax_backward(dy: np.ndarray, y: np.ndarray, dx: np.ndarray) -> None:
    """Write the gradients of rows (R, C) into `dx`, from `dy` of their softmax or softmax1 y."""
    n_rows, size = y.shape
    for i in range(n_rows):
        mean = ZERO
        for j in range(size):
            mean += dy[i, j] * y[i, j]
        for j in range(size):
            dx[i, j] = y[i, j] * (dy[i, j] - mean)


# -------------------------------------------------------------------- losses
@compile_loop([f"f8({x}[:, ::1], i8[::1], f4[::1], f8, {x}[:, ::1])" for x in ("f4", "u2")])
def cross_entropy(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float, slope: np.ndarray
) -> float:
    """Return the weighted sum of rows' cross-entropies, and write its gradient into `slope` unless that is (R, 0)."""
    n_rows, size = logits.shape
    cost = 0.0
    for i in range(n_rows):
        row, slopes, label, weight = logits[i], slope[i], labels[i], weights[i]
        highest = to_float32(row[0])
        for j in range(size):
            highest = maximum(to_float32(row[j]), highest)
        total, level = ZERO, ZERO
        for j in range(size):
            total += exp_underflowing_to_zero(to_float32(row[j]) - highest)
        if smoothing != 0:
            for j in range(size):
                level += to_float32(row[j]) - highest
        truth = to_float32(row[label]) - highest
        if weight != 0:  # such a row may cost infinitely much, and 0 times that is not 0
            cost += weight * (math.log(total) - (1 - smoothing) * truth - smoothing * (level / size))
        share = weight / total
        spread = np.float32(weight * smoothing / size)
        for j in range(len(slopes)):
            slopes[j] = convert_for(slopes, share * exp_underflowing_to_zero(to_float32(row[j]) - highest) - spread)
        if len(slopes):
            of_truth = share * exp_underflowing_to_zero(truth) - spread - np.float32(weight * (1 - smoothing))
            slopes[label] = convert_for(slopes, of_truth)
    return cost


# -------------------------------------------------------------------- optimisers
@compile_loop("f8(f4[::1])")
def sum_squares(x: np.ndarray) -> float:
    """Return the sum of squares of a float32 vector."""
    total = ZERO
    for i in range(len(x)):
        total += x[i] * x[i]
    return float(total)


@compile_loop("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1])")
def adamw(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, coefficients: np.ndarray) -> None:
    """Update 1-D weights w and moments m, v in place by AdamW from gradient g, with 8 precomputed coefficients.

    Args:
        coefficients: the factor of the gradient, beta1, 1 - beta1, beta2, 1 - beta2, eps, rate, factor of the weights.
    """
    share, beta1, rest1, beta2, rest2, eps, rate, kept = coefficients
    for i in range(len(w)):
        slope = share * g[i]
        m[i] = beta1 * m[i] + rest1 * slope
        v[i] = beta2 * v[i] + rest2 * (slope * slope)
        w[i] = kept * w[i] - rate * m[i] / (np.sqrt(v[i]) + eps)
