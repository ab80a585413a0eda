"""Softmax, Softmax1 and their kin, and the linear map: functions that models are made of, as ops."""

from __future__ import annotations

from tricycle import kernels, ops
from tricycle.backend import Array
from tricycle.ops import Op, as_tensor, check_device, floating, register
from tricycle.tensor import BackFn, Operand, Tensor, record


def shared_backward(compute, n_args: int) -> tuple[BackFn, ...]:
    """The back_fns of an op whose gradients all come out of one computation.

    Args:
        compute: from the output's gradient, an array, to a tuple of `n_args` arrays.
    """
    latest: list = [(None, ())]

    def back_fn(i: int) -> BackFn:
        def gradient(grad: Tensor) -> Array:
            found = latest[0]  # read and set in one step each: two threads may be here
            if found[0] is not grad:
                found = latest[0] = (grad, compute(grad.array))
            return found[1][i]

        return gradient

    return tuple(back_fn(i) for i in range(n_args))


class _OverLastAxis(Op):
    """A kernel over the last axis with a gradient from the output alone."""

    def _normalise(self, x: Operand, kernel, name: str) -> Tensor:
        x = as_tensor(x)
        if x.ndim == 0:
            raise ValueError(f"{type(self).__name__}: expected at least one axis, got a single number")
        y = kernel(floating(x.array))
        return record(y, (x,), (lambda grad: kernels.softmax_backward(grad.array, y),), name)


class Softmax(_OverLastAxis):
    """exp(x_i) / sum_j exp(x_j) over the last axis. A row of -inf alone gives zeros."""

    def forward(self, x: Operand) -> Tensor:
        return self._normalise(x, kernels.softmax, "softmax")


class Softmax1(_OverLastAxis):
    """exp(x_i) / (1 + sum_j exp(x_j)) over the last axis: a row may attend to nothing.

    Source: Miller 2023, "Attention is off by one".
    """

    def forward(self, x: Operand) -> Tensor:
        return self._normalise(x, kernels.softmax1, "softmax1")


class LogSoftmax(Op):
    """log softmax(x) over the last axis, without the rounding of taking the log afterwards."""

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        if x.ndim == 0:
            raise ValueError("LogSoftmax: expected at least one axis, got a single number")
        xp, y = x.xp, kernels.log_softmax(floating(x.array))

        def back_fn(grad: Tensor) -> Array:
            return grad.array - xp.exp(y) * grad.array.sum(axis=-1, keepdims=True)

        return record(y, (x,), (back_fn,), "log_softmax")


class Sigmoid(Op):
    """1 / (1 + exp(-x)), elementwise."""

    def forward(self, x: Operand) -> Tensor:
        return ops.sigmoid(x)


class Tanh(Op):
    """The hyperbolic tangent, elementwise."""

    def forward(self, x: Operand) -> Tensor:
        return ops.tanh(x)


@register
def linear(x: Tensor, weights: Tensor, bias: Tensor | None = None, name: str = "linear") -> Tensor:
    """x W + b over the last axis of x, as one matrix product.

    Args:
        x: (..., from_size). weights: (from_size, to_size). bias: (to_size,).

    Returns:
        (..., to_size).

    Raises:
        ValueError: the last axis of `x` is not from_size long, or weights and bias do not belong together.
    """
    if weights.ndim != 2 or (bias is not None and bias.shape != weights.shape[1:]):
        got = weights.shape if bias is None else f"{weights.shape} and {bias.shape}"
        raise ValueError(f"{name}: expected weights (from_size, to_size) and a bias (to_size,), got shapes {got}")
    from_size, to_size = weights.shape
    if x.ndim == 0 or x.shape[-1] != from_size:
        title = f"{name.capitalize()}(from_size={from_size})"
        raise ValueError(f"{title}: expected the last axis to be {from_size}, got shape {x.shape}")
    check_device(name, x.array, weights.array)
    rows, matrix = floating(x.array).reshape(-1, from_size), weights.array
    y = kernels.matmul(rows, matrix, None if bias is None else bias.array)

    def grads(grad: Tensor) -> Array:
        return grad.array.reshape(-1, to_size)

    def weight_grad(grad: Tensor) -> Array:
        if matrix.flags.c_contiguous:
            return kernels.matmul(rows.T, grads(grad))
        return kernels.matmul(grads(grad).T, rows).T  # in the layout of the weights: tied ones come transposed

    args: tuple[Tensor, ...] = (x, weights)
    back_fns: tuple[BackFn, ...] = (
        lambda grad: kernels.matmul(grads(grad), matrix.T).reshape(x.shape),
        weight_grad,
    )
    if bias is not None:
        args += (bias,)
        back_fns += (lambda grad: kernels.sum_rows(grads(grad)),)
    return record(y.reshape(*x.shape[:-1], to_size), args, back_fns, name)
