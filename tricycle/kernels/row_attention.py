"""Attention scores, and attention whose weights are any function of a row of scores."""

from __future__ import annotations

from tricycle.devices import Array
from tricycle.kernels.dispatch import kernel, upcasting_kernel
from tricycle.kernels.reference import attention
from tricycle.kernels.reference.attention import (
    RowSoftmaxFn,
    ScoreOptions,
    apply_weights,
    mask_scores,
    softcapped_scores,
)


@upcasting_kernel(0)
def attention_scores(q: Array, k: Array, score_options: ScoreOptions, mask: Array | None = None) -> Array:
    """scale * q k^T, capped (B, H, T, S), -inf where a key is hidden."""
    return mask_scores(softcapped_scores(q, k, score_options), score_options, mask)


@upcasting_kernel(1)
def row_attention(
    q: Array, k: Array, v: Array, score_options: ScoreOptions, row_softmax: RowSoftmaxFn, mask: Array | None = None
) -> Array:
    """Compute row_softmax(scores) v of each head; a provider may leave out keys that are hidden from all rows."""
    return apply_weights(row_softmax(attention_scores.reference(q, k, score_options, mask)), v)


row_attention_backward = kernel(attention.row_attention_backward)
