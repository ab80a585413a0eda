"""Further activation functions, added to the table `activation.ACTIVATIONS`."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from tricycle import kernels
from tricycle.activation import ACTIVATIONS, Gated
from tricycle.autograd import NeedsGrad
from tricycle.devices import Array, array_module
from tricycle.extra_ops import maximum, minimum
from tricycle.functions import Sigmoid, Tanh
from tricycle.kernels.activations import relu_squared
from tricycle.ops import Op, as_floating, as_tensor, sigmoid
from tricycle.tensor import Operand, Tensor, record

__all__ = ["ClampedSwiGLU", "ExactGeLU", "ReLUSquared", "erf"]


class ExactGeLU(Op):
    """The exact GELU, x times the normal distribution function of x: `GeLU(approximate=False)`."""

    def forward(self, x: Operand) -> Tensor:
        """Compute the exact GELU, x (1 + erf(x / sqrt(2))) / 2, elementwise; float32 for integers."""
        x = as_tensor(x)
        array, xp = as_floating(x.array), x.xp
        below = 0.5 * (1 + erf(array * math.sqrt(0.5)))

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
            density = xp.exp(-0.5 * array * array) * (1 / math.sqrt(2 * math.pi))
            return (grad * (below + array * density),)

        return record(array * below, (x,), backward, "gelu")


class ReLUSquared(Op):
    """The squared ReLU, max(x, 0)^2 (So et al. 2021, "Primer")."""

    def forward(self, x: Operand) -> Tensor:
        """Compute max(x, 0)^2 elementwise; float32 for integers."""
        x = as_tensor(x)
        y, slope = relu_squared(as_floating(x.array))
        return record(y, (x,), lambda grad, needs_grad: (kernels.multiply(grad, slope),), "relu_squared")


class ClampedSwiGLU(Gated):
    """The gated activation (a + 1) b sigmoid(1.702 b) of gpt-oss, with a from -7 to 7 and b up to 7 (OpenAI 2025)."""

    name = "clamped_swiglu"

    def __init__(self) -> None:
        """Initialize without options."""

    def _gate(self, x: Tensor, half: int) -> Tensor:
        """Return (a + 1) b sigmoid(1.702 b) of x = [a, b], with a limited to [-7, 7] and b to at most 7."""
        up, gate = maximum(minimum(x[..., :half], 7.0), -7.0), minimum(x[..., half:], 7.0)
        return (up + 1.0) * (gate * sigmoid(gate * 1.702))


ACTIVATIONS["clamped_swiglu"] = ClampedSwiGLU
ACTIVATIONS["gelu_exact"] = ExactGeLU
ACTIVATIONS["relu_squared"] = ReLUSquared
ACTIVATIONS["sigmoid"] = Sigmoid
ACTIVATIONS["tanh"] = Tanh


def erf(x: Array) -> Array:
    """Compute erf(x) elementwise by a Chebyshev series, in the dtype of x, accurate to float64.

    With t = 2 / (2 + |x|), erfc(|x|) = t exp(-x^2 + p(t)) and p is smooth (Numerical Recipes, section 6.2.2).
    """
    xp = array_module(x)
    magnitude = xp.minimum(xp.abs(x), 6)  # beyond 6, erf is 1 in float64
    t = 2 / (2 + magnitude)
    *higher, lowest = _erfc_polynomial()
    p = xp.zeros_like(t)
    before = xp.zeros_like(t)
    u = 4 * (t - 0.25) / 0.75 - 2  # twice t, mapped from [1/4, 1] to [-1, 1]
    for coefficient in higher:  # Clenshaw's recurrence
        p, before = u * p - before + coefficient, p
    p = 0.5 * u * p - before + lowest
    return xp.sign(x) * (1 - t * xp.exp(p - magnitude * magnitude))


# Cache: constants.
@cache
def _erfc_polynomial() -> tuple[float, ...]:
    """Return Chebyshev coefficients, highest first, of log(erfc(x)) / t + x^2 on t = 2 / (2 + x) in [1/4, 1]."""

    def p(node: Array) -> Array:
        t = 0.25 + 0.375 * (node + 1)
        x = 2 / t - 2
        return np.array([math.log(math.erfc(xi) / ti) + xi * xi for xi, ti in zip(x, t)])

    return tuple(float(c) for c in np.polynomial.chebyshev.chebinterpolate(p, 26)[::-1])
