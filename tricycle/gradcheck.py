"""`gradcheck`: compare the gradients of any function of Tensors with finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tricycle.tensor import Operand, Tensor, no_grad, to_tensor


def gradcheck(
    fn: Callable[..., Tensor],
    *inputs: Operand,
    eps: float = 1e-6,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    n_directions: int = 4,
    elementwise_up_to: int = 64,
    seed: int = 0,
) -> None:
    """Raise a ValueError if a gradient of `fn` differs from (f(x + eps d) - f(x - eps d)) / (2 eps) for random d.

    f is a random weighted sum of the elements of the output. Each floating-point input is checked along random
    directions d, and for each element if it is small. Integer and boolean inputs are passed unchanged.

    Args:
        fn: a deterministic function of the inputs as Tensors, which returns a Tensor.
        inputs: numbers, arrays or Tensors.
        elementwise_up_to: the maximum size of inputs that are also checked for each element.

    Raises:
        ValueError: a gradient is missing or wrong; the message has the input, the place and both values.
        RuntimeError: a gradient does not have the shape of its input, or no input requires a gradient.
        TypeError: `fn` does not return a Tensor.
    """
    generator = np.random.default_rng(seed)
    tensors = [_in_float64(x) for x in inputs]
    output = fn(*tensors)
    if not isinstance(output, Tensor):
        raise TypeError(f"gradcheck: expected a function that returns a Tensor, got {type(output).__name__}")
    weights = generator.standard_normal(output.shape)
    (output * weights).sum().backward()  # raises the RuntimeErrors
    if output.dtype != np.float64:
        raise ValueError(f"gradcheck: expected {output.name or fn} to keep float64, got {output.dtype}")

    def value_at(array: Any) -> float:
        tensor.array = array
        with no_grad():
            return float((fn(*tensors).array * weights).sum())

    for i, tensor in enumerate(tensors):
        if not tensor.requires_grad:
            continue
        grad = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.array
        directions = [generator.standard_normal(tensor.shape) for _ in range(n_directions)]
        if tensor.size <= elementwise_up_to:
            directions += list(np.eye(tensor.size).reshape(tensor.size, *tensor.shape))
        start = tensor.array
        for direction in directions:
            above, below = value_at(start + eps * direction), value_at(start - eps * direction)
            tensor.array = start
            numeric, analytic = (above - below) / (2 * eps), float((grad * direction).sum())
            # the rounding error of the two values, divided by 2 eps
            rounding = 4e-16 * max(abs(above), abs(below), 1.0) / eps
            if not abs(numeric - analytic) <= atol + rtol * abs(numeric) + 10 * rounding:
                where = f" at element {int(direction.argmax())}" if np.count_nonzero(direction) == 1 else ""
                title = f"gradcheck: {output.name or fn}, input {i}{where}"
                values = f"backward gives {analytic:.10g}, finite differences give {numeric:.10g}"
                raise ValueError(f"{title}: {values}")


def _in_float64(x: Operand) -> Tensor:
    """Return a copy as a float64 Tensor (integers and Booleans stay); arrays will require a gradient."""
    array = x.numpy() if isinstance(x, Tensor) else np.asarray(x)
    is_batched = isinstance(x, Tensor) and x.is_batched
    requires_grad = not isinstance(x, Tensor) or x.requires_grad
    dtype = array.dtype if array.dtype.kind in "biu" else np.float64
    return to_tensor(np.array(array), dtype=dtype, requires_grad=requires_grad, is_batched=is_batched)
