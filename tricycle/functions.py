"""Softmax, Softmax1 and their kin, and the linear map: functions that models are made of, as ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels, ops
from tricycle.backend import Array, array_module
from tricycle.ops import Op, as_tensor, check_device, check_width, floating, positive, register
from tricycle.tensor import BackFn, Operand, Tensor, no_grad, record, to_tensor

# How exactly matrix products are made, and on a GPU what activations are kept in. Weights are float32 always.
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")


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
    """

    name, fused = "rows", False

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
        return record(weights, (x,), (lambda grad: self.rows_backward(grad.array, scores, weights),), self.name)

    def attend(
        self, q: Array, k: Array, v: Array, offset: int | None, mask: Array | None = None
    ) -> tuple[Array, AttendBackward]:
        """Attention of queries (B, T, H, D) to keys and values (B, S, H, D).

        Args:
            offset: query t sees the keys up to t + offset; None: all of them.
            mask: added to the scores, 0 or -inf, (B or 1, H or 1, T or 1, S).

        Returns:
            (B, T, H, D), and what takes its gradient and the arrays for those of q, k and v.
        """
        out = kernels.row_attention(q, k, v, offset, self.rows, mask)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> None:
            kernels.row_attention_backward(grad, q, k, v, offset, self.rows, self.rows_backward, dq, dk, dv, mask)

        return out, backward

    def for_window(self, context_window: int) -> RowSoftmax:
        """The same for a layer with this context window."""
        return self

    def new_scales(self, n_heads: int, context_window: int) -> Tensor | None:
        """The parameter that a layer must hold for it, if any: `forward`, `rows` and `attend` take it last."""
        return None

    def _scores(self, x: Operand) -> Tensor:
        x = as_tensor(x)
        if x.ndim == 0:
            raise ValueError(f"{type(self).__name__}: expected at least one axis, got a single number")
        return x


class _Fused(RowSoftmax):
    """A variant that the attention kernels know. `nothing`: whether a row may attend to nothing."""

    fused, nothing = True, False

    def attend(
        self, q: Array, k: Array, v: Array, offset: int | None, mask: Array | None = None
    ) -> tuple[Array, AttendBackward]:
        out, log_total = kernels.attention(q, k, v, offset, self.nothing, mask)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> None:
            kernels.attention_backward(grad, q, k, v, out, log_total, offset, dq, dk, dv, mask)

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


class AdaptiveSoftmax(RowSoftmax):
    """softmax(beta x) over the last axis, with an inverse temperature beta that grows with the entropy of softmax(x).

    So attention stays sharp over more items than it was trained on. beta is a polynomial of the entropy (in nats),
    at least 1 (never blur), and 1 where the entropy is low (leave what is sharp).

    Source: Velickovic et al. 2024, "softmax is not enough (for sharp out-of-distribution)", whose fit is the default;
    `tricycle_lab.temperature` fits another.

    Args:
        coefficients: of the polynomial, highest power first.
        threshold: the entropy above which it is used.
        stop_gradient: take beta as given in the backward.
    """

    name = "adaptive_softmax"

    def __init__(
        self, coefficients: Sequence[float] = (-0.037, 0.481, -2.3, 4.917, -1.791), threshold: float = 0.5,
        stop_gradient: bool = False,
    ) -> None:
        self.coefficients = tuple(float(c) for c in coefficients)
        if not self.coefficients or not all(map(math.isfinite, self.coefficients)):
            raise ValueError(f"AdaptiveSoftmax: expected finite coefficients, got {self.coefficients}")
        self.threshold = threshold
        self.stop_gradient = stop_gradient

    def rows(self, scores: Array) -> Array:
        return kernels.softmax(scores * self.temperature(scores)[0])

    def rows_backward(self, grad: Array, scores: Array, weights: Array) -> Array:
        beta, slope, plain, log_plain, entropy = self.temperature(scores)
        dproduct = kernels.softmax_backward(grad, weights)
        dscores = beta * dproduct
        if not self.stop_gradient:
            xp = array_module(scores)
            dbeta = (dproduct * xp.where(weights > 0, scores, 0)).sum(axis=-1, keepdims=True)
            dscores -= dbeta * slope * plain * (log_plain + entropy)
        return dscores

    def temperature(self, scores: Array) -> tuple[Array, ...]:
        """beta and its slope by the entropy, for each row; softmax(scores), its log (0 where it is 0), its entropy."""
        xp = array_module(scores)
        plain = kernels.softmax(scores)
        log_plain = xp.log(xp.where(plain > 0, plain, 1))
        entropy = -(plain * log_plain).sum(axis=-1, keepdims=True)
        value = slope = xp.zeros_like(entropy)
        for c in self.coefficients:  # Horner's scheme, for the value and the derivative
            value, slope = value * entropy + c, slope * entropy + value
        used = (entropy > self.threshold) & (value > 1)
        return xp.where(used, value, 1), xp.where(used, slope, 0), plain, log_plain, entropy


class _Part(NamedTuple):
    """What one block of keys gives to the queries that see any of it (query t sees its keys up to t + offset)."""

    queries: slice
    keys: slice
    offset: int | None
    mask: Array | None
    out: Array
    log_total: Array


class BlockSoftmax(RowSoftmax):
    """Softmax within each block of keys by itself, times a scale for each block and query position.

    With the right scales the blocks, put together, are the softmax of the whole row: the share of all exponentials
    that lies in each block, which FlashAttention computes on the way (Dao et al. 2022). Here they are learned instead,
    the same for all inputs, so that blocks need know nothing of each other.

    Args:
        n_blocks: the keys are cut into so many blocks of equal length (the last may be shorter).
        correction: "learned": scales are given with each call. "none": all are 1. "exact": the right ones of each row,
            which learned ones should come close to.
        per_head: each head of attention has scales of its own.
        length: how many keys are cut; those that come unless given. A layer gives its context window, so that a key
            stays in its block while a text grows.
    """

    name = "block_softmax"

    def __init__(
        self, n_blocks: int = 2, correction: str = "learned", per_head: bool = False, length: int | None = None
    ) -> None:
        positive("BlockSoftmax", n_blocks=n_blocks)
        if correction not in ("learned", "none", "exact"):
            raise ValueError(f"BlockSoftmax: expected correction to be learned, none or exact, got {correction!r}")
        self.n_blocks, self.correction, self.per_head, self.length = n_blocks, correction, per_head, length

    def for_window(self, context_window: int) -> BlockSoftmax:
        return BlockSoftmax(self.n_blocks, self.correction, self.per_head, self.length or context_window)

    def new_scales(self, n_heads: int, context_window: int) -> Tensor | None:
        heads = (n_heads,) if self.per_head else ()
        shape = (*heads, self.n_blocks, context_window)
        return to_tensor(np.ones(shape)) if self.correction == "learned" else None

    def forward(self, x: Operand, scales: Tensor | None = None) -> Tensor:
        """
        Args:
            x: scores (..., T, S).
            scales: (..., n_blocks, T), with "learned" only.

        Raises:
            ValueError: scales missing, misshapen, or given where they have no use.
        """
        x = self._scores(x)
        wanted = (self.n_blocks, *x.shape[-2:-1]) if self.correction == "learned" else None
        got = None if scales is None else scales.shape
        if (got if got is None or wanted is None else got[-len(wanted) :]) != wanted:
            raise ValueError(f"{self}: expected scales of shape (..., n_blocks, T), here {wanted}, got {got}")
        whole, parts = Softmax()(x), []
        for i, keys in enumerate(self._blocks(x.shape[-1])):
            part = Softmax()(x[..., keys])
            if self.correction == "exact":
                part = part * whole[..., keys].sum(axis=-1, keepdims=True)
            elif scales is not None:
                part = part * (scales[i] if x.ndim == 1 else scales[..., i, :, None])
            parts.append(part)
        result = ops.concatenate(parts, axis=-1) if parts else whole
        result.name = self.name
        return result

    def rows(self, scores: Array, scales: Array | None = None) -> Array:
        with no_grad():
            return self(Tensor(scores), None if scales is None else Tensor(scales)).array

    def attend(
        self, q: Array, k: Array, v: Array, offset: int | None, mask: Array | None = None, scales: Array | None = None
    ) -> tuple[Array, AttendBackward]:
        """As each block's attention to its keys by the queries that see any of them.

        Args:
            scales: ([H,] n_blocks, W), for as many positions as there are queries or more, with "learned" only.

        Raises:
            ValueError: scales missing, too few, or given where they have no use; keys beyond the last block.
        """
        xp, (n_keys, last) = array_module(q), (k.shape[1], (offset or 0) + q.shape[1])
        wanted = (self.n_blocks, last) if self.correction == "learned" else None
        got = None if scales is None else (scales.shape[-2], min(scales.shape[-1], last))
        if got != wanted or (wanted and n_keys > (self.length or n_keys)):
            found = f"{n_keys} keys and scales {None if scales is None else scales.shape}"
            raise ValueError(f"{self}: expected no more keys than length and scales {wanted} or longer, got {found}")
        saved: dict[int, tuple] = {}
        out = xp.zeros(q.shape, q.dtype)

        def forward(items: slice) -> None:
            here = _of_items(mask, items)
            parts = self._attend_blocks(q[items], k[items], v[items], offset, here)
            exact, shape = self.correction == "exact", (items.stop - items.start, q.shape[2], q.shape[1])
            log_total = _log_of_sum(xp, parts, shape) if exact else None
            factors = [self._factor(xp, i, part, offset or 0, scales, log_total) for i, part in enumerate(parts)]
            for part, factor in zip(parts, factors):
                out[items, part.queries] += part.out * factor
            saved[items.start] = parts, factors, log_total, here

        kernels.for_items(q, forward)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> Array | None:
            found: dict[int, Any] = {}

            def work(items: slice) -> None:
                found[items.start] = self._backward_blocks(
                    grad[items], q[items], k[items], v[items], out[items], offset, scales, saved[items.start],
                    dq[items], dk[items], dv[items],
                )

            kernels.for_items(q, work)
            return None if scales is None else xp.stack([found[start] for start in sorted(found)]).sum(axis=0)

        return out, backward

    def _attend_blocks(self, q: Array, k: Array, v: Array, offset: int | None, mask: Array | None) -> list[_Part]:
        n_queries, parts = q.shape[1], []
        for keys in self._blocks(k.shape[1]):
            first = 0 if offset is None else max(0, keys.start - offset)
            if first >= n_queries:
                break
            place = None if offset is None else offset + first - keys.start
            here = None if mask is None else mask[:, :, first if mask.shape[2] > 1 else 0 :, keys]
            found = kernels.attention(q[:, first:], k[:, keys], v[:, keys], place, False, here)
            parts.append(_Part(slice(first, n_queries), keys, place, here, *found))
        return parts

    def _backward_blocks(
        self, grad: Array, q: Array, k: Array, v: Array, out: Array, offset: int | None, scales: Array | None,
        saved: tuple, dq: Array, dk: Array, dv: Array,
    ) -> Array | None:
        parts, factors, log_total, mask = saved
        if log_total is not None:
            kernels.attention_backward(grad, q, k, v, out, log_total, offset, dq, dk, dv, mask)
            return None
        xp = array_module(q)
        dscales = None if scales is None else xp.zeros_like(scales)
        for array in (dq, dk, dv):
            array[...] = 0
        for i, (part, factor) in enumerate(zip(parts, factors)):
            seeing, keys, place, here, block_out, block_total = part
            block_grad = grad[:, seeing]
            if dscales is not None:
                shares = (block_grad * block_out).sum(axis=-1).sum(axis=0)  # (T, H)
                places = slice(seeing.start + (offset or 0), seeing.stop + (offset or 0))
                dscales[..., i, places] = shares.T if self.per_head else shares.sum(axis=1)
                block_grad = block_grad * factor
            dqueries = xp.empty(block_out.shape, q.dtype)
            kernels.attention_backward(block_grad, q[:, seeing], k[:, keys], v[:, keys], block_out, block_total, place,
                                       dqueries, dk[:, keys], dv[:, keys], here)  # fmt: skip
            dq[:, seeing] += dqueries
        return dscales

    def _blocks(self, n_keys: int) -> list[slice]:
        step = max(1, -(-(self.length or n_keys) // self.n_blocks))
        return [slice(start, min(start + step, n_keys)) for start in range(0, n_keys, step)]

    def _factor(
        self, xp: Any, i: int, part: _Part, start: int, scales: Array | None, log_total: Array | None
    ) -> Array | int:
        """What the output of block i is multiplied by: one for each query [and head]."""
        if log_total is not None:
            return xp.exp(part.log_total - log_total[..., part.queries]).transpose(0, 2, 1)[..., None]
        if scales is None:
            return 1
        at = scales[..., i, start + part.queries.start : start + part.queries.stop]
        return at.T.reshape(at.shape[-1], -1, 1)


def _of_items(mask: Array | None, items: slice) -> Array | None:
    return mask if mask is None or len(mask) == 1 else mask[items]


def _log_of_sum(xp: Any, parts: list[_Part], shape: tuple[int, ...]) -> Array:
    """The log of each row's sum of exponentials, from those of its blocks."""
    logs = xp.full((len(parts), *shape), -np.inf, parts[0].log_total.dtype)
    for i, part in enumerate(parts):
        logs[i][..., part.queries] = part.log_total
    largest = logs.max(axis=0)
    largest = xp.where(xp.isneginf(largest), 0, largest)
    total = xp.exp(logs - largest).sum(axis=0)
    return largest + xp.log(xp.where(total == 0, 1, total))


# The variants that a config may name. A new one is its function with its gradient, and a line here.
SOFTMAXES: dict[str, Callable[[], RowSoftmax]] = {
    "softmax": Softmax, "softmax1": Softmax1, "adaptive": AdaptiveSoftmax, "blocks": BlockSoftmax,
}  # fmt: skip


def new_softmax(softmax: str | RowSoftmax, n_blocks: int = 2) -> RowSoftmax:
    """A variant by its name in SOFTMAXES, or as it is.

    Raises:
        ValueError: an unknown name.
        TypeError: neither name nor variant.
    """
    if isinstance(softmax, RowSoftmax):
        return softmax
    if not isinstance(softmax, str):
        raise TypeError(f"softmax: expected a name or a RowSoftmax, got {softmax!r}")
    if softmax not in SOFTMAXES:
        raise ValueError(f"softmax: expected one of {', '.join(SOFTMAXES)}, got {softmax!r}")
    return BlockSoftmax(n_blocks) if softmax == "blocks" else SOFTMAXES[softmax]()


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
def linear(
    x: Tensor, weights: Tensor, bias: Tensor | None = None, name: str = "linear", precision: str = "float32"
) -> Tensor:
    """x W + b over the last axis of x, as one matrix product.

    Args:
        x: (..., from_size). weights: (from_size, to_size). bias: (to_size,).
        precision: in PRECISIONS; of the three products of forward and backward, not of their sums and results.

    Returns:
        (..., to_size).

    Raises:
        ValueError: the last axis of `x` is not from_size long, or weights and bias do not belong together.
    """
    if weights.ndim != 2 or (bias is not None and bias.shape != weights.shape[1:]):
        got = weights.shape if bias is None else f"{weights.shape} and {bias.shape}"
        raise ValueError(f"{name}: expected weights (from_size, to_size) and a bias (to_size,), got shapes {got}")
    from_size, to_size = weights.shape
    check_width(f"{name.capitalize()}(from_size={from_size})", x, from_size)
    check_device(name, x.array, weights.array)
    rows, matrix = floating(x.array).reshape(-1, from_size), weights.array
    kept = rows.dtype if rows.dtype.itemsize == 2 else None  # activations stay as small as they are
    a, b = kernels.operand(rows, precision), kernels.operand(matrix, precision)
    y = kernels.matmul(a, b, None if bias is None else bias.array, None, kept, precision)
    if bias is not None and bias.requires_grad and (x.requires_grad or weights.requires_grad):
        both = lambda grad: kernels.operand_and_sums(grad.reshape(-1, to_size), precision)
        convert, bias_grad = shared_backward(both, 2)
    else:
        (convert,) = shared_backward(lambda grad: (kernels.operand(grad.reshape(-1, to_size), precision),), 1)
        bias_grad = lambda grad: kernels.sum_rows(grad.array.reshape(-1, to_size))
    as_operand: Callable[[Tensor], Array] = convert

    def input_grad(grad: Tensor) -> Array:
        return kernels.matmul(as_operand(grad), b.T, None, None, kept, precision).reshape(x.shape)

    def weight_grad(grad: Tensor) -> Array:
        if matrix.flags.c_contiguous:
            return kernels.matmul(a.T, as_operand(grad), None, None, None, precision)
        # in the layout of the weights: tied ones come transposed
        return kernels.matmul(as_operand(grad).T, a, None, None, None, precision).T

    args: tuple[Tensor, ...] = (x, weights)
    back_fns: tuple[BackFn, ...] = (input_grad, weight_grad)
    if bias is not None:
        args += (bias,)
        back_fns += (bias_grad,)
    return record(y.reshape(*x.shape[:-1], to_size), args, back_fns, name)


@register
def to_activations(x: Tensor, precision: str) -> Tensor:
    """x in the dtype that activations have at that precision on its device; its gradient in the dtype of x."""
    array = kernels.activations(x.array, precision)
    return x if array is x.array else record(array, (x,), (lambda grad: grad.array.astype(x.dtype),), "to_activations")


def check_precision(precision: str) -> str:
    """The name of a precision as it is.

    Raises:
        ValueError: an unknown name.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return precision
