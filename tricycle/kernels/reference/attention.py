"""Reference kernels of scaled dot-product attention, forward and backward.

q is (B, T, H, D), k (B, S, K, D) and v (B, S, K, E), where H is a multiple of K: query head h uses key head
h // (H / K) (Ainslie et al. 2023, "GQA"). mask is added to the scores: 0 or -inf, (B or 1, H or 1, T or 1, S).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel, upcast

RowSoftmaxFn = Callable[[Array], Array]  # maps scores (..., T, S), -inf where a key is masked, to attention weights
# Maps the gradient of the weights, the scores and the weights to the gradient of the scores.
RowSoftmaxBackwardFn = Callable[[Array, Array, Array], Array]


class ScoreOptions(NamedTuple):
    """Options of attention scores: scale, causal offset, sliding window and soft-capping."""

    scale: float  # a score is scale * q . k
    offset: int | None = None  # query t attends to keys 0 .. t + offset; None: to all keys
    window: int | None = None  # and only to the last `window` of them (sliding window); None: no limit; needs an offset
    softcap: float | None = None  # scores become cap * tanh(score / cap) before the mask (Gemma Team 2024, "Gemma 2")


@kernel
def attention(
    q: Array, k: Array, v: Array, score_options: ScoreOptions, off_by_one: bool, mask: Any = None, dtype: Any = None
) -> tuple[Array, Array]:
    """Return softmax(scores) v (B, T, H, E), or softmax1 with `off_by_one`, and the logsumexp (B, H, T) of the scores.

    The output (B, T, H, E) has `dtype`, by default that of q, and is 0 where all keys are masked. The logsumexp of each
    row, (B, H, T), is -inf there (0 with `off_by_one`); the backward kernel needs it. Source: Vaswani et al. 2017.
    """
    xp, dtype = array_module(q), dtype or q.dtype
    q, k, v, mask = map(upcast, (q, k, v, mask))
    scores = mask_scores(softcapped_scores(q, k, score_options), score_options, mask)
    largest = scores.max(axis=-1, keepdims=True) if k.shape[1] else xp.zeros((*scores.shape[:-1], 1), scores.dtype)
    largest = xp.maximum(largest, 0) if off_by_one else xp.where(xp.isneginf(largest), 0, largest)
    weights = xp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if off_by_one:  # equals an additional key with a score of 0 and a value of zeros
        total += xp.exp(-largest)
    empty = total == 0
    total = xp.where(empty, 1, total)
    out = apply_weights(weights / total, v).astype(dtype, copy=False)
    return out, xp.where(empty, -xp.inf, largest + xp.log(total))[..., 0]


@kernel
def attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    logsumexp: Array,
    score_options: ScoreOptions,
    dq: Array,
    dk: Array,
    dv: Array,
    mask: Array | None = None,
) -> None:
    """Recompute weights from `logsumexp`; write the gradients of q, k, v to dq, dk, dv (strided or uninitialized)."""
    xp = array_module(q)
    shift = xp.where(xp.isneginf(logsumexp), 0, logsumexp)[..., None]
    # sum_s weight_s dweight_s equals the dot product of the output and its gradient
    inner = (upcast(grad).swapaxes(1, 2) * upcast(out).swapaxes(1, 2)).sum(axis=-1, keepdims=True)
    row_softmax = lambda scores: xp.exp(scores - shift)
    row_softmax_backward = lambda dweights, scores, weights: weights * (dweights - inner)
    row_attention_backward(grad, q, k, v, score_options, row_softmax, row_softmax_backward, dq, dk, dv, mask)


def row_attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    score_options: ScoreOptions,
    row_softmax: RowSoftmaxFn,
    row_softmax_backward: RowSoftmaxBackwardFn,
    dq: Array,
    dk: Array,
    dv: Array,
    mask: Array | None = None,
) -> None:
    """Write gradients of row_softmax attention to dq, dk, dv, by row_softmax_backward(dweights, scores, weights)."""
    grad, q, k, v, mask = map(upcast, (grad, q, k, v, mask))
    capped = softcapped_scores(q, k, score_options)
    scores = mask_scores(capped, score_options, mask)
    weights = row_softmax(scores)
    dproducts = row_softmax_backward(_products(grad, v), scores, weights) * score_options.scale
    if score_options.softcap is not None:
        dproducts = dproducts * (1 - (capped / score_options.softcap) ** 2)
    dq[...] = apply_weights(dproducts, k)
    for gradient, products, x in ((dk, dproducts, q), (dv, weights, grad)):
        transposed = _by_key_head(products, k.shape[2]).swapaxes(2, 3)
        gradient.swapaxes(1, 2)[...] = transposed @ _by_key_head(x.swapaxes(1, 2), k.shape[2])


def softcapped_scores(q: Array, k: Array, score_options: ScoreOptions) -> Array:
    """Return the scaled, soft-capped attention scores (B, H, T, S), without any mask."""
    scores = _products(q, k) * score_options.scale
    cap = score_options.softcap
    return scores if cap is None else cap * array_module(q).tanh(scores / cap)


def mask_scores(scores: Array, score_options: ScoreOptions, mask: Array | None) -> Array:
    """Return scores (B, H, T, S), -inf outside the causal offset and sliding window, plus the additive mask."""
    xp = array_module(scores)
    if score_options.offset is not None:
        last = xp.arange(score_options.offset, score_options.offset + scores.shape[2])[:, None]
        keys = xp.arange(scores.shape[3])
        hidden = keys > last
        if score_options.window is not None:
            hidden |= keys <= last - score_options.window
        scores = xp.where(hidden, -xp.inf, scores)
    return scores if mask is None else scores + mask


def _by_key_head(x: Array, n_key_heads: int) -> Array:
    """Reshape (B, H, T, ...) to (B, K, H/K * T, ...): the rows of all query heads that share a key head."""
    n_items, n_heads, n_rows, size = x.shape
    return x.reshape(n_items, n_key_heads, n_heads // n_key_heads * n_rows, size)


def _products(q: Array, k: Array) -> Array:
    """Return the dot products of all queries (B, T, H, D) and keys (B, S, K, D), (B, H, T, S)."""
    products = _by_key_head(q.swapaxes(1, 2), k.shape[2]) @ k.transpose(0, 2, 3, 1)
    return products.reshape(len(q), q.shape[2], q.shape[1], k.shape[1])


def apply_weights(weights: Array, v: Array) -> Array:
    """Return the weighted sums (B, T, H, E) of values (B, S, K, E) by attention weights (B, H, T, S)."""
    mixed = (_by_key_head(weights, v.shape[2]) @ v.swapaxes(1, 2)).reshape(*weights.shape[:3], v.shape[3])
    return array_module(v).ascontiguousarray(mixed.swapaxes(1, 2))
