"""The kernel of the squared ReLU activation."""

from __future__ import annotations

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel


@kernel
def relu_squared(x: Array) -> tuple[Array, Array]:
    """Return max(x, 0) squared, and its derivative 2 max(x, 0), in the dtype of x."""
    positive = array_module(x).maximum(x, 0)
    return positive * positive, 2 * positive
