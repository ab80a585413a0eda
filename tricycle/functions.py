"""Differentiable functions of models: softmax variants, linear maps, and soft-capping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tricycle import kernels, ops
from tricycle.autograd import NeedsGrad, OwnedGradient, is_evaluating
from tricycle.devices import Array
from tricycle.kernels import FEW_ROWS, ScoreOptions, in_chunks, upcast
from tricycle.ops import Op, as_floating, as_tensor, check_device, check_last_axis, register
from tricycle.tensor import Operand, Tensor, record

# Precisions of matrix products. Weights are always float32; activations have 16 bits if all their products do.
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
# Called as backward(grad, dq, dk, dv): writes the gradients of q, k and v, and returns that of the scales, if any.
AttendBackward = Callable[[Array, Array, Array, Array], Array | None]


class RowSoftmax(Op, is_base=True):
    """The base of all softmax variants (attention normalizers): maps rows of attention scores to weights.

    A variant defines `row_softmax`, and `row_softmax_backward` if its gradient differs from softmax's. `attend` is
    defined in `tricycle.softmaxes`, and overridden by variants with a fused kernel.
    """

    name = "rows"  # of the results
    fused = False  # whether a fused attention kernel exists, whose products may have 16-bit operands
    attend: Callable[..., tuple[Array, AttendBackward]]

    def row_softmax(self, scores: Array) -> Array:
        """Return weights of scores (..., S), -inf where masked; NotImplementedError unless a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} defines no row_softmax")

    def row_softmax_backward(self, grad: Array, scores: Array, weights: Array) -> Array:
        """Return the gradient of the scores from that of the weights, by default as for a plain softmax."""
        return kernels.softmax_backward(grad, weights)

    def forward(self, x: Operand) -> Tensor:
        """Normalize scores x over the last axis to attention weights, in the same shape; ValueError without axes."""
        x = as_non_scalar(self, x)
        scores = as_floating(x.array)
        weights = self.row_softmax(scores)
        backward = lambda grad, needs_grad: (self.row_softmax_backward(grad, scores, weights),)
        return record(weights, (x,), backward, self.name)

    def for_layer(self, n_heads: int, context_window: int | None) -> tuple[RowSoftmax, Tensor | None]:
        """Return a layer's variant, and its learned parameter (for `attend`) or None; by default (self, None)."""
        return self, None


def as_non_scalar(op: Op, x: Operand) -> Tensor:
    """Return x as a Tensor; raise a ValueError if it has no axes."""
    x = as_tensor(x)
    if x.ndim == 0:
        raise ValueError(f"{type(op).__name__}: expected at least one axis, got a single number")
    return x


class Softmax(RowSoftmax):
    """Softmax over the last axis: exp(x_i) / sum_j exp(x_j). A row of -inf gives zeros."""

    name, fused, off_by_one = "softmax", True, False

    def row_softmax(self, scores: Array) -> Array:
        """Return softmax (softmax1 if `off_by_one`) of scores over the last axis; zeros for a row of -inf."""
        return kernels.softmax(scores, self.off_by_one)

    def attend(
        self, q: Array, k: Array, v: Array, score_options: ScoreOptions, mask: Array | None = None, *, dtype: Any = None
    ) -> tuple[Array, AttendBackward]:
        """Return attention of q (B, T, H, D) to k, v (B, S, K, D), and a backward(grad, dq, dk, dv) that writes them.

        H is a multiple of K. The mask, 0 or -inf, (B or 1, H or 1, T or 1, S), is added to the scores. `dtype` is that
        of the result, by default the dtype of q.
        """
        out, logsumexp = kernels.attention(q, k, v, score_options, self.off_by_one, mask, dtype)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> None:
            kernels.attention_backward(grad, q, k, v, out, logsumexp, score_options, dq, dk, dv, mask)

        return out, backward


class Softmax1(Softmax):
    """Softmax off by one: exp(x_i) / (1 + sum_j exp(x_j)); weights may sum to less than 1 (Miller 2023)."""

    name, off_by_one = "softmax1", True


# Softmax variants by config name (`tricycle.softmaxes` adds more); `config_fields`: fields that a constructor takes.
SOFTMAXES: dict[str, Callable[..., RowSoftmax]] = {"softmax": Softmax, "softmax1": Softmax1}


def new_softmax(softmax: str | RowSoftmax, config: Any = None) -> RowSoftmax:
    """Return a RowSoftmax unchanged, or make one by name from `config`; ValueError if unknown, TypeError if neither."""
    if isinstance(softmax, RowSoftmax):
        return softmax
    if not isinstance(softmax, str):
        raise TypeError(f"softmax: expected a name or a RowSoftmax, got {softmax!r}")
    if softmax not in SOFTMAXES:
        raise ValueError(f"softmax: expected one of {', '.join(SOFTMAXES)}, got {softmax!r}")
    fields = () if config is None else getattr(SOFTMAXES[softmax], "config_fields", ())
    return SOFTMAXES[softmax](*(getattr(config, name) for name in fields))


class LogSoftmax(Op):
    """The logarithm of softmax over the last axis, more accurate than log(softmax(x))."""

    def forward(self, x: Operand) -> Tensor:
        """Compute log softmax(x) over the last axis, in the shape of x; float32 for integers."""
        x = as_non_scalar(self, x)
        y, exp = kernels.log_softmax(as_floating(x.array)), x.xp.exp
        to_x = lambda grad, y: grad - exp(y) * upcast(grad).sum(axis=-1, keepdims=True)
        return record(y, (x,), lambda grad, _: (in_chunks(to_x, grad, y, whole_axes=(y.ndim - 1,)),), "log_softmax")


class Sigmoid(Op):
    """The logistic function 1 / (1 + exp(-x)), elementwise."""

    forward = staticmethod(ops.sigmoid)


class Tanh(Op):
    """The hyperbolic tangent, elementwise."""

    forward = staticmethod(ops.tanh)


@register
def linear(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    name: str = "linear",
    precision: str = "float32",
    dtype: Any = None,
    transposed: bool = False,
) -> Tensor:
    """Compute x W + b (x W^T + b if `transposed`) over the last axis of x, in one product; ValueError if shapes differ.

    Args:
        x: (..., from_size). bias: (to_size,).
        weights: (from_size, to_size), or (to_size, from_size) if `transposed`, as for an embedding table. An array of
            another type than x, such as a quantized matrix, is multiplied by its own method `linear`.
        precision: one of PRECISIONS, of the products in forward and backward, not of their sums and results.
        dtype: of the result (..., to_size); by default that of x W.
    """
    array, matrix = x.array, weights.array.T if transposed and weights.ndim == 2 else weights.array
    vector = None if bias is None else bias.array
    if len(matrix.shape) != 2 or (vector is not None and vector.shape != matrix.shape[1:]):
        got = matrix.shape if vector is None else f"{matrix.shape} and {vector.shape}"
        raise ValueError(f"{name}: expected weights (from_size, to_size) and a bias (to_size,), got shapes {got}")
    if array.shape[-1:] != matrix.shape[:1]:
        check_last_axis(f"{name.capitalize()}(from_size={matrix.shape[0]})", x, matrix.shape[0])
    if type(array) is not type(matrix):
        if hasattr(matrix, "linear"):
            return matrix.linear(x, weights, bias, name, precision, dtype)
        check_device(name, array, matrix)
    shape, (from_size, to_size) = array.shape, matrix.shape
    n_rows = math.prod(shape[:-1])  # reshape(-1) fails if from_size or to_size is 0
    rows = as_floating(array).reshape(n_rows, from_size)
    if precision != "float32" and n_rows <= FEW_ROWS and is_evaluating():
        precision = "float32"  # converting the weights would take longer than the product of few rows
    kept = rows.dtype if rows.dtype.itemsize == 2 else None  # keep 16-bit activations
    as_is = precision == "float32"  # operands need no conversion
    a, b = (rows, matrix) if as_is else (kernels.matmul_operand(x, precision) for x in (rows, matrix))
    y = kernels.matmul(a, b, vector, None, dtype or kept, precision)

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | OwnedGradient | None]:
        dx = dweights = dbias = None
        dy = grad.reshape(n_rows, to_size)
        if as_is or not (needs_grad[0] or needs_grad[1]):
            dbias = kernels.sum_rows(dy) if any(needs_grad[2:]) else None
        elif any(needs_grad[2:]):
            dy, dbias = kernels.matmul_operand_and_sums(dy, precision)
        else:
            dy = kernels.matmul_operand(dy, precision)
        if needs_grad[0]:
            dx = kernels.matmul(dy, b.T, None, None, kept, precision).reshape(shape)
        if needs_grad[1]:
            left, right = (a.T, dy) if matrix.flags.c_contiguous else (dy.T, a)  # in the memory order of the matrix
            product = kernels.matmul(left, right, None, None, None, precision)
            dweights = OwnedGradient(product if matrix.flags.c_contiguous != transposed else product.T)
        return [dx, dweights, dbias][: len(args)]

    args = (x, weights) if bias is None else (x, weights, bias)
    return record(y.reshape(*shape[:-1], to_size), args, backward, name)


@register
def to_compute_dtype(x: Tensor, precision: str) -> Tensor:
    """Return x in the activation dtype of a precision on its device, or x itself; the gradient has the dtype of x."""
    array = kernels.to_compute_dtype(x.array, precision)
    if array is x.array:
        return x
    return record(array, (x,), lambda grad, needs_grad: (grad.astype(x.dtype),), "to_compute_dtype")


@register
def softcap(x: Operand, cap: float) -> Tensor:
    """Apply soft-capping, cap * tanh(x / cap), elementwise: bounds |x| by the cap (Gemma Team 2024, section 2)."""
    x = as_tensor(x)
    y = in_chunks(lambda array: cap * x.xp.tanh(array / cap), as_floating(x.array))
    backward = lambda grad, needs_grad, cap: (in_chunks(lambda g, y: g * (1 - (y / cap) ** 2), grad, y),)
    return record(y, (x,), backward, "softcap", None, (cap,))
