"""Attention as one op of queries, keys and values.

Shapes: B batch, T queries, S keys, H heads of queries, K heads of keys and values, D head size, E size of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tricycle import kernels
from tricycle.attention.masks import Mask, additive_mask
from tricycle.autograd import NeedsGrad, grad_enabled_for
from tricycle.devices import Array, array_module, side_by_side
from tricycle.functions import RowSoftmax, new_softmax
from tricycle.kernels import Scoring
from tricycle.ops import Op, as_tensors, check_device, floating
from tricycle.tensor import Operand, Tensor, record


class Attention(Op):
    """Each query's mean of the values, weighted by how well the keys fit it: softmax(Q K^T / sqrt(D)) V in each head.

    Forward and backward are one node of the graph, in memory that grows with the number of tokens.

    Sources: Vaswani et al. 2017, section 3.2; fewer heads of keys: Ainslie et al. 2023; windows: Beltagy et al. 2020;
    caps: Gemma Team 2024, section 2.

    Args:
        softmax: what turns scores into weights: a name in `functions.SOFTMAXES`, or an object.
        causal: a query sees the keys up to its own place, the last query being at the last key.
        window: of these it sees the last so many, its own included; None for all. Needs `causal`.
        scale: scores are products of queries and keys times this; 1 / sqrt(D) unless given.
        cap: scores s become cap tanh(s / cap); None leaves them.

    Raises:
        ValueError: settings out of range.
    """

    def __init__(
        self,
        softmax: str | RowSoftmax = "softmax",
        causal: bool = True,
        window: int | None = None,
        scale: float | None = None,
        cap: float | None = None,
    ) -> None:
        self.softmax: Any = new_softmax(softmax)
        self.causal = causal
        self.window = window
        self.scale = scale
        self.cap = cap
        if window is not None and (window < 1 or not causal):
            raise ValueError(f"Attention: expected a window of 1 or more, with causal=True, got {window} and {causal}")
        if cap is not None and not cap > 0:
            raise ValueError(f"Attention: expected a cap above 0, got {cap!r}")

    def forward(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        mask: Mask = None,
        scales: Tensor | None = None,
        precision: str = "float32",
    ) -> Tensor:
        """
        Args:
            query: (B, T, H, D).
            key: (B, S, K, D), K a divisor of H: query head h goes to key head h // (H / K).
            value: (B, S, K, E).
            mask: which keys may be seen beside that, as `additive_mask` takes it.
            scales: the parameter of a softmax that learns, as `BlockSoftmax` and `SinkSoftmax`.
            precision: of the products, for a softmax that the kernels know.

        Returns:
            (B, T, H, E) in the dtype of the query, zeros where a query sees no key.

        Raises:
            ValueError: shapes that do not belong together.
        """
        tensors = as_tensors(query, key, value)
        originals = [floating(tensor.array) for tensor in tensors]
        self._check_shapes(*originals)
        q, k, v = _operands(originals, precision) if self.softmax.fused and precision != "float32" else originals
        hidden = None if mask is None else additive_mask("Attention", mask, q, q.shape[1], k.shape[1], q.shape[2])
        parameters = () if scales is None else (scales.array,)
        like_queries = {"dtype": originals[0].dtype} if self.softmax.fused else {}  # for their operands may be narrower
        scoring = self._scoring(q, k)
        out, attend_backward = self.softmax.attend(q, k, v, scoring, hidden, *parameters, **like_queries)
        args = tensors if scales is None else (*tensors, scales)
        if not grad_enabled_for(*args):
            return record(out, args, None, "attention")

        new_grads = _room_like(originals)
        n_args = len(args)

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, ...]:
            grads = new_grads()
            dscales = attend_backward(grad, *grads)
            return (*grads, dscales)[:n_args]

        return record(out, args, backward, "attention")

    def look(
        self,
        query: Operand,
        key: Operand,
        value: Operand | None = None,
        mask: Mask = None,
        scales: Tensor | None = None,
        precision: str = "float32",
    ) -> tuple[Array, Array]:
        """The scores before the softmax and the weights after it, both (B, H, T, S), for reading.

        Args: as of `forward`; what is read here was computed anew, in the dtype of the query.
        """
        q, k = (floating(tensor.array) for tensor in as_tensors(query, key))
        hidden = additive_mask("Attention", mask, q, q.shape[1], k.shape[1], q.shape[2])
        scoring = self._scoring(q, k)
        scores = kernels.attention_scores(q, k, scoring, hidden)
        if scales is None:
            return scores, self.softmax.rows(scores)
        parameter = self.softmax.scales_of(scales.array, k.shape[1])
        if self.softmax.by_place:
            start = scoring.offset or 0
            parameter = parameter[..., start : start + q.shape[1]]
        return scores, self.softmax.rows(scores, parameter)

    def _scoring(self, q: Array, k: Array) -> Scoring:
        scale = 1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale
        offset = k.shape[1] - q.shape[1] if self.causal else None
        return Scoring(scale, offset, self.window, self.cap)

    def _check_shapes(self, q: Array, k: Array, v: Array) -> None:
        check_device("Attention", q, k, v)
        wanted = "query (B, T, H, D), key (B, S, K, D) and value (B, S, K, E), H a multiple of K"
        fits = q.ndim == k.ndim == v.ndim == 4
        fits = fits and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]
        if not fits or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
            raise ValueError(f"Attention: expected {wanted}, got shapes {q.shape}, {k.shape} and {v.shape}")


# -------------------------------------------------------------------- memory
# Queries, keys and values often come out of one product and lie side by side: then they are converted at once, and
# their gradients are written side by side too, which is how that product takes them.
def _flat(x: Array) -> Array:
    """(B, T, H, D) as (B, T, H * D), a view where its memory allows."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def _operands(arrays: Sequence[Array], precision: str) -> list[Array]:
    """As matrix products of a precision take them."""
    whole = side_by_side([_flat(array) for array in arrays])
    if whole is None:
        return [kernels.operand(array, precision) for array in arrays]
    converted = kernels.operand(whole, precision)
    return list(arrays) if converted is whole else _parts(converted, [array.shape for array in arrays])


def _room_like(arrays: Sequence[Array]) -> Callable[[], list[Array]]:
    """What makes empty arrays of these shapes and dtypes, side by side where these are. It keeps none of them."""
    xp = array_module(arrays[0])
    shapes = [array.shape for array in arrays]
    dtypes = [array.dtype for array in arrays]
    if side_by_side([_flat(array) for array in arrays]) is None:
        return lambda: [xp.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    width = sum(shape[2] * shape[3] for shape in shapes)
    return lambda: _parts(xp.empty((*shapes[0][:2], width), dtypes[0]), shapes)


def _parts(whole: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """(B, T, all of H * D) as one (B, T, H, D) after another."""
    parts = []
    start = 0
    for shape in shapes:
        stop = start + shape[2] * shape[3]
        parts.append(whole[..., start:stop].reshape(shape))
        start = stop
    return parts
