"""`SinkSoftmax`: a softmax with an attention sink, an additional key with a learned score and a value of zero."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle import extra_ops, kernels, ops
from tricycle.devices import Array, array_module
from tricycle.functions import AttendBackward, RowSoftmax, Softmax, as_non_scalar
from tricycle.kernels import ScoreOptions
from tricycle.ops import as_tensor
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor


class SinkSoftmax(RowSoftmax):
    """exp(x_i) / (exp(b) + sum_j exp(x_j)) over the last axis, with a learned number b for each attention head.

    The weights of a row may sum to less than 1: b = 0 is softmax1, b = -inf is softmax. In attention it costs as much
    as softmax, whose output is multiplied by exp(L) / (exp(b) + exp(L)), where L is the logsumexp of a row.

    Sources: Miller 2023, "Attention is off by one", for the 1 in the denominator; OpenAI 2025, gpt-oss-120b &
    gpt-oss-20b model card, for the learned one.

    Args:
        initial: the initial value of b in a layer.
    """

    name, fused = "sink_softmax", True

    def __init__(self, initial: float = 0.0) -> None:
        if not math.isfinite(initial):
            raise ValueError(f"SinkSoftmax: expected a finite initial number, got {initial!r}")
        self.initial = initial

    def for_layer(self, n_heads: int, context_window: int | None) -> tuple[SinkSoftmax, Tensor | None]:
        """Return the variant itself and a new parameter, b of each head (n_heads,), filled with `initial`."""
        return self, Parameter(np.full(n_heads, self.initial, np.float32), "scale")

    def forward(self, x: Operand, sinks: Operand | None = None) -> Tensor:
        """Compute exp(x_i) / (exp(b) + sum_j exp(x_j)) over the last axis; b is `sinks`, by default `initial`.

        Args:
            x: scores (..., T, S), or (S,).
            sinks: b, of any shape that broadcasts to (...): (H,) for scores (B, H, T, S). By default `initial`.

        Raises:
            ValueError: another shape.
        """
        x = as_non_scalar(self, x)
        sinks = as_tensor(self.initial if sinks is None else sinks, x)
        lead = x.shape[:-2]
        if sinks.ndim > len(lead) or any(n not in (1, m) for n, m in zip(sinks.shape[::-1], lead[::-1])):
            raise ValueError(f"{self}: expected sinks that broadcast to {lead}, got shape {sinks.shape}")
        each_row = x.xp.zeros((*x.shape[:-1], 1), x.dtype)
        column = ops.reshape(sinks, *sinks.shape, *[1] * min(x.ndim, 2)) + each_row
        result = Softmax()(extra_ops.concatenate([x, column], axis=-1))[..., :-1]
        result.name = self.name
        return result

    def row_softmax(self, scores: Array, sinks: Array | None = None) -> Array:
        """Return the attention weights of scores (B, H, T, S), with b = sinks (H,), by default `initial`."""
        xp = array_module(scores)
        column = xp.asarray(self.initial if sinks is None else sinks, scores.dtype)[..., None, None]
        one_more = xp.concatenate([scores, xp.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
        return kernels.softmax(one_more)[..., :-1]

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        score_options: ScoreOptions,
        mask: Array | None = None,
        sinks: Array | None = None,
        *,
        dtype: Any = None,
    ) -> tuple[Array, AttendBackward]:
        """Return attention with sinks (H,), or `initial`; backward fills dq, dk, dv and returns dsinks, None without.

        Args:
            sinks: b of each head, (H,); by default `initial`.

        Raises:
            ValueError: another shape.
        """
        xp = array_module(q)
        b = xp.full(q.shape[2], self.initial, np.float32) if sinks is None else sinks
        if b.shape != q.shape[2:3]:
            raise ValueError(f"{self}: expected sinks of shape {q.shape[2:3]}, one for each head, got {b.shape}")
        plain, log_plain = kernels.attention(q, k, v, score_options, False, mask, dtype)
        logsumexp = xp.logaddexp(log_plain, b[:, None].astype(log_plain.dtype))
        shift = xp.where(xp.isneginf(logsumexp), 0, logsumexp)
        out = (plain * _by_query(xp.exp(log_plain - shift))).astype(plain.dtype, copy=False)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> Array | None:
            # with the logsumexp of all keys and the sink, the kernel computes the right weights and gradients
            kernels.attention_backward(grad, q, k, v, out, logsumexp, score_options, dq, dk, dv, mask)
            if sinks is None:
                return None
            # each weight w_i, and so the output, has the derivative -w_i w_b with respect to b
            share = _by_query(xp.exp(b[:, None] - shift))
            return -(share * grad * out).sum(axis=(0, 1, 3)).astype(b.dtype, copy=False)

        return out, backward


def _by_query(rows: Array) -> Array:
    """Transpose (B, H, T) to (B, T, H, 1)."""
    return rows.transpose(0, 2, 1)[..., None]
