"""Attention scores, and attention whose weights are any function of a row of scores."""

from __future__ import annotations

from tricycle.devices import Array
from tricycle.kernels.dispatch import kernel, wide_kernel
from tricycle.kernels.reference import attention
from tricycle.kernels.reference.attention import Rows, Scoring, capped_scores, hide, mix


@wide_kernel(0)
def attention_scores(q: Array, k: Array, scoring: Scoring, mask: Array | None = None) -> Array:
    """scale * q k^T, capped (B, H, T, S), -inf where a key is hidden."""
    return hide(capped_scores(q, k, scoring), scoring, mask)


@wide_kernel(1)
def row_attention(q: Array, k: Array, v: Array, scoring: Scoring, rows: Rows, mask: Array | None = None) -> Array:
    """rows(scores) v for every item and head; a faster version may call `rows` without what is hidden everywhere."""
    return mix(rows(attention_scores.plain(q, k, scoring, mask)), v)


row_attention_backward = kernel(attention.row_attention_backward)
