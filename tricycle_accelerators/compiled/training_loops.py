"""The loops of training that Numba compiles. Importing this compiles them, or loads what was compiled before.

Shapes: R rows, C channels; N numbers; H heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from tricycle_accelerators.compiled.jit import ONE, ZERO, compiled, exp, larger, narrowed, widened
from tricycle_accelerators.compiled.loops import gated_swish as gated_swish

LINEAR = np.float32(2 * math.sqrt(2 / math.pi))
CUBIC = np.float32(LINEAR * 0.044715)


# -------------------------------------------------------------------- attention
@numba.njit(inline="always")
def _seen(row: np.ndarray, end: int, window: int) -> np.ndarray:
    """The part of a row before `end` and, where there is a window, in it; the rest of the row becomes 0.

    A loop over the indices of an array, unlike one from start to stop, is known to stay in it: that is what lets the
    compiler take many numbers at a time.
    """
    stop = max(0, min(len(row), end))
    start = max(0, min(stop, end - window)) if window else 0
    row[:start] = 0
    row[stop:] = 0
    return row[start:stop]


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4, i8, i8)")
def add_exponentials(
    scores: np.ndarray, mixed: np.ndarray, shifts: np.ndarray, totals: np.ndarray, scale: float, last: int, window: int
) -> None:
    """Products of queries and some keys (H T, S), head after head, to e^(scale score - shift) in place, 0 where hidden.

    A row's shift is the largest of its scores so far. What was summed with a smaller shift is made smaller by as much.

    Args:
        mixed: (H T, D), sums of values so far.
        shifts, totals: (H, T), the shifts, and the sums of exponentials so far.
        last: query t sees the keys up to t + last.
        window: and of these the last so many; 0 for all.
    """
    n_heads, n_queries = totals.shape
    for h in range(n_heads):
        for t in range(n_queries):
            row = _seen(scores[h * n_queries + t], t + last + 1, window)
            shift = shifts[h, t]
            for s in range(len(row)):
                row[s] *= scale
                shift = larger(shift, row[s])
            if shift > shifts[h, t]:
                smaller = exp(shifts[h, t] - shift) if totals[h, t] > ZERO else ZERO
                totals[h, t] *= smaller
                sums = mixed[h * n_queries + t]
                for d in range(len(sums)):
                    sums[d] *= smaller
                shifts[h, t] = shift
            total = ZERO
            for s in range(len(row)):
                row[s] = exp(row[s] - shift)
                total += row[s]
            totals[h, t] += total


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, :, :], f4[:, :])")
def divide(mixed: np.ndarray, shifts: np.ndarray, totals: np.ndarray, out: np.ndarray, logs: np.ndarray) -> None:
    """Sums of values (H T, D) to their means (H, T, D), and the logs (H, T) of what they were divided by."""
    n_heads, n_queries = totals.shape
    for h in range(n_heads):
        for t in range(n_queries):
            share = ONE / totals[h, t]
            for d in range(mixed.shape[1]):
                out[h, t, d] = mixed[h * n_queries + t, d] * share
            logs[h, t] = np.float32(shifts[h, t] + math.log(totals[h, t]))


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, :], f4[:, :], f4, i8, i8)")
def differentiate(
    scores: np.ndarray,
    slopes: np.ndarray,
    logs: np.ndarray,
    inner: np.ndarray,
    scale: float,
    last: int,
    window: int,
) -> None:
    """In place: products of queries and keys to weights, and the gradients of weights to those of the products.

    Args:
        scores, slopes: (H T, S). logs, inner: (H, T), of `divide`, and the products of results and their gradients.
        last, window: as of `add_exponentials`.
    """
    n_heads, n_queries = logs.shape
    for h in range(n_heads):
        for t in range(n_queries):
            row = _seen(scores[h * n_queries + t], t + last + 1, window)
            slope = _seen(slopes[h * n_queries + t], t + last + 1, window)
            log, mean = logs[h, t], inner[h, t]
            for s in range(len(row)):
                weight = exp(row[s] * scale - log)
                row[s] = weight
                slope[s] = weight * (slope[s] - mean) * scale


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


# -------------------------------------------------------------------- steps of recurrent layers
@numba.njit(inline="always")
def _sigmoid(x: np.float32) -> np.float32:
    return ONE / (ONE + exp(-x))


@numba.njit(inline="always")
def _tanh(x: np.float32) -> np.float32:
    """Near 0, where the two exponentials are nearly equal, by its series."""
    square = x * x
    series = np.float32(62 / 2835)
    series = series * square - np.float32(17 / 315)
    series = series * square + np.float32(2 / 15)
    series = series * square - np.float32(1 / 3)
    series = x + x * (series * square)
    far = np.float32(2) * _sigmoid(np.float32(2) * x) - ONE
    return series if square < np.float32(0.0625) else far


@compiled("void(f4[::1], f4[::1])")
def _to_sigmoid(x: np.ndarray, more: np.ndarray) -> None:
    """Of the sum, in place."""
    for j in range(len(x)):
        x[j] = _sigmoid(x[j] + more[j])


@compiled("void(f4[::1], f4[::1])")
def _to_tanh(x: np.ndarray, more: np.ndarray) -> None:
    for j in range(len(x)):
        x[j] = _tanh(x[j] + more[j])


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def lstm_step(
    gates: np.ndarray, recurrent: np.ndarray, c_before: np.ndarray, h: np.ndarray, c: np.ndarray, tanh_c: np.ndarray
) -> None:
    """Gates i, f, g, o (B, 4 H) to their values, in place, and the states (B, H) after them.

    In several loops, each over few arrays: of more the compiler does not see that they lie apart.
    """
    n_items, size = h.shape
    for b in range(n_items):
        _to_sigmoid(gates[b, : 2 * size], recurrent[b, : 2 * size])
        _to_tanh(gates[b, 2 * size : 3 * size], recurrent[b, 2 * size : 3 * size])
        _to_sigmoid(gates[b, 3 * size :], recurrent[b, 3 * size :])
        i, f, g = gates[b, :size], gates[b, size : 2 * size], gates[b, 2 * size : 3 * size]
        for j in range(size):
            c[b, j] = f[j] * c_before[b, j] + i[j] * g[j]
        o = gates[b, 3 * size :]
        for j in range(size):
            tanh_c[b, j] = _tanh(c[b, j])
            h[b, j] = o[j] * tanh_c[b, j]


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def lstm_step_back(
    gates: np.ndarray, c_before: np.ndarray, tanh_c: np.ndarray, dh: np.ndarray, dc: np.ndarray, d_gates: np.ndarray
) -> None:
    """The gradients of what went into the gates; in place those of the states before, but for what weights give."""
    n_items, size = dh.shape
    for b in range(n_items):
        for j in range(size):
            i, f, g, o = gates[b, j], gates[b, size + j], gates[b, 2 * size + j], gates[b, 3 * size + j]
            slope = dc[b, j] + dh[b, j] * o * (ONE - tanh_c[b, j] * tanh_c[b, j])
            d_gates[b, j] = slope * g * i * (ONE - i)
            d_gates[b, size + j] = slope * c_before[b, j] * f * (ONE - f)
            d_gates[b, 2 * size + j] = slope * i * (ONE - g * g)
            d_gates[b, 3 * size + j] = dh[b, j] * tanh_c[b, j] * o * (ONE - o)
            dc[b, j] = slope * f
            dh[b, j] = ZERO


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def gru_step(gates: np.ndarray, recurrent: np.ndarray, before: np.ndarray, h: np.ndarray, part: np.ndarray) -> None:
    """Gates r, z, n (B, 3 H) to their values, in place, the state (B, H) after them, and the recurrent part of n."""
    n_items, size = h.shape
    for b in range(n_items):
        _to_sigmoid(gates[b, : 2 * size], recurrent[b, : 2 * size])
        part[b] = recurrent[b, 2 * size :]
        r, z, n = gates[b, :size], gates[b, size : 2 * size], gates[b, 2 * size :]
        for j in range(size):
            n[j] = _tanh(n[j] + r[j] * recurrent[b, 2 * size + j])
        for j in range(size):
            h[b, j] = n[j] + z[j] * (before[b, j] - n[j])


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def gru_step_back(
    gates: np.ndarray, before: np.ndarray, part: np.ndarray, dh: np.ndarray, to_input: np.ndarray, to_state: np.ndarray
) -> None:
    """The gradients of what the input and what the state before gave to the gates; in place that of this state."""
    n_items, size = dh.shape
    for b in range(n_items):
        for j in range(size):
            r, z, n = gates[b, j], gates[b, size + j], gates[b, 2 * size + j]
            rest = ONE - z
            dn = dh[b, j] * rest * (ONE - n * n)
            dr = dn * part[b, j] * r * (ONE - r)
            dz = dh[b, j] * (before[b, j] - n) * z * rest
            to_input[b, j] = dr
            to_state[b, j] = dr
            to_input[b, size + j] = dz
            to_state[b, size + j] = dz
            to_input[b, 2 * size + j] = dn
            to_state[b, 2 * size + j] = dn * r
            dh[b, j] *= z
