"""Losses as functions of one vector of all parameters, and linear systems with the Hessian."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tricycle.layers import Layer
from tricycle.tensor import Tensor
from tricycle.transforms import functional_call, hvp

Loss = Callable[[Any], Tensor]  # of a vector, Tensor or array (n_parameters,)


def as_function(model: Layer) -> tuple[Callable[[Any, Any], Tensor], np.ndarray]:
    """Return the model as a function (vector, inputs) of the vector of its parameters, and this vector in float64."""
    named = dict(model.named_parameters())
    ends = np.cumsum([p.size for p in named.values()])
    slices = {name: slice(end - p.size, end) for (name, p), end in zip(named.items(), ends)}

    def function(vector: Any, inputs: Any) -> Tensor:
        vector, inputs = (x if isinstance(x, Tensor) else Tensor(x, False) for x in (vector, inputs))  # keeps float64
        parameters = {name: vector[part].reshape(*named[name].shape) for name, part in slices.items()}
        return functional_call(model, parameters, inputs)

    return function, np.concatenate([p.array.astype(np.float64).ravel() for p in named.values()])


def hessian_product(loss: Loss, vector: np.ndarray, damping: float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function v -> (H + damping I) v, where H is the Hessian of the loss at the vector."""
    return lambda v: hvp(loss, (vector,), (v,))[0].array + damping * v


def conjugate_gradient(
    multiply: Callable[[np.ndarray], np.ndarray], b: np.ndarray, n_steps: int = 200, tolerance: float = 1e-6
) -> np.ndarray:
    """Return about x with A x = b, A positive definite, from at most n_steps products; stops at `tolerance`.

    It ends early when |A x - b| < tolerance |b|, or in a direction along which A is not positive.
    """
    x, residual = np.zeros_like(b), b
    direction, square = b, b @ b
    for _ in range(n_steps):
        product = multiply(direction)
        curvature = direction @ product
        if curvature <= 0:
            return x if x.any() else b
        x = x + square / curvature * direction
        residual = residual - square / curvature * product
        previous, square = square, residual @ residual
        if square < tolerance**2 * (b @ b):
            break
        direction = residual + square / previous * direction
    return x
