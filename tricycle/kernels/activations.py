"""Kernels of further activation functions: the squared ReLU and the exact GELU."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel, upcast, upcasting_kernel

TAIL_SCALE, MAX_FITTED = (
    0.3,
    14.0,
)  # of t = 1 / (1 + TAIL_SCALE |x|); |x| up to which the tail of the distribution is fitted


@kernel
def relu_squared(x: Array) -> tuple[Array, Array]:
    """Return max(x, 0) squared, and its derivative 2 max(x, 0), in the dtype of x."""
    positive = array_module(x).maximum(x, 0)
    return positive * positive, 2 * positive


@upcasting_kernel(1)
def exact_gelu(x: Array) -> Array:
    """Compute x times the standard normal distribution function of x (Hendrycks and Gimpel 2016), elementwise."""
    return x * gaussian_and_cdf(x)[1]


@upcasting_kernel(1)
def exact_gelu_backward(grad: Array, x: Array) -> Array:
    """Return the gradient of x from that of exact_gelu(x): grad times (cdf + x density), recomputed from x."""
    x = upcast(x)
    gaussian, cdf = gaussian_and_cdf(x)
    return grad * (cdf + x * gaussian * (1 / math.sqrt(2 * math.pi)))


def gaussian_and_cdf(x: Array) -> tuple[Array, Array]:
    """Return e^(-x^2 / 2) and the standard normal CDF of x, elementwise, in the dtype of x.

    The probability above |x|, divided by e^(-x^2 / 2), is a smooth function of t = 1 / (1 + TAIL_SCALE |x|), as in
    Numerical Recipes, section 6.2.2. A polynomial computes it as accurately as float64, for other dtypes as float32.
    """
    xp = array_module(x)
    *lower, highest = tail_polynomial(18 if x.dtype.itemsize > 4 else 8)
    first, factor = fitted_range()
    magnitude = xp.minimum(xp.abs(x), 40)  # beyond it e^(-x^2 / 2) is 0
    u = (1 / (1 + TAIL_SCALE * magnitude) - first) * factor - 1
    tail = xp.full_like(x, highest)
    for coefficient in reversed(lower):
        tail *= u
        tail += coefficient
    gaussian = xp.exp(-0.5 * (magnitude * magnitude))
    tail *= gaussian
    return gaussian, xp.where(x < 0, tail, 1 - tail)


def fitted_range() -> tuple[float, float]:
    """Return (first, factor), so that u = (t - first) factor - 1 maps t of the fitted |x| to [-1, 1]."""
    first = 1 / (1 + TAIL_SCALE * MAX_FITTED)
    return first, 2 / (1 - first)


# Cache: constants.
@cache
def tail_polynomial(degree: int) -> tuple[float, ...]:
    """Return coefficients, lowest first, of a polynomial in u: the probability above |x| divided by e^(-x^2 / 2)."""
    first, factor = fitted_range()

    def scaled_tail(u: Array) -> Array:
        x = (1 / ((u + 1) / factor + first) - 1) / TAIL_SCALE
        return np.array([0.5 * math.exp(v * v / 2) * math.erfc(v / math.sqrt(2)) for v in x])

    series = np.polynomial.chebyshev.chebinterpolate(scaled_tail, degree)
    return tuple(np.polynomial.chebyshev.cheb2poly(series).tolist())
