"""Activation functions, elementwise (the gated ones halve the last axis), and the table of their names."""

from __future__ import annotations

from collections.abc import Callable

from tricycle import kernels
from tricycle.autograd import grad_enabled_for
from tricycle.functions import Sigmoid
from tricycle.ops import Op, as_floating, as_tensor
from tricycle.tensor import Operand, Tensor, record

Activation = Callable[[Tensor], Tensor]


class ReLU(Op):
    """max(x, 0); the slope at 0 is 0."""

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        y = x.xp.maximum(x.array, 0)
        return record(y, (x,), lambda grad, needs_grad: (grad * (y > 0),), "> 0")


class GeLU(Op):
    """x times the normal distribution function of x (Hendrycks and Gimpel 2016).

    `approximate` is the tanh form of GPT-2; the exact one is the activation "gelu_exact".
    """

    computes_in_float32 = property(lambda self: self.approximate)  # whether 16-bit inputs are computed with in float32

    def __init__(self, approximate: bool = True) -> None:
        self.approximate = approximate

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        if not self.approximate:
            return ACTIVATIONS["gelu_exact"]()(x)
        array = as_floating(x.array)
        if not grad_enabled_for(x):
            return record(kernels.gelu(array), (x,), None, "gelu")
        y, slope = kernels.gelu_with_derivative(array)
        kept = array if slope is None else None
        return record(y, (x,), lambda grad, needs_grad: (kernels.gelu_backward(grad, kept, slope),), "gelu")


class Swish(Op):
    """x sigmoid(x), also called SiLU (Ramachandran et al. 2017)."""

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        array = as_floating(x.array)
        gate = kernels.sigmoid(array)
        y = array * gate
        return record(y, (x,), lambda grad, needs_grad: (grad * (gate + y * (1 - gate)),), "swish")


class Gated(Op):
    """a f(b) for x = [a, b] along the last axis, with any elementwise activation f (Shazeer 2020)."""

    name = "gated"
    activation: Activation

    def __init__(self, activation: Activation) -> None:
        self.activation = activation

    def forward(self, x: Operand) -> Tensor:
        """Map (..., 2 C) to (..., C)."""
        x = as_tensor(x)
        shape = x.array.shape
        if not shape or shape[-1] % 2:
            raise ValueError(f"{type(self).__name__}: expected a last axis of even length, got shape {shape}")
        y = self._gate(x, shape[-1] // 2)
        y.name = self.name
        return y

    def _gate(self, x: Tensor, half: int) -> Tensor:
        return x[..., :half] * self.activation(x[..., half:])


class GLU(Gated):
    """a sigmoid(b) for x = [a, b] along the last axis (Dauphin et al. 2016)."""

    name, activation = "glu", Sigmoid()

    def __init__(self) -> None:
        """Take no option."""


class SwiGLU(GLU):
    """a swish(b) for x = [a, b] along the last axis (Shazeer 2020), as one fused kernel."""

    name, computes_in_float32 = "swiglu", True

    def _gate(self, x: Tensor, half: int) -> Tensor:
        array = as_floating(x.array)
        return record(kernels.swiglu(array), (x,), lambda grad, _: (kernels.swiglu_backward(grad, array),), self.name)


# The activations that a config may name. `tricycle.activations` adds others.
ACTIVATIONS: dict[str, Callable[[], Activation]] = {"gelu": GeLU, "relu": ReLU, "swish": Swish, "swiglu": SwiGLU}


def new_activation(name: str, gated: bool = False) -> Activation:
    """Return an activation by its name in ACTIVATIONS; `gated`: as the gate of `Gated` ("swiglu" is one already)."""
    if name not in ACTIVATIONS:
        raise ValueError(f"new_activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    activation = ACTIVATIONS["swiglu" if gated and name == "swish" else name]()
    return Gated(activation) if gated and not isinstance(activation, Gated) else activation
