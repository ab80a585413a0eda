"""Numba loops for generation and training. The import compiles the loops or loads cached machine code.

Shapes: R rows, C channels; H heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tricycle_accelerators.compiled.jit import (
    ONE,
    ZERO,
    bfloat16_to_float32,
    compile_loop,
    contiguous_row,
    convert_for,
    exp_underflowing_to_zero,
    float16_to_float32,
    inner_function,
    intrinsic,
    maximum,
    multiply_by_sigmoid,
    to_float32,
)
from tricycle_accelerators.compiled.registers import INDEX, LANES, broadcast, build_loop, multiply_add, sum_lanes
from tricycle_accelerators.compiled.vector_rows import BFLOAT16, FLOAT32, ITEM_SIZES, load_numbers

N_PARTIAL_SUMS = 4 * LANES  # enough to hide the latency of an addition
LOWEST_FLOAT32 = np.finfo(np.float32).min


LINEAR = np.float32(2 * math.sqrt(2 / math.pi))
CUBIC = np.float32(LINEAR * 0.044715)


# -------------------------------------------------------------------- norms
@intrinsic
def _sum_steps(context: Any, row: Any, about: Any, n_steps: Any) -> Any:
    """Sum x - about and its squares over 1 or more steps of N_PARTIAL_SUMS numbers of a row (Numba intrinsic)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("alwaysinline")  # a sum that is not used is then not computed
        start = builder.ptrtoint(context.make_array(row)(context, builder, arguments[0]).data, INDEX)
        center = broadcast(builder, arguments[1], N_PARTIAL_SUMS)
        kind = BFLOAT16 if row.dtype == types.uint16 else FLOAT32
        n_bytes = INDEX(ITEM_SIZES[kind] * N_PARTIAL_SUMS)

        def add(step: Any, sums: list[Any]) -> list[Any]:
            numbers = load_numbers(builder, builder.add(start, builder.mul(step, n_bytes)), kind, N_PARTIAL_SUMS)
            distances = builder.fsub(numbers, center)
            return [builder.fadd(sums[0], distances), multiply_add(builder, sums[1], distances, distances)]

        zeros = ir.Constant(center.type, [0.0] * N_PARTIAL_SUMS)
        totals = build_loop(builder, arguments[2], [zeros, zeros], add)
        return cgutils.pack_array(builder, [sum_lanes(builder, total) for total in totals])

    return types.UniTuple(types.float32, 2)(row, types.float32, types.intp), code


@inner_function(fastmath=False)
def _sums_about(row: np.ndarray, about: np.float32) -> tuple[np.float32, np.float32]:
    """Return the sums of x - about and of its squares over a contiguous row.

    It is compiled without ANY_ORDER, so that the order is fixed: the norm of a fused sublayer, which LLVM optimizes
    once more, has the same bits as a separate one.
    """
    n_steps = len(row) // N_PARTIAL_SUMS
    total, squares = _sum_steps(row, about, n_steps) if n_steps else (ZERO, ZERO)
    for j in range(n_steps * N_PARTIAL_SUMS, len(row)):
        distance = to_float32(row[j]) - about
        total += distance
        squares += distance * distance
    return total, squares


@inner_function(fastmath=False)
def _normalized(x: np.float32, mean: np.float32, scale: np.float32, gain: np.float32, bias: np.float32) -> np.float32:
    """Return (x - mean) scale gain + bias.

    It is compiled without ANY_ORDER, with which, on ARM, loops that overwrite their rows, and so are not vectorized,
    gave other bits than loops with separate results.
    """
    return (x - mean) * scale * gain + bias


@compile_loop(
    [f"void({x}[:, ::1], f4[::1], f8, {y}[:, ::1], f4[::1])" for x, y in [("f4", "f4"), ("f4", "u2"), ("u2", "u2")]]
)
def rms_norm(x: np.ndarray, gain: np.ndarray, eps: float, y: np.ndarray, scales: np.ndarray) -> None:
    """Write the RMS norm of rows (R, C) times `gain` into `y`, and the factor 1 / RMS of each row into `scales`."""
    n_rows, size = x.shape
    for i in range(n_rows):
        _, squares = _sums_about(x[i], ZERO)
        scale = np.float32(1 / math.sqrt(squares / size + eps))
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
        total, _ = _sums_about(x[i], ZERO)
        about = np.float32(total / size)
        rest, squares = _sums_about(x[i], about)
        rest = np.float32(rest / size)  # what the mean was rounded by
        mean = about + rest
        scale = np.float32(1 / math.sqrt(max(0.0, squares / size - rest * rest) + eps))
        for j in range(size):
            y[i, j] = convert_for(y, _normalized(x[i, j], mean, scale, gain[j], bias[j]))
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


@compile_loop("void(f4[:, ::1], f4[:, ::1], b1)")
def softmax(x: np.ndarray, y: np.ndarray, off_by_one: bool) -> None:
    """Write softmax (softmax1 if `off_by_one`) of rows (R, C) into `y`; a row of -inf gives 0."""
    n_rows, size = x.shape
    for i in range(n_rows):
        largest = ZERO if off_by_one else LOWEST_FLOAT32
        for j in range(size):
            largest = maximum(largest, x[i, j])
        total = exp_underflowing_to_zero(-largest) if off_by_one else ZERO
        for j in range(size):
            y[i, j] = exp_underflowing_to_zero(x[i, j] - largest)
            total += y[i, j]
        share = ONE if total == ZERO else ONE / total
        for j in range(size):
            y[i, j] *= share


# -------------------------------------------------------------------- conversion of 16-bit numbers
@compile_loop("void(u2[::1], b1, f4[::1])")
def widen(bits: np.ndarray, is_float16: bool, out: np.ndarray) -> None:
    """Write float16 or bfloat16 numbers, given by their bits, to `out` as float32."""
    if is_float16:
        for i in range(len(bits)):
            out[i] = float16_to_float32(bits[i])
    else:
        for i in range(len(bits)):
            out[i] = bfloat16_to_float32(bits[i])


@compile_loop("void(f4[::1], u2[::1])")
def narrow(x: np.ndarray, bits: np.ndarray) -> None:
    """Write float32 numbers as bits of the nearest bfloat16 numbers."""
    for i in range(len(x)):
        bits[i] = convert_for(bits, x[i])
