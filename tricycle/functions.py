"""Softmax, Softmax1 and their kin, and the linear map: functions that models are made of, as ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tricycle import kernels, ops
from tricycle.autograd import LARGE, NeedsGrad, OwnedGradient, is_evaluating
from tricycle.devices import Array, on_gpu
from tricycle.kernels import FEW_ROWS, FewBits, Scoring
from tricycle.ops import Op, as_tensor, as_tensors, check_device, check_width, floating, register
from tricycle.tensor import Operand, Tensor, record

# -------------------------------------------------------------------- softmax and its kin
# Gradients of q, k and v are written into the last three arrays; what comes back is that of the scales, if any.
AttendBackward = Callable[[Array, Array, Array, Array], Array | None]


class RowSoftmax(Op, is_base=True):
    """A way to turn rows of scores into weights, alone or inside attention. The base of all variants.

    A variant defines `rows` and `rows_backward`, arrays in, arrays out. That makes it an op over the last axis, and
    attention can use it, forward and backward, in memory that grows with the number of keys and not its square.
    Those that the kernels know override `attend` and are faster.

    Attributes:
        name: of the results.
        fused: whether the kernels know it, so that its products may have operands of 16 bits.
        by_place: whether its parameter, if any, has a last axis of places in a text.
    """

    name, fused, by_place = "rows", False, False

    def rows(self, scores: Array) -> Array:
        """Weights for scores (..., S), which are -inf where a key is hidden."""
        raise NotImplementedError(f"{type(self).__name__} defines no rows")

    def rows_backward(self, grad: Array, scores: Array, weights: Array) -> Array:
        """The gradient of the scores, from that of the weights."""
        return kernels.softmax_backward(grad, weights)

    def forward(self, x: Operand) -> Tensor:
        x = self._scores(x)
        scores = floating(x.array)
        weights = self.rows(scores)
        return record(weights, (x,), lambda grad, needs_grad: (self.rows_backward(grad, scores, weights),), self.name)

    def attend(
        self, q: Array, k: Array, v: Array, scoring: Scoring, mask: Array | None = None, *, dtype: Any = None
    ) -> tuple[Array, AttendBackward]:
        """Attention of queries (B, T, H, D) to keys and values (B, S, K, D), where H is a multiple of K.

        Args:
            scoring: how scores are made, and which keys a query sees.
            mask: added to the scores, 0 or -inf, (B or 1, H or 1, T or 1, S).
            dtype: of the result; that of the queries unless given. These may have 16 bits for the sake of a product.

        Returns:
            (B, T, H, D), and what takes its gradient and the arrays for those of q, k and v.
        """
        out = kernels.row_attention(q, k, v, scoring, self.rows, mask)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> None:
            kernels.row_attention_backward(grad, q, k, v, scoring, self.rows, self.rows_backward, dq, dk, dv, mask)

        return out if dtype is None else out.astype(dtype, copy=False), backward

    def for_window(self, context_window: int) -> RowSoftmax:
        """The same for a layer with this context window."""
        return self

    def new_scales(self, n_heads: int, context_window: int) -> Tensor | None:
        """The parameter that a layer must hold for it, if any: `attend` takes it last."""
        return None

    def scales_of(self, scales: Array, n_keys: int) -> Array:
        """What `forward` and `rows` take last: with `by_place` that parameter for each position, (..., W)."""
        return scales

    def _scores(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        if x.ndim == 0:
            raise ValueError(f"{type(self).__name__}: expected at least one axis, got a single number")
        return x


class _Fused(RowSoftmax):
    """A variant that the attention kernels know. `nothing`: whether a row may attend to nothing."""

    fused, nothing = True, False

    def attend(
        self, q: Array, k: Array, v: Array, scoring: Scoring, mask: Array | None = None, *, dtype: Any = None
    ) -> tuple[Array, AttendBackward]:
        out, log_total = kernels.attention(q, k, v, scoring, self.nothing, mask, dtype)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> None:
            kernels.attention_backward(grad, q, k, v, out, log_total, scoring, dq, dk, dv, mask)

        return out, backward


class Softmax(_Fused):
    """exp(x_i) / sum_j exp(x_j) over the last axis. A row of -inf alone gives zeros."""

    name = "softmax"

    def rows(self, scores: Array) -> Array:
        return kernels.softmax(scores)


class Softmax1(_Fused):
    """exp(x_i) / (1 + sum_j exp(x_j)) over the last axis: a row may attend to nothing.

    Source: Miller 2023, "Attention is off by one".
    """

    name, nothing = "softmax1", True

    def rows(self, scores: Array) -> Array:
        return kernels.softmax1(scores)


class LogSoftmax(Op):
    """log softmax(x) over the last axis, without the rounding of taking the log afterwards."""

    def forward(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        if x.ndim == 0:
            raise ValueError("LogSoftmax: expected at least one axis, got a single number")
        xp, y = x.xp, kernels.log_softmax(floating(x.array))

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
            return (grad - xp.exp(y) * grad.sum(axis=-1, keepdims=True),)

        return record(y, (x,), backward, "log_softmax")


class Sigmoid(Op):
    """1 / (1 + exp(-x)), elementwise."""

    def forward(self, x: Operand) -> Tensor:
        return ops.sigmoid(x)


class Tanh(Op):
    """The hyperbolic tangent, elementwise."""

    def forward(self, x: Operand) -> Tensor:
        return ops.tanh(x)


@register
def linear(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    name: str = "linear",
    precision: str = "float32",
    dtype: Any = None,
    turned: bool = False,
) -> Tensor:
    """x W + b over the last axis of x, as one matrix product.

    Args:
        x: (..., from_size). weights: (from_size, to_size), of few bits or not. bias: (to_size,).
        precision: in `precision.PRECISIONS`; of the products of forward and backward, not of their sums and results.
        dtype: of the result, to which the bias is rounded.
        turned: the weights come as (to_size, from_size), as a table of embeddings does.

    Returns:
        (..., to_size), in the dtype of x W unless another was given.

    Raises:
        ValueError: the last axis of `x` is not from_size long, or weights and bias do not belong together.
    """
    matrix = weights.array.T if turned and weights.ndim == 2 else weights.array
    _check_linear(name, x, matrix, bias)
    from_size, to_size = matrix.shape
    shape = x.array.shape
    n_rows = math.prod(shape[:-1])  # -1 would not do where from_size or to_size is 0
    rows = floating(x.array).reshape(n_rows, from_size)
    if isinstance(matrix, FewBits):
        if weights.requires_grad:
            raise ValueError(f"{name}: expected weights of 32 bits to train, got {matrix!r}")
        if n_rows <= FEW_ROWS or matrix.dtype.name != precision:
            return _few_bits_linear(x, rows, matrix, bias, name, precision, dtype)
        matrix = matrix.as_array()
    if precision != "float32" and n_rows <= FEW_ROWS and is_evaluating():
        precision = "float32"  # to convert the weights for so few rows would take longer than their product
    kept = rows.dtype if rows.dtype.itemsize == 2 else None  # activations stay as small as they are
    a = _operand(rows, precision)
    b = _operand(matrix, precision)
    y = kernels.matmul(a, b, None if bias is None else bias.array, None, dtype or kept, precision)

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | OwnedGradient | None]:
        dx = dweights = dbias = None
        dy = grad.reshape(n_rows, to_size)
        sums = bias is not None and needs_grad[2]
        if needs_grad[0] or needs_grad[1]:
            dy, dbias = _operand_and_sums(dy, precision) if sums else (_operand(dy, precision), None)
        elif sums:
            dbias = kernels.sum_rows(dy)
        if needs_grad[0]:
            dx = kernels.matmul(dy, b.T, None, None, kept, precision).reshape(shape)
        if needs_grad[1]:
            dmatrix = _matmul_like(matrix, a.T, dy, precision)
            dweights = OwnedGradient(dmatrix.T if turned else dmatrix)
        return [dx, dweights, dbias][: len(args)]

    args = (x, weights) if bias is None else (x, weights, bias)
    return record(y.reshape(*shape[:-1], to_size), args, backward, name)


def _matmul_like(matrix: Array, a: Array, b: Array, precision: str) -> Array:
    """The product, lying in memory as the matrix does: row by row, or column by column."""
    if matrix.flags.c_contiguous:
        return kernels.matmul(a, b, None, None, None, precision)
    return kernels.matmul(b.T, a.T, None, None, None, precision).T


# In float32 operands are what they are. No kernel need be asked, which is much of what a small network costs.
def _operand(x: Array, precision: str) -> Array:
    return x if precision == "float32" else kernels.operand(x, precision)


def _operand_and_sums(x: Array, precision: str) -> tuple[Array, Array]:
    return (x, kernels.sum_rows(x)) if precision == "float32" else kernels.operand_and_sums(x, precision)


def _check_linear(name: str, x: Tensor, matrix: Any, bias: Tensor | None) -> None:
    shape = matrix.shape
    if len(shape) != 2 or (bias is not None and bias.shape != shape[1:]):
        got = shape if bias is None else f"{shape} and {bias.shape}"
        raise ValueError(f"{name}: expected weights (from_size, to_size) and a bias (to_size,), got shapes {got}")
    if x.array.shape[-1:] != shape[:1]:
        check_width(f"{name.capitalize()}(from_size={shape[0]})", x, shape[0])
    if not isinstance(matrix, FewBits) or on_gpu(x.array):
        check_device(name, x.array, matrix)


def _few_bits_linear(
    x: Tensor, rows: Array, matrix: FewBits, bias: Tensor | None, name: str, precision: str, dtype: Any
) -> Tensor:
    """As `linear`, for weights of few bits, which have no gradient."""
    y = kernels.few_bits_matmul(rows, matrix, None if bias is None else bias.array, precision)
    y = y if dtype is None else y.astype(dtype, copy=False)

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | None]:
        dy = grad.reshape(len(rows), matrix.shape[1])
        dx = kernels.few_bits_matmul(dy, matrix.T).reshape(x.shape) if needs_grad[0] else None
        dbias = kernels.sum_rows(dy) if bias is not None and needs_grad[1] else None
        return [dx, dbias][: len(args)]

    args = (x,) if bias is None else (x, bias)
    return record(y.reshape(*x.shape[:-1], matrix.shape[1]), args, backward, name)


@register
def to_compute_dtype(x: Tensor, precision: str) -> Tensor:
    """x in the dtype that is computed in at that precision on its device; its gradient in the dtype of x."""
    array = kernels.to_compute_dtype(x.array, precision)
    if array is x.array:
        return x
    return record(array, (x,), lambda grad, needs_grad: (grad.astype(x.dtype),), "to_compute_dtype")


@register
def residual(x: Operand, part: Operand) -> Tensor:
    """x + part, as `ops.add` of two that have one shape, shared by all threads: what a block does with its input."""
    x, part = as_tensors(x, part)
    a, b = x.array, part.array
    if a.size < LARGE or a.shape != b.shape or a.dtype != b.dtype or type(a) is not type(b):
        return ops.add(x, part)
    return record(kernels.add(a, b), (x, part), lambda grad, needs_grad: (grad, grad), "badd")


@register
def soft_cap(x: Operand, cap: float) -> Tensor:
    """cap tanh(x / cap), elementwise: x where it is small, and never beyond the cap (Gemma Team 2024, section 2)."""
    x = as_tensor(x)
    array = floating(x.array)
    bent = x.xp.tanh(array / cap)
    return record(cap * bent, (x,), lambda grad, needs_grad: (grad * (1 - bent * bent),), "soft_cap")
