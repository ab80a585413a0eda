"""Attention with relative position biases, T5's position encoding.

Shapes: B batch, T queries, S keys, H heads, D head size, N buckets.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.devices import Array, array_module
from tricycle.extra_ops import transpose
from tricycle.functions import AttendBackward, RowSoftmax, Softmax, as_non_scalar
from tricycle.kernels import ScoreOptions
from tricycle.kernels.reference.attention import row_attention_backward
from tricycle.ops import check_positive
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor


class RelativePositionSoftmax(RowSoftmax):
    """Softmax of attention scores plus a learned number for each head and bucket of distances between query and key.

    Source: Raffel et al. 2020, "Exploring the limits of transfer learning", section 2.1.

    Args:
        n_buckets: N; with `bidirectional`, half of them are for keys after the query.
        max_distance: larger distances share the last bucket.
        bidirectional: whether keys after the query are visible; otherwise the last query is at the last key.
    """

    name, fused = "relative_position_softmax", True

    def __init__(self, n_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        check_positive("RelativePositionSoftmax", n_buckets=n_buckets, max_distance=max_distance)
        n_exact = n_buckets // (4 if bidirectional else 2)
        if not 0 < n_exact < max_distance:
            raise ValueError(
                f"RelativePositionSoftmax: expected at least {4 if bidirectional else 2} buckets and a max_distance "
                f"above {n_exact}, got {n_buckets} and {max_distance}"
            )
        self.n_buckets, self.max_distance, self.bidirectional = n_buckets, max_distance, bidirectional

    def for_layer(self, n_heads: int, context_window: int | None) -> tuple[RelativePositionSoftmax, Tensor | None]:
        """Return the variant itself and a new parameter, the biases (N, H), filled with 0."""
        return self, Parameter(np.zeros((self.n_buckets, n_heads), np.float32), "scale")

    def forward(self, x: Operand, table: Tensor | None = None) -> Tensor:
        """Compute the softmax of scores x (..., H, T, S) plus the biases of `table` (N, H), by default 0."""
        x = as_non_scalar(self, x)
        if table is not None:
            x = x + transpose(table[position_buckets(self, *x.shape[-2:])], 2, 0, 1)
        result = Softmax()(x)
        result.name = self.name
        return result

    def row_softmax(self, scores: Array, table: Array | None = None) -> Array:
        """Return the attention weights of scores (B, H, T, S) with the biases of `table` (N, H), by default 0."""
        return kernels.softmax(scores if table is None else scores + self._bias(table, *scores.shape[-2:]))

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        score_options: ScoreOptions,
        mask: Array | None = None,
        table: Array | None = None,
        *,
        dtype: Any = None,
    ) -> tuple[Array, AttendBackward]:
        """Return attention with the biases of `table` (N, H), and `backward`, which fills dq, dk, dv, returns dtable.

        The backward pass needs memory for the scores of one batch item.
        """
        bias = mask
        if table is not None:
            placed = self._bias(table, q.shape[1], k.shape[1])[None]
            bias = placed if mask is None else placed + mask
        out, logsumexp = kernels.attention(q, k, v, score_options, False, bias, dtype)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> Array | None:
            if table is None:
                kernels.attention_backward(grad, q, k, v, out, logsumexp, score_options, dq, dk, dv, bias)
                return None
            dbias: Any = array_module(q).zeros((q.shape[2], q.shape[1], k.shape[1]), q.dtype)

            def row_softmax_backward(dweights: Array, scores: Array, weights: Array) -> Array:
                nonlocal dbias
                dscores = kernels.softmax_backward(dweights, weights)
                dbias = dbias + dscores.sum(axis=0)
                return dscores

            for item in range(len(q)):
                i = slice(item, item + 1)
                here = bias if bias is None or len(bias) == 1 else bias[i]
                functions = score_options, kernels.softmax, row_softmax_backward
                row_attention_backward(grad[i], q[i], k[i], v[i], *functions, dq[i], dk[i], dv[i], here)
            rows = dbias.transpose(1, 2, 0).reshape(-1, table.shape[1])
            ids = array_module(q).asarray(position_buckets(self, q.shape[1], k.shape[1]).reshape(-1))
            return kernels.embedding_backward(rows, ids, self.n_buckets).astype(table.dtype, copy=False)

        return out, backward

    def _bias(self, table: Array, n_queries: int, n_keys: int) -> Array:
        """Return the bias (H, T, S) of each query and key; ValueError for a table of another length."""
        if table.shape[0] != self.n_buckets:
            raise ValueError(f"{self}: expected biases of shape ({self.n_buckets}, heads), got {table.shape}")
        ids = array_module(table).asarray(position_buckets(self, n_queries, n_keys))
        return table[ids].transpose(2, 0, 1)


def position_buckets(softmax: RelativePositionSoftmax, n_queries: int, n_keys: int) -> np.ndarray:
    """Return the bucket (T, S) of the distance of each query and key; the last query is at the last key if causal.

    Half of the buckets of a direction are for single distances, the others for ranges that grow logarithmically.
    """
    options = softmax.n_buckets, softmax.max_distance, softmax.bidirectional
    first = 0 if softmax.bidirectional else n_keys - n_queries
    distances = np.arange(n_keys) - np.arange(first, first + n_queries)[:, None]  # of the key from the query
    longest = 1 << (n_queries + n_keys).bit_length()  # few sizes, as a text grows by one token at a time
    return _bucket_table(*options, longest)[distances + longest]


# Cache: a pure function of four numbers; the result is read-only.
@lru_cache(maxsize=64)
def _bucket_table(n_buckets: int, max_distance: int, bidirectional: bool, longest: int) -> np.ndarray:
    """Return the buckets of the distances from -longest to longest, read-only, (2 * longest + 1,). Cached."""
    distances = np.arange(-longest, longest + 1)
    n_buckets = n_buckets // 2 if bidirectional else n_buckets
    far = np.abs(distances) if bidirectional else np.maximum(-distances, 0)
    n_exact = n_buckets // 2
    # in float32 and this order, as in the code that the models were trained with
    logs = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(n_exact))
    steps = logs / np.float32(math.log(max_distance / n_exact)) * np.float32(n_buckets - n_exact)
    buckets = np.where(far < n_exact, far, np.minimum(n_exact + steps.astype(int), n_buckets - 1))
    buckets = buckets + n_buckets * (distances > 0) if bidirectional else buckets
    buckets.flags.writeable = False
    return buckets
