"""Numba loops of the sigmoid and of the exact GELU. The import compiles them or loads cached machine code."""

from __future__ import annotations

import math

import numba
import numpy as np

from tricycle.kernels.activations import TAIL_SCALE, fitted_range, tail_polynomial
from tricycle_accelerators.compiled.jit import (
    ONE,
    compile_loop,
    convert_for,
    exp_underflowing_to_zero,
    multiply_by_sigmoid,
    to_float32,
)

HALF, DENSITY = np.float32(0.5), np.float32(1 / math.sqrt(2 * math.pi))
SCALE = np.float32(TAIL_SCALE)
FIRST, FACTOR = map(np.float32, fitted_range())
C0, C1, C2, C3, C4, C5, C6, C7, C8 = map(np.float32, tail_polynomial(8))


@compile_loop([f"void({x}[::1], {x}[::1])" for x in ("f4", "u2")])
def sigmoid(x: np.ndarray, y: np.ndarray) -> None:
    """Write the sigmoid of x into `y`; vectors of float32 or of bfloat16 bits (uint16)."""
    for i in range(len(x)):
        y[i] = convert_for(y, multiply_by_sigmoid(ONE, to_float32(x[i])))


@numba.njit(inline="always")
def _gaussian_and_cdf(x: np.float32) -> tuple[np.float32, np.float32]:
    """Return e^(-x^2 / 2) and the normal distribution function of x, by the polynomial of `kernels.activations`."""
    u = (ONE / (ONE + SCALE * abs(x)) - FIRST) * FACTOR - ONE
    high = ((C8 * u + C7) * u + C6) * u + C5
    gaussian = exp_underflowing_to_zero(-HALF * (x * x))
    tail = gaussian * (((((high * u + C4) * u + C3) * u + C2) * u + C1) * u + C0)
    return gaussian, tail if x < 0 else ONE - tail


@compile_loop([f"void({x}[::1], {x}[::1])" for x in ("f4", "u2")])
def exact_gelu(x: np.ndarray, y: np.ndarray) -> None:
    """Write the exact GELU of x into `y`; vectors of float32 or of bfloat16 bits (uint16)."""
    for i in range(len(x)):
        value = to_float32(x[i])
        y[i] = convert_for(y, value * _gaussian_and_cdf(value)[1])


@compile_loop([f"void({x}[::1], {x}[::1], {x}[::1])" for x in ("f4", "u2")])
def exact_gelu_backward(dy: np.ndarray, x: np.ndarray, dx: np.ndarray) -> None:
    """Write `dy` times the derivative of the exact GELU at x into `dx`; vectors of float32 or of bfloat16 bits."""
    for i in range(len(x)):
        value = to_float32(x[i])
        gaussian, cdf = _gaussian_and_cdf(value)
        dx[i] = convert_for(dx, to_float32(dy[i]) * (cdf + value * gaussian * DENSITY))
