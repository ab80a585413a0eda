"""Attention scores and weights, recomputed for inspection, as the attention operation does not store them."""

from __future__ import annotations

from tricycle.attention.attend import Attention, Mask, additive_mask
from tricycle.devices import Array
from tricycle.kernels.row_attention import attention_scores
from tricycle.ops import as_floating, as_tensors
from tricycle.softmaxes import BlockSoftmax
from tricycle.tensor import Operand, Tensor


def scores_and_weights(
    attention: Attention,
    query: Operand,
    key: Operand,
    value: Operand | None = None,
    mask: Mask = None,
    scales: Tensor | None = None,
    precision: str = "float32",
) -> tuple[Array, Array]:
    """Return attention scores (softcapped, -inf if masked) and softmax weights, (B, H, T, S); `value` is ignored.

    The arguments are those of `Attention.forward`; `value` and `precision` are ignored.
    """
    q, k = (as_floating(tensor.array) for tensor in as_tensors(query, key))
    hidden = additive_mask("Attention", mask, q, q.shape[1], k.shape[1], q.shape[2])
    score_options = attention.score_options(q, k)
    scores = attention_scores(q, k, score_options, hidden)
    if scales is None:
        return scores, attention.softmax.row_softmax(scores)
    parameter = scales.array
    if isinstance(attention.softmax, BlockSoftmax):
        start = score_options.offset or 0
        parameter = attention.softmax.expand_scales(parameter, k.shape[1])[..., start : start + q.shape[1]]
    return scores, attention.softmax.row_softmax(scores, parameter)
