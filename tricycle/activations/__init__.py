"""Further activation functions, added to the table `activation.ACTIVATIONS`."""

from __future__ import annotations

from tricycle import kernels
from tricycle.activation import ACTIVATIONS, Gated
from tricycle.extra_ops import maximum, minimum
from tricycle.functions import Sigmoid, Tanh
from tricycle.kernels.activations import exact_gelu, exact_gelu_backward, relu_squared
from tricycle.ops import Op, as_floating, as_tensor, sigmoid
from tricycle.tensor import Operand, Tensor, record

__all__ = ["ClampedSwiGLU", "ExactGeLU", "ReLUSquared"]


class ExactGeLU(Op):
    """The exact GELU, x times the normal distribution function of x: `GeLU(approximate=False)`."""

    computes_in_float32 = True  # also 16-bit inputs

    def forward(self, x: Operand) -> Tensor:
        """Compute the exact GELU, x (1 + erf(x / sqrt(2))) / 2, elementwise; float32 for integers."""
        x = as_tensor(x)
        array = as_floating(x.array)
        return record(exact_gelu(array), (x,), lambda grad, needs_grad: (exact_gelu_backward(grad, array),), "gelu")


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
