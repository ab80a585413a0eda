"""Activation functions (gated ones halve the last axis), and the table of their config names."""

from __future__ import annotations

from collections.abc import Callable

from tricycle import kernels
from tricycle.autograd import grad_enabled_for
from tricycle.functions import Sigmoid
from tricycle.ops import Op, as_floating, as_tensor
from tricycle.tensor import Operand, Tensor, record

Activation = Callable[[Tensor], Tensor]


class ReLU(Op):
    """The rectified linear unit max(x, 0), with a derivative of 0 at 0."""

    def forward(self, x: Operand) -> Tensor:
        """Compute max(x, 0) elementwise, in the dtype of x."""
        x = as_tensor(x)
        y = kernels.in_chunks(x.xp.maximum, x.array, 0)
        return record(y, (x,), lambda grad, _: (kernels.in_chunks(lambda g, y: g * (y > 0), grad, y),), "> 0")


class GeLU(Op):
    """The Gaussian error linear unit (Hendrycks and Gimpel 2016), in GPT-2's tanh form, or exact ("gelu_exact")."""

    computes_in_float32 = True  # also 16-bit inputs

    def __init__(self, approximate: bool = True) -> None:
        self.approximate = approximate

    def forward(self, x: Operand) -> Tensor:
        """Compute GELU(x), x times the normal CDF of x: by tanh if `approximate`, or exactly; float32 for integers."""
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
    """Swish or SiLU: x sigmoid(x) (Ramachandran et al. 2017)."""

    def forward(self, x: Operand) -> Tensor:
        """Compute x sigmoid(x) elementwise, in the dtype of x (float32 for integers)."""
        x = as_tensor(x)
        array = as_floating(x.array)
        gate = kernels.sigmoid(array)
        y = kernels.multiply(array, gate)
        slope = lambda g, y, gate: g * (gate + y * (1 - gate))
        return record(y, (x,), lambda grad, needs_grad: (kernels.in_chunks(slope, grad, y, gate),), "swish")


class Gated(Op):
    """A gated activation: a f(b) for x = [a, b] along the last axis, with an activation f (Shazeer 2020)."""

    name = "gated"
    activation: Activation

    def __init__(self, activation: Activation) -> None:
        self.activation = activation

    def forward(self, x: Operand) -> Tensor:
        """Return a f(b), (..., C), for x = [a, b] of shape (..., 2 C); raise a ValueError for an odd last axis."""
        x = as_tensor(x)
        shape = x.array.shape
        if not shape or shape[-1] % 2:
            raise ValueError(f"{type(self).__name__}: expected a last axis of even length, got shape {shape}")
        y = self._gate(x, shape[-1] // 2)
        y.name = self.name
        return y

    def _gate(self, x: Tensor, half: int) -> Tensor:
        """Return a f(b) of x = [a, b], in which b begins at channel `half`; in `forward`, it is the middle."""
        return x[..., :half] * self.activation(x[..., half:])


class GLU(Gated):
    """The gated linear unit: a sigmoid(b) for x = [a, b] along the last axis (Dauphin et al. 2016)."""

    name, activation = "glu", Sigmoid()

    def __init__(self) -> None:
        """Do nothing: GLU has no options, and `activation` is set on the class."""


class SwiGLU(GLU):
    """The gated activation a swish(b) for x = [a, b] along the last axis (Shazeer 2020), as a fused kernel."""

    name, computes_in_float32 = "swiglu", True

    def _gate(self, x: Tensor, half: int) -> Tensor:
        """Return a swish(b) of x = [a, b] by one kernel, without storing swish(b)."""
        array = as_floating(x.array)
        return record(kernels.swiglu(array), (x,), lambda grad, _: (kernels.swiglu_backward(grad, array),), self.name)


# Activations by config name; `tricycle.activations` adds more.
ACTIVATIONS: dict[str, Callable[[], Activation]] = {"gelu": GeLU, "relu": ReLU, "swish": Swish, "swiglu": SwiGLU}


def new_activation(name: str, gated: bool = False) -> Activation:
    """Make an activation by its name in ACTIVATIONS, else ValueError; with `gated`, its gated form (swish: swiglu)."""
    if name not in ACTIVATIONS:
        raise ValueError(f"new_activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    activation = ACTIVATIONS["swiglu" if gated and name == "swish" else name]()
    return Gated(activation) if gated and not isinstance(activation, Gated) else activation
