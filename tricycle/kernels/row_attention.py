"""Kernels of attention scores, and of attention with any softmax variant."""

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
    """Return scaled, soft-capped attention scores (B, H, T, S), at least float32, -inf where a key is masked."""
    return mask_scores(softcapped_scores(q, k, score_options), score_options, mask)


@upcasting_kernel(1)
def row_attention(
    q: Array, k: Array, v: Array, score_options: ScoreOptions, row_softmax: RowSoftmaxFn, mask: Array | None = None
) -> Array:
    """Compute row_softmax(scores) v (B, T, H, E), in the dtype of q; providers may omit keys masked in all rows."""
    return apply_weights(row_softmax(attention_scores.reference(q, k, score_options, mask)), v)


row_attention_backward = kernel(attention.row_attention_backward)
