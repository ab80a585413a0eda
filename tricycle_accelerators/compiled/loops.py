"""Numba loops for generation and training. The import compiles the loops or loads cached machine code.

Shapes: R rows, C channels; H heads, D head size; K heads of keys, G heads of queries for each, S tokens so far.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import types

from tricycle_accelerators.compiled.jit import (
    LARGEST,
    OFFSET,
    ONE,
    ZERO,
    bfloat16_to_float32,
    compile_loop,
    contiguous_row,
    convert_for,
    exp,
    float32_to_bfloat16,
    max_abs_if_finite,
    maximum,
    multiply_by_sigmoid,
    overload_by_types,
    to_float32,
)

WIDENED_KEYS = 16  # keys or values of 16 or 8 bits that are float32 at a time
HALF_TO_SINGLE = np.float32(2.0**112)  # a float16's exponent is 112 less than a float32's with the same bits


LINEAR = np.float32(2 * math.sqrt(2 / math.pi))
CUBIC = np.float32(LINEAR * 0.044715)


# -------------------------------------------------------------------- norms
@compile_loop(
    [f"void({x}[:, ::1], f4[::1], f8, {y}[:, ::1], f4[::1])" for x, y in [("f4", "f4"), ("f4", "u2"), ("u2", "u2")]]
)
def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float, y: np.ndarray, scales: np.ndarray) -> None:
    """Write the RMS norm of rows (R, C) times `gain` into `y`, and the factor 1 / RMS of each row into `scales`."""
    n_rows, size = x.shape
    for i in range(n_rows):
        total = ZERO
        for j in range(size):
            total += to_float32(x[i, j]) * to_float32(x[i, j])
        scale = np.float32(1 / math.sqrt(total / size + eps))
        for j in range(size):
            y[i, j] = convert_for(y, to_float32(x[i, j]) * scale * gain[j])
        scales[i] = scale


@compile_loop([f"void(f4[:, ::1], f4[::1], f4[::1], f8, {y}[:, ::1], f4[::1], f4[::1])" for y in ("f4", "u2")])
def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray, eps: float, y: np.ndarray, means: np.ndarray, scales: np.ndarray
) -> None:
    """Write the layer norm of rows (R, C) into `y`, each row's mean into `means` and 1 / deviation into `scales`."""
    n_rows, size = x.shape
    for i in range(n_rows):
        total = ZERO
        for j in range(size):
            total += x[i, j]
        about = np.float32(total / size)
        rest, total = ZERO, ZERO
        for j in range(size):
            rest += x[i, j] - about
            total += (x[i, j] - about) * (x[i, j] - about)
        rest = np.float32(rest / size)  # what the mean was rounded by
        mean = about + rest
        scale = np.float32(1 / math.sqrt(max(0.0, total / size - rest * rest) + eps))
        for j in range(size):
            y[i, j] = convert_for(y, (x[i, j] - mean) * scale * gain[j] + bias[j])
        means[i] = mean
        scales[i] = scale


# -------------------------------------------------------------------- between products
@compile_loop(["void(f4[:, ::1], f4[:, ::1])", "void(u2[:, ::1], u2[:, ::1])"])
def swiglu(x: np.ndarray, y: np.ndarray) -> None:
    """Write SwiGLU a * silu(b) of rows [a, b] (R, 2 C) into `y` (R, C)."""
    n_rows, size = y.shape
    for i in range(n_rows):
        for j in range(size):
            value = to_float32(x[i, size + j])
            y[i, j] = convert_for(y, to_float32(x[i, j]) * multiply_by_sigmoid(value, value))


@compile_loop([f"void({x}[:, :, :], f4[:, ::1], f4[:, ::1], {x}[:, :, ::1])" for x in ("f4", "u2")])
def rotate(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray, y: np.ndarray) -> None:
    """Write heads (R, H, D) after RoPE into `y`; pairs (i, i + D/2) are rotated by cosines and sines (R, D/2)."""
    n_rows, n_heads, size = heads.shape
    half = size // 2
    for i in range(n_rows):
        for h in range(n_heads):
            row, new = contiguous_row(heads[i], h), y[i, h]
            for j in range(half):
                first, second = to_float32(row[j]), to_float32(row[half + j])
                new[j] = convert_for(new, first * cos[i, j] - second * sin[i, j])
                new[half + j] = convert_for(new, second * cos[i, j] + first * sin[i, j])


@numba.njit(inline="always")
def _gelu(x: np.float32) -> np.float32:
    """Compute the tanh approximation of GELU of a float32 as x / (1 + e^-u), u = x (LINEAR + CUBIC x^2)."""
    return multiply_by_sigmoid(x, x * (LINEAR + CUBIC * x * x))


@compile_loop(["void(f4[::1], f4[::1])", "void(u2[::1], u2[::1])"])
def gelu(x: np.ndarray, y: np.ndarray) -> None:
    """Write GELU (tanh approximation) of a vector into `y`."""
    for i in range(len(x)):
        y[i] = convert_for(y, _gelu(to_float32(x[i])))


# -------------------------------------------------------------------- attention of one query
@compile_loop("f4(f4[::1], b1)")
def _softmax(row: np.ndarray, off_by_one: bool) -> Any:
    """Compute softmax of a row in place (softmax1 if `off_by_one`); return the logsumexp."""
    largest = ZERO if off_by_one else row[0]
    for s in range(len(row)):
        largest = maximum(largest, row[s])
    total = ZERO
    for s in range(len(row)):
        row[s] = exp(row[s] - largest)
        total += row[s]
    if off_by_one:
        total += exp(-largest)
    share = ONE / total
    for s in range(len(row)):
        row[s] *= share
    return largest + np.float32(math.log(total))


@compile_loop("void(f4[:, ::1], f4[:, :, ::1], f4, f4[:, :])")
def _scores(q: np.ndarray, keys: np.ndarray, scale: float, scores: np.ndarray) -> None:
    """Write the scaled scores (K G, S) of queries (K G, D) and keys (S, K, D); each key is read once."""
    n_heads, size = q.shape
    n_tokens, n_key_heads, _ = keys.shape
    group = n_heads // n_key_heads
    for s in range(n_tokens):
        for k in range(n_key_heads):
            for h in range(k * group, (k + 1) * group):
                score = ZERO
                for d in range(size):
                    score += q[h, d] * keys[s, k, d]
                scores[h, s] = score * scale


@compile_loop("void(f4[:, :], f4[:, :, ::1], f4[:, ::1])")
def _add_weighted_values(weights: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """Add the products of weights (K G, S) and values (S, K, D) to `out` (K G, D), four values at a time."""
    n_heads, size = out.shape
    n_tokens, n_key_heads, _ = values.shape
    group = n_heads // n_key_heads
    fours = n_tokens - n_tokens % 4
    for s in range(0, fours, 4):
        for k in range(n_key_heads):
            a, b, c, d = values[s, k], values[s + 1, k], values[s + 2, k], values[s + 3, k]
            for h in range(k * group, (k + 1) * group):
                row = out[h]
                of_a, of_b, of_c, of_d = weights[h, s], weights[h, s + 1], weights[h, s + 2], weights[h, s + 3]
                for i in range(size):
                    row[i] += of_a * a[i] + of_b * b[i] + of_c * c[i] + of_d * d[i]
    for s in range(fours, n_tokens):
        for h in range(n_heads):
            for i in range(size):
                out[h, i] += weights[h, s] * values[s, h // group, i]


@compile_loop("void(f4[:, ::1], f4[:, :, ::1], f4[:, :, ::1], f4, b1, f4[:, ::1], f4[:])")
def decode_attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    off_by_one: bool,
    out: np.ndarray,
    logsumexp: np.ndarray,
) -> None:
    """Write attention of q (K G, D) to keys, values (S, K, D), softmax1 if `off_by_one`, to `out`, `logsumexp`.

    Writes the results into `out` and the logsumexp of the scores of each head into the last argument.
    """
    weights = np.empty((len(q), len(keys)), np.float32)
    _scores(q, keys, scale, weights)
    for h in range(len(q)):
        logsumexp[h] = _softmax(weights[h], off_by_one)
    out[:] = 0
    _add_weighted_values(weights, values, out)


@compile_loop("void(u2[:, :, ::1], b1, f4[:, :, ::1])")
def _widen(numbers: np.ndarray, is_bfloat16: bool, wide: np.ndarray) -> None:
    """Write finite bfloat16 or float16 numbers, given as bits, to `wide` as float32."""
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


@compile_loop("void(i1[:, :, ::1], u2[:, :, ::1], f4[:, :, ::1])")
def _dequantize(numbers: np.ndarray, scales: np.ndarray, wide: np.ndarray) -> None:
    """Write int8 numbers (S, K, D) times their block's scale, bfloat16 bits (S, K, N), into float32 `wide`."""
    source, floats, of_blocks = numbers.reshape(-1), wide.reshape(-1), scales.reshape(-1)
    for i in range(len(source)):  # two loops, as LLVM checks once whether the arrays of this one overlap
        floats[i] = np.float32(source[i])
    size = len(source) // max(1, len(of_blocks))
    for n in range(len(of_blocks)):
        scale, block = bfloat16_to_float32(of_blocks[n]), floats[n * size : (n + 1) * size]
        for i in range(size):
            block[i] *= scale


@overload_by_types
def _to_float32_rows(numbers: Any, scales: Any, is_bfloat16: Any, wide: Any) -> Any:
    """Write int8 numbers by `_dequantize`, or bits of 16-bit floats by `_widen`, into `wide` as float32."""
    if numbers.dtype == types.int8:
        return lambda numbers, scales, is_bfloat16, wide: _dequantize(numbers, scales, wide)
    return lambda numbers, scales, is_bfloat16, wide: _widen(numbers, is_bfloat16, wide)


@compile_loop(
    [
        f"void(f4[:, ::1], {x}[:, :, ::1], {x}[:, :, ::1], u2[:, :, ::1], u2[:, :, ::1], b1, f4, b1, f4[:, ::1], f4[:])"
        for x in ("u2", "i1")
    ]
)
def decode_attention_narrow(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    key_scales: np.ndarray,
    value_scales: np.ndarray,
    is_bfloat16: bool,
    scale: float,
    off_by_one: bool,
    out: np.ndarray,
    logsumexp: np.ndarray,
) -> None:
    """Write results of `decode_attention` to `out`, `logsumexp` from a bfloat16, float16 (uint16 bits) or int8 cache.

    The scales (S, K, N), bits of bfloat16, are those of an int8 cache; they are not used for others.
    """
    n_tokens = len(keys)
    weights = np.empty((len(q), n_tokens), np.float32)
    some = np.empty((WIDENED_KEYS, *keys.shape[1:]), np.float32)
    for start in range(0, n_tokens, WIDENED_KEYS):
        stop = min(start + WIDENED_KEYS, n_tokens)
        _to_float32_rows(keys[start:stop], key_scales[start:stop], is_bfloat16, some[: stop - start])
        _scores(q, some[: stop - start], scale, weights[:, start:stop])
    for h in range(len(q)):
        logsumexp[h] = _softmax(weights[h], off_by_one)
    out[:] = 0
    for start in range(0, n_tokens, WIDENED_KEYS):
        stop = min(start + WIDENED_KEYS, n_tokens)
        _to_float32_rows(values[start:stop], value_scales[start:stop], is_bfloat16, some[: stop - start])
        _add_weighted_values(weights[:, start:stop], some[: stop - start], out)


# -------------------------------------------------------------------- numbers as two of fewer bits
@compile_loop("b1(f4[:, ::1], i1[:, ::1], f4[::1])")
def split_int8(x: np.ndarray, parts: np.ndarray, scales: np.ndarray) -> bool:
    """Split rows x (R, K) ~ scales * (256 high + low) into `parts`: R low, R high int8 rows; False if not finite.

    Args:
        scales: (R,), how large a step is.

    Returns:
        False where there is infinity or NaN.
    """
    n_rows, size = x.shape
    for i in range(n_rows):
        largest = max_abs_if_finite(x[i])
        if largest == 0:
            return False
        scales[i] = largest / LARGEST
        factor = LARGEST / largest
        for j in range(size):
            whole = np.int32(x[i, j] * factor + OFFSET)
            parts[i, j] = np.int8((whole & 255) - 128)
            parts[n_rows + i, j] = np.int8((whole >> 8) - 128)
    return True


@compile_loop("void(f4[:, ::1], f4[::1], f4[:, ::1])")
def join_int8(products: np.ndarray, scales: np.ndarray, result: np.ndarray) -> None:
    """Write (256 high + low) * scales to `result` (R, M), from products (2 R, M) of low, then high int8 rows."""
    n_rows, size = result.shape
    for i in range(n_rows):
        for j in range(size):
            result[i, j] = (products[n_rows + i, j] * np.float32(256) + products[i, j]) * scales[i]


@compile_loop("b1(f4[:, ::1], u2[:, ::1])")
def split_bfloat16(x: np.ndarray, parts: np.ndarray) -> bool:
    """Write rows (R, K) rounded to bfloat16, then their rounding errors, into `parts` (2 R, K); False if not finite.

    Returns False where a number is infinite or NaN.
    """
    n_rows, size = x.shape
    for i in range(n_rows):
        if max_abs_if_finite(x[i]) == 0:
            return False
        for j in range(size):
            upper = float32_to_bfloat16(x[i, j])
            parts[i, j] = upper
            parts[n_rows + i, j] = float32_to_bfloat16(x[i, j] - bfloat16_to_float32(upper))
    return True
