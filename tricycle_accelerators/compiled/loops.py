"""The loops that Numba compiles. Importing this compiles them, or loads what was compiled before.

Shapes: R rows, C channels; H heads, D head size; K heads of keys, G heads of queries for each, S tokens so far.

Sums may be made in any order, so that processors add several numbers at once. Infinity and NaN are kept, but where it
is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

ANY_ORDER = {"nsz", "arcp", "contract", "reassoc"}  # of LLVM's flags
NO_NAN = ANY_ORDER | {"nnan", "ninf"}
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
ONE = np.float32(1)
LOG2_E = np.float32(math.log2(math.e))
FARTHEST = np.float32(87)  # e to this is near the ends of float32
LARGEST = np.float32(32512)  # 127 * 256, of a row's numbers as whole steps
OFFSET = np.float32(128 * 256 + 128 + 0.5)
SMALLEST = np.float32(1e-30)
AT_ONCE = 32  # keys or values of 16 bits that are float32 at a time
HALF_TO_SINGLE = np.float32(2.0**112)  # a float16's exponent is 112 less than a float32's with the same bits


def _compiled(signature: str, flags: set[str] = ANY_ORDER) -> Callable[[Callable[..., Any]], Any]:
    """Compile for these types, or load what was compiled before."""

    def compile_(loop: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True, fastmath=flags, **OPTIONS)(loop)
        except RuntimeError:  # there is no place to keep it
            return numba.njit(signature, fastmath=flags, **OPTIONS)(loop)

    return compile_


@numba.njit(inline="always")
def _exp_parts(x: Any) -> Any:
    """e^x as y 2^n: y from a polynomial (error 1e-7), n for the exponent's bits: many at a time, as exp is not."""
    t = min(max(x, -FARTHEST), FARTHEST) * LOG2_E
    n = np.floor(t + np.float32(0.5))
    f = t - n
    y = np.float32(1.535336188319500e-4)
    y = y * f + np.float32(1.339887440266574e-3)
    y = y * f + np.float32(9.618437357674640e-3)
    y = y * f + np.float32(5.550332471162809e-2)
    y = y * f + np.float32(2.402264791363012e-1)
    y = y * f + np.float32(6.931472028550421e-1)
    y = y * f + ONE
    return y, np.int32(n)


# -------------------------------------------------------------------- norms
@_compiled("void(f4[:, ::1], f4[::1], f8, f4[:, ::1], f4[::1])")
def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float, y: np.ndarray, scales: np.ndarray) -> None:
    """What rows were multiplied by goes into `scales`."""
    n_rows, size = x.shape
    for i in range(n_rows):
        total = np.float32(0)
        for j in range(size):
            total += x[i, j] * x[i, j]
        scale = np.float32(1 / math.sqrt(total / size + eps))
        for j in range(size):
            y[i, j] = x[i, j] * scale * gain[j]
        scales[i] = scale


@_compiled("void(f4[:, ::1], f4[::1], f4[::1], f8, f4[:, ::1])")
def layer_norm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float, y: np.ndarray) -> None:
    n_rows, size = x.shape
    for i in range(n_rows):
        total = np.float32(0)
        for j in range(size):
            total += x[i, j]
        mean = np.float32(total / size)
        total = np.float32(0)
        for j in range(size):
            y[i, j] = x[i, j] - mean
            total += y[i, j] * y[i, j]
        scale = np.float32(1 / math.sqrt(total / size + eps))
        for j in range(size):
            y[i, j] = y[i, j] * scale * gain[j] + bias[j]


# -------------------------------------------------------------------- between products
@_compiled("void(f4[:, ::1], f4[:, ::1])")
def gated_swish(x: np.ndarray, y: np.ndarray) -> None:
    """(R, 2 C) to (R, C)."""
    n_rows, size = y.shape
    for i in range(n_rows):
        powers = y[i]
        bits = powers.view(np.int32)
        for j in range(size):
            power, exponent = _exp_parts(-x[i, size + j])
            powers[j] = power
            bits[j] += exponent << 23
        for j in range(size):
            y[i, j] = x[i, j] * x[i, size + j] / (ONE + powers[j])


@_compiled("void(f4[:, :, :], f4[:, ::1], f4[:, ::1])")
def turn(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """(R, H, D) in place; cos and sin (R, n)."""
    n_rows, n_heads, _ = heads.shape
    n_pairs = cos.shape[1]
    for i in range(n_rows):
        for h in range(n_heads):
            for j in range(n_pairs):
                first, second = heads[i, h, j], heads[i, h, n_pairs + j]
                heads[i, h, j] = first * cos[i, j] - second * sin[i, j]
                heads[i, h, n_pairs + j] = second * cos[i, j] + first * sin[i, j]


@_compiled("f4(f4[::1])", NO_NAN)
def _largest(x: np.ndarray) -> Any:
    largest = x[0]
    for j in range(len(x)):
        largest = max(largest, x[j])
    return largest


@_compiled("f4(f4[::1], b1)")
def _softmax(row: np.ndarray, nothing: bool) -> Any:
    """In place; with `nothing` softmax1. Returns the log of the sum of exponentials."""
    largest = _largest(row)
    if nothing:
        largest = max(largest, np.float32(0))
    bits = row.view(np.int32)
    for s in range(len(row)):
        power, exponent = _exp_parts(row[s] - largest)
        row[s] = power
        bits[s] += exponent << 23
    total = np.float32(0)
    for s in range(len(row)):
        total += row[s]
    if nothing:
        total += np.float32(math.exp(-largest))
    share = ONE / total
    for s in range(len(row)):
        row[s] *= share
    return np.float32(largest + math.log(total))


@_compiled("void(f4[:, ::1], f4[:, ::1], f8, i8, i8, b1)")
def softmax_rows(
    products: np.ndarray, log_totals: np.ndarray, scale: float, last: int, window: int, nothing: bool
) -> None:
    """Products of queries and keys (H T, S), head after head, to weights in place, and the logs of sums (H, T).

    Args:
        last: query t sees the keys up to t + last.
        window: and of these the last so many; 0 for all.
    """
    n_heads, n_queries = log_totals.shape
    n_keys = products.shape[1]
    factor = np.float32(scale)
    for h in range(n_heads):
        for t in range(n_queries):
            row = products[h * n_queries + t]
            start = max(0, t + last + 1 - window) if window else 0
            stop = min(n_keys, t + last + 1)
            row[:start] = 0
            row[stop:] = 0
            for s in range(start, stop):
                row[s] *= factor
            log_totals[h, t] = _softmax(row[start:stop], nothing)


@_compiled("void(f4[:, ::1], f4[:, :, ::1], f4, f4[:, :])")
def _scores(q: np.ndarray, keys: np.ndarray, scale: float, scores: np.ndarray) -> None:
    """Of queries (K G, D) for keys (S, K, D), as (K G, S). A key is read once for all queries that look at it."""
    n_heads, size = q.shape
    n_tokens, n_key_heads, _ = keys.shape
    group = n_heads // n_key_heads
    for s in range(n_tokens):
        for k in range(n_key_heads):
            for h in range(k * group, (k + 1) * group):
                score = np.float32(0)
                for d in range(size):
                    score += q[h, d] * keys[s, k, d]
                scores[h, s] = score * scale


@_compiled("void(f4[:, :], f4[:, :, ::1], f4[:, ::1])")
def _add_values(weights: np.ndarray, values: np.ndarray, mixed: np.ndarray) -> None:
    """Weights (K G, S) times values (S, K, D), added to (K G, D): four at a time, for sums are slow to write."""
    n_heads, size = mixed.shape
    n_tokens, n_key_heads, _ = values.shape
    group = n_heads // n_key_heads
    fours = n_tokens - n_tokens % 4
    for s in range(0, fours, 4):
        for k in range(n_key_heads):
            a, b, c, d = values[s, k], values[s + 1, k], values[s + 2, k], values[s + 3, k]
            for h in range(k * group, (k + 1) * group):
                row = mixed[h]
                of_a, of_b, of_c, of_d = weights[h, s], weights[h, s + 1], weights[h, s + 2], weights[h, s + 3]
                for i in range(size):
                    row[i] += of_a * a[i] + of_b * b[i] + of_c * c[i] + of_d * d[i]
    for s in range(fours, n_tokens):
        for h in range(n_heads):
            for i in range(size):
                mixed[h, i] += weights[h, s] * values[s, h // group, i]


@_compiled("void(f4[:, ::1], f4[:, :, ::1], f4[:, :, ::1], f4, b1, f4[:, ::1])")
def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, nothing: bool, mixed: np.ndarray) -> None:
    """What queries (K G, D) make of keys and values (S, K, D)."""
    weights = np.empty((len(q), len(keys)), np.float32)
    _scores(q, keys, scale, weights)
    for h in range(len(q)):
        _softmax(weights[h], nothing)
    mixed[:] = 0
    _add_values(weights, values, mixed)


@_compiled("void(u2[:, :, ::1], b1, f4[:, :, ::1])")
def _widen(numbers: np.ndarray, is_bfloat16: bool, wide: np.ndarray) -> None:
    """The bits of finite bfloat16 or float16 as float32. No loop reads what it wrote as another type: that is slow."""
    source = numbers.reshape(-1)
    floats = wide.reshape(-1)
    bits = floats.view(np.uint32)
    if is_bfloat16:
        for i in range(len(bits)):
            bits[i] = np.uint32(source[i]) << np.uint32(16)
        return
    for i in range(len(bits)):
        bits[i] = (np.uint32(source[i]) & np.uint32(0x7FFF)) << np.uint32(13)
    for i in range(len(bits)):
        floats[i] *= HALF_TO_SINGLE
    for i in range(len(bits)):
        bits[i] |= (np.uint32(source[i]) & np.uint32(0x8000)) << np.uint32(16)


@_compiled("void(f4[:, ::1], u2[:, :, ::1], u2[:, :, ::1], b1, f4, b1, f4[:, ::1])")
def attend_16(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    is_bfloat16: bool,
    scale: float,
    nothing: bool,
    mixed: np.ndarray,
) -> None:
    """The same with the bits of 16-bit keys and values, some of which are float32 at a time."""
    n_tokens = len(keys)
    weights = np.empty((len(q), n_tokens), np.float32)
    some = np.empty((AT_ONCE, *keys.shape[1:]), np.float32)
    for start in range(0, n_tokens, AT_ONCE):
        stop = min(start + AT_ONCE, n_tokens)
        _widen(keys[start:stop], is_bfloat16, some[: stop - start])
        _scores(q, some[: stop - start], scale, weights[:, start:stop])
    for h in range(len(q)):
        _softmax(weights[h], nothing)
    mixed[:] = 0
    for start in range(0, n_tokens, AT_ONCE):
        stop = min(start + AT_ONCE, n_tokens)
        _widen(values[start:stop], is_bfloat16, some[: stop - start])
        _add_values(weights[:, start:stop], some[: stop - start], mixed)


# -------------------------------------------------------------------- numbers as two of fewer bits
@_compiled("f4(f4[::1])", NO_NAN)
def _largest_size(x: np.ndarray) -> Any:
    largest = SMALLEST
    for j in range(len(x)):
        largest = max(largest, abs(x[j]))
    return largest


@_compiled("b1(f4[:, ::1], i1[:, ::1], f4[::1])")
def split_int8(x: np.ndarray, halves: np.ndarray, scales: np.ndarray) -> bool:
    """Rows (R, K) as whole numbers of steps: (2 R, K), first what is left of each and then what is large, in 256 steps.

    Args:
        scales: (R,), how large a step is.

    Returns:
        False where there is infinity or NaN.
    """
    n_rows, size = x.shape
    for i in range(n_rows):
        broken = np.float32(0)
        for j in range(size):
            broken += x[i, j] * np.float32(0)
        if broken != 0:
            return False
        largest = _largest_size(x[i])
        scales[i] = largest / LARGEST
        factor = LARGEST / largest
        for j in range(size):
            whole = np.int32(x[i, j] * factor + OFFSET)
            halves[i, j] = np.int8((whole & 255) - 128)
            halves[n_rows + i, j] = np.int8((whole >> 8) - 128)
    return True


@_compiled("void(f4[:, ::1], f4[::1], f4[:, ::1])")
def join_int8(products: np.ndarray, scales: np.ndarray, result: np.ndarray) -> None:
    """Products of both halves (2 R, M) to those of the numbers (R, M)."""
    n_rows, size = result.shape
    for i in range(n_rows):
        for j in range(size):
            result[i, j] = (products[n_rows + i, j] * np.float32(256) + products[i, j]) * scales[i]


@_compiled("u4(u4)")
def _rounded(bits: Any) -> Any:
    """A float32 as its nearest bfloat16, ties to even: the upper half of its bits."""
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@_compiled("b1(f4[:, ::1], u2[:, ::1])")
def split_bfloat16(x: np.ndarray, halves: np.ndarray) -> bool:
    """Rows (R, K) as bfloat16 (2 R, K), and what is left of each as bfloat16. False where there is infinity or NaN."""
    n_rows, size = x.shape
    rest = np.empty(size, np.float32)
    rest_bits = rest.view(np.uint32)
    for i in range(n_rows):
        broken = np.float32(0)
        bits = x[i].view(np.uint32)
        for j in range(size):
            broken += x[i, j] * np.float32(0)
            upper = _rounded(bits[j])
            halves[i, j] = np.uint16(upper)
            rest_bits[j] = upper << np.uint32(16)
        if broken != 0:
            return False
        for j in range(size):
            rest[j] = x[i, j] - rest[j]
        for j in range(size):
            halves[n_rows + i, j] = np.uint16(_rounded(rest_bits[j]))
    return True


# -------------------------------------------------------------------- training
@_compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def gated_swish_backward(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """(R, C) and (R, 2 C) to (R, 2 C). What is on the way of a row stays in the cache."""
    n_rows, size = dy.shape
    powers = np.empty(size, np.float32)
    bits = powers.view(np.int32)
    for i in range(n_rows):
        for j in range(size):
            power, exponent = _exp_parts(-x[i, size + j])
            powers[j] = power
            bits[j] += exponent << 23
        for j in range(size):
            gate = ONE / (ONE + powers[j])
            value = x[i, size + j]
            slope = dy[i, j] * gate
            dx[i, j] = slope * value
            dx[i, size + j] = slope * x[i, j] * (ONE + value * (ONE - gate))


@_compiled("void(f4[:, :, :], f4[:, ::1], f4[:, ::1], f4[:, :, ::1])")
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


@_compiled("void(f4[:, ::1], f4[:, ::1], f4[::1], f4[::1], f4[:, ::1], f4[:, ::1])")
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
        inner = np.float32(0)
        for j in range(size):
            inner += dy[i, j] * gain[j] * x[i, j]
        share = inner * scale * scale / np.float32(size)
        for j in range(size):
            sums[0, j] += dy[i, j] * x[i, j] * scale
            sums[1, j] += dy[i, j]
            dx[i, j] = (dy[i, j] * gain[j] - x[i, j] * share) * scale


@_compiled("void(f4[::1], f4[::1], f4[::1], f4[::1], f4[::1])")
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
