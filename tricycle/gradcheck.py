"""Check gradients against central differences, for every op here and for your own."""

from __future__ import annotations

from collections.abc import Callable

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
    """Compare `backward()` with (f(x + eps d) - f(x - eps d)) / (2 eps), in float64.

    The output is made a number by a random weighting of its elements. Each floating input is probed along
    random directions d, and element by element if it is small. Inputs of whole numbers or booleans go
    through as they are.

    Args:
        fn: takes the inputs as Tensors and returns a Tensor; it must give the same result each time.
        inputs: numbers, arrays or Tensors.
        elementwise_up_to: inputs of at most so many elements are also probed one element at a time.

    Raises:
        ValueError: a gradient is missing or wrong; says for which input, where, and both values.
        RuntimeError: a gradient does not have the shape of its input, or no input requires one.
    """
    generator = np.random.default_rng(seed)
    tensors = [_in_float64(x) for x in inputs]
    output = fn(*tensors)
    if output.dtype != np.float64:
        raise ValueError(f"gradcheck: expected {output.name or fn} to keep float64, got {output.dtype}")
    weights = generator.standard_normal(output.shape)
    (output * weights).sum().backward()

    def value() -> float:
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
            tensor.array = start + eps * direction
            above = value()
            tensor.array = start - eps * direction
            below = value()
            tensor.array = start
            numeric, analytic = (above - below) / (2 * eps), float((grad * direction).sum())
            # the difference of two values of this size carries their rounding, divided by 2 eps
            rounding = 4e-16 * max(abs(above), abs(below), 1.0) / eps
            if not abs(numeric - analytic) <= atol + rtol * abs(numeric) + 10 * rounding:
                where = f" at element {int(direction.argmax())}" if np.count_nonzero(direction) == 1 else ""
                title = f"gradcheck: {output.name or fn}, input {i}{where}"
                values = f"backward gives {analytic:.10g}, finite differences give {numeric:.10g}"
                raise ValueError(f"{title}: {values}")


def _in_float64(x: Operand) -> Tensor:
    array = x.numpy() if isinstance(x, Tensor) else np.asarray(x)
    is_batched = isinstance(x, Tensor) and x.is_batched
    requires_grad = not isinstance(x, Tensor) or x.requires_grad
    dtype = array.dtype if array.dtype.kind in "biu" else np.float64
    return to_tensor(np.array(array), dtype=dtype, requires_grad=requires_grad, is_batched=is_batched)
