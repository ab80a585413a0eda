"""One element at a time: activations, products, dropout's masks, rotary positions."""

from __future__ import annotations

import math

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import wide, widening

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


@kernel
@widening(1)
def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), by exp(-|x|), which cannot overflow and keeps the precision of small results."""
    xp = array_module(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1, small) / (1 + small)


@kernel
@widening(1)
def gelu(x: Array) -> Array:
    """Hendrycks and Gimpel 2016, the tanh form that GPT-2 uses."""
    xp = array_module(x)
    return 0.5 * x * (1 + xp.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))


@kernel
@widening(2)
def gelu_with_slope(x: Array) -> tuple[Array, Array | None]:
    """gelu(x) and its derivative: both need the same tanh, and a product is all that is left for the backward.

    A faster version may give None for the derivative: then `gelu_backward` finds it again in less time than it takes to
    write and read it.
    """
    xp = array_module(x)
    t = xp.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))
    slope = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
    return 0.5 * x * (1 + t), 0.5 * (1 + t + x * (1 - t * t) * slope)


@kernel
@widening(1)
def swiglu(x: Array) -> Array:
    """a b sigmoid(b) for [a, b] = x along the last axis (Shazeer 2020)."""
    half = x.shape[-1] // 2
    b = x[..., half:]
    return x[..., :half] * (b * sigmoid(b))


@kernel
@widening(1)
def swiglu_backward(grad: Array, x: Array) -> Array:
    """The gradient of x, given that of swiglu(x). The sigmoids are found again, and need no memory."""
    x = wide(x)
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    gate = sigmoid(b)
    dx = array_module(x).empty(x.shape, grad.dtype)
    dx[..., :half] = grad * (b * gate)
    dx[..., half:] = grad * a * gate * (1 + b * (1 - gate))
    return dx


@kernel
def gelu_backward(grad: Array, x: Array | None, slope: Array | None) -> Array:
    """The gradient of x, given that of gelu(x), and x or the derivative."""
    if slope is None:
        slope = gelu_with_slope.plain(x)[1]
    return multiply.plain(grad, slope)


@kernel
def relu_squared(x: Array) -> tuple[Array, Array]:
    """max(x, 0) squared, and its derivative."""
    positive = array_module(x).maximum(x, 0)
    return positive * positive, 2 * positive


@kernel
@widening(1)
def multiply(a: Array, b: Array) -> Array:
    """a b; b may be a 0-d array."""
    return a * b


@kernel
def add(a: Array, b: Array, out: Array | None = None) -> Array:
    """a + b of one shape, written into `out` where that is given; it may be a or b."""
    return a + b if out is None else array_module(a).add(a, b, out=out)


@kernel
def random_mask(like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator) -> Array:
    """Zeros and 1 / keep, each element kept with probability `keep`, on the device and in the dtype of `like`.

    A host generator decides, so a run can be repeated and resumed on any device.
    """
    mask = array_module(like).asarray(generator.random(shape, dtype=np.float32) < keep).astype(like.dtype)
    mask /= keep
    return mask


@kernel
@widening(1)
def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pairs (x_i, x_{i + D/2}) by an angle for each position (Su et al. 2021, RoFormer).

    Args:
        x: (B, T, H, D). cos, sin: (T, D/2).
    """
    xp = array_module(x)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
