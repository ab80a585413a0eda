"""Activation functions, elementwise (the gated ones halve the last axis)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad, grad_enabled_for
from tricycle.devices import Array, array_module
from tricycle.functions import Sigmoid, Tanh
from tricycle.ops import Op, as_tensor, floating
from tricycle.tensor import Operand, Tensor, record


class ReLU(Op):
    """max(x, 0); the slope at 0 is 0."""

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        y = x.xp.maximum(x.array, 0)
        return record(y, (x,), lambda grad, needs_grad: (grad * (y > 0),), "> 0")


class ReLUSquared(Op):
    """max(x, 0) squared (So et al. 2021, "Primer")."""

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        y, slope = kernels.relu_squared(floating(x.array))
        return record(y, (x,), lambda grad, needs_grad: (kernels.multiply(grad, slope),), "relu_squared")


class GeLU(Op):
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016).

    Args:
        approximate: the tanh form that GPT-2 uses; False for the exact one.
    """

    def __init__(self, approximate: bool = True) -> None:
        self.approximate = approximate

    @property
    def computes_wide(self) -> bool:
        return self.approximate

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        array = floating(x.array)
        if self.approximate:
            if not grad_enabled_for(x):
                return record(kernels.gelu(array), (x,), None, "gelu")
            y, slope = kernels.gelu_with_slope(array)
            kept = array if slope is None else None
            return record(y, (x,), lambda grad, needs_grad: (kernels.gelu_backward(grad, kept, slope),), "gelu")
        xp = x.xp
        below = 0.5 * (1 + erf(array * math.sqrt(0.5)))

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
            density = xp.exp(-0.5 * array * array) * (1 / math.sqrt(2 * math.pi))
            return (grad * (below + array * density),)

        return record(array * below, (x,), backward, "gelu")


class Swish(Op):
    """x sigmoid(x), also called SiLU (Ramachandran et al. 2017)."""

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        array = floating(x.array)
        gate = kernels.sigmoid(array)
        y = array * gate
        return record(y, (x,), lambda grad, needs_grad: (grad * (gate + y * (1 - gate)),), "swish")


class Gated(Op):
    """a f(b) for x = [a, b] along the last axis, with any elementwise activation f (Shazeer 2020).

    Args:
        activation: f, from a Tensor to a Tensor.
    """

    name = "gated"
    activation: Callable[[Tensor], Tensor]

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        self.activation = activation

    def forward(self, x: Operand) -> Tensor:
        """(..., 2 C) to (..., C).

        Raises:
            ValueError: a last axis of odd length.
        """
        x = self._checked(x)
        half = x.shape[-1] // 2
        array = floating(x.array)
        right = x[..., half:]
        opened = self.activation(right)
        if not grad_enabled_for(opened, x):
            return record(array[..., :half] * opened.array, (x,), None, self.name)
        if len(opened.args) == 1 and opened.args[0] is right:
            return self._one_node(x, array, opened)
        y = x[..., :half] * opened
        y.name = self.name
        return y

    def _checked(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        if x.ndim == 0 or x.shape[-1] % 2:
            raise ValueError(f"{type(self).__name__}: expected a last axis of even length, got shape {x.shape}")
        return x

    def _one_node(self, x: Tensor, array: Array, opened: Tensor) -> Tensor:
        """Record a f(b) as one node of the graph, which is faster, where f is a single operation on b alone."""
        half = array.shape[-1] // 2
        value, gate = array[..., :half], opened.array
        (to_gate,) = opened.back_fns

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
            dx = array_module(array).empty_like(array)
            dx[..., :half] = grad * gate
            dx[..., half:] = to_gate(Tensor(grad * value, False))
            return (dx,)

        return record(value * gate, (x,), backward, self.name)


class GLU(Gated):
    """a sigmoid(b) for x = [a, b] along the last axis (Dauphin et al. 2016)."""

    name = "glu"
    activation = Sigmoid()

    def __init__(self) -> None:
        """Nothing to choose."""


class SwiGLU(Gated):
    """a swish(b) for x = [a, b] along the last axis (Shazeer 2020), as one fused kernel."""

    name = "swiglu"
    computes_wide = True

    def __init__(self) -> None:
        """Nothing to choose."""

    def forward(self, x: Operand) -> Tensor:
        """(..., 2 C) to (..., C); raises as `Gated` does."""
        x = self._checked(x)
        array = floating(x.array)
        y = kernels.swiglu(array)
        return record(y, (x,), lambda grad, needs_grad: (kernels.swiglu_backward(grad, array),), self.name)


# The activations that a config may name.
ACTIVATIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "gelu": GeLU,
    "gelu_exact": lambda: GeLU(approximate=False),
    "relu": ReLU,
    "relu_squared": ReLUSquared,
    "swish": Swish,
    "sigmoid": Sigmoid,
    "tanh": Tanh,
    "swiglu": SwiGLU,
}


def new_activation(name: str, gated: bool = False) -> Callable[[Tensor], Tensor]:
    """An activation by its name in ACTIVATIONS; `gated`: as the gate of `Gated` ("swiglu" is one already).

    Raises:
        ValueError: an unknown name.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"new_activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    activation = ACTIVATIONS["swiglu" if gated and name == "swish" else name]()
    return Gated(activation) if gated and not isinstance(activation, Gated) else activation


def erf(x: Array) -> Array:
    """The error function to float64's precision; neither NumPy nor CuPy's core has one.

    With t = 2 / (2 + |x|), erfc(|x|) = t exp(-x^2 + p(t)) and p is smooth (Numerical Recipes, section 6.2.2).
    """
    xp = array_module(x)
    magnitude = xp.minimum(xp.abs(x), 6)  # beyond, erf is 1 to the last bit
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
    """Chebyshev coefficients of p on t in [1/4, 1], highest first."""

    def p(node: Array) -> Array:
        t = 0.25 + 0.375 * (node + 1)
        x = 2 / t - 2
        return np.array([math.log(math.erfc(xi) / ti) + xi * xi for xi, ti in zip(x, t)])

    return tuple(float(c) for c in np.polynomial.chebyshev.chebinterpolate(p, 26)[::-1])
