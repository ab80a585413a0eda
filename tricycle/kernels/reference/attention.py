"""Attention: scores of queries and keys, weights from scores, and means of values by these weights.

Shapes: B batch, T queries, S keys, H heads, K key heads, D head size, E size of a value.

q is (B, T, H, D), k (B, S, K, D) and v (B, S, K, E), where H is a multiple of K: query head h uses key head
h // (H / K) (Ainslie et al. 2023, "GQA"). mask is added to the scores: 0 or -inf, (B or 1, H or 1, T or 1, S); None
hides nothing beside what `Scoring` hides.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import wide, widening

Rows = Callable[[Array], Array]
RowsBackward = Callable[[Array, Array, Array], Array]


class Scoring(NamedTuple):
    """How scores are made of queries and keys, and which keys a query sees.

    Attributes:
        scale: a score is scale * q . k.
        offset: query t sees the keys up to t + offset; None: all of them.
        window: and of these the last so many, t + offset itself included; None: all of these. It needs an offset.
        cap: scores become cap * tanh(score / cap), before the mask (Gemma Team 2024, "Gemma 2"); None: they stay.
    """

    scale: float
    offset: int | None = None
    window: int | None = None
    cap: float | None = None

    def keys_seen(self, queries: slice, n_keys: int) -> slice:
        """The keys that at least one of these queries sees, from the first to the last."""
        if self.offset is None:
            return slice(0, n_keys if queries.start < queries.stop else 0)
        start, stop = 0, min(n_keys, queries.stop + self.offset)
        if self.window is not None:
            start = max(0, queries.start + self.offset - self.window + 1)
        return slice(start, stop) if start < stop and queries.start < queries.stop else slice(0, 0)

    def queries_seeing(self, n_queries: int, n_keys: int) -> slice:
        """The queries that see at least one key."""
        if self.offset is None:
            return slice(0, n_queries if n_keys else 0)
        start, stop = max(0, -self.offset), n_queries
        if self.window is not None:
            stop = min(stop, n_keys - 1 - self.offset + self.window)
        return slice(start, stop) if n_keys and start < stop else slice(0, 0)

    def of_part(self, first_query: int, first_key: int) -> Scoring:
        """The same for the queries and keys from these on, counted from 0 again."""
        return self if self.offset is None else self._replace(offset=self.offset + first_query - first_key)


def hidden(xp: ModuleType, n_queries: int, n_keys: int, scoring: Scoring) -> Array | None:
    """(T, S) booleans: True where a query does not see a key; None where every query sees all keys."""
    if scoring.offset is None:
        return None
    last = xp.arange(scoring.offset, scoring.offset + n_queries)[:, None]
    keys = xp.arange(n_keys)
    later = keys > last
    return later if scoring.window is None else later | (keys <= last - scoring.window)


@kernel
@widening(0)
def attention_scores(q: Array, k: Array, scoring: Scoring, mask: Array | None = None) -> Array:
    """scale * q k^T, capped (B, H, T, S), -inf where a key is hidden."""
    return _hide(_capped_scores(q, k, scoring), scoring, mask)


@kernel
def attention(
    q: Array, k: Array, v: Array, scoring: Scoring, nothing: bool, mask: Array | None = None, dtype: Any = None
) -> tuple[Array, Array]:
    """softmax(scores) v for every item and head (Vaswani et al. 2017, section 3.2.1).

    Args:
        nothing: beside the keys there is one more, with a score of 0 and a value of zeros, which makes it softmax1.
        dtype: of `out`; that of the queries unless given.

    Returns:
        out: (B, T, H, E), zeros where a query sees no key, and the log of each row's sum of exponentials (B, H, T),
        -inf there (0 with `nothing`), which the backward needs.
    """
    xp = array_module(q)
    dtype = dtype or q.dtype
    q, k, v, mask = map(wide, (q, k, v, mask))
    scores = attention_scores.plain(q, k, scoring, mask)
    largest = scores.max(axis=-1, keepdims=True) if k.shape[1] else xp.zeros((*scores.shape[:-1], 1), scores.dtype)
    largest = xp.maximum(largest, 0) if nothing else xp.where(xp.isneginf(largest), 0, largest)
    weights = xp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if nothing:
        total += xp.exp(-largest)
    empty = total == 0
    total = xp.where(empty, 1, total)
    out = _mix(weights / total, v).astype(dtype, copy=False)
    return out, xp.where(empty, -xp.inf, largest + xp.log(total))[..., 0]


@kernel
def attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    log_total: Array,
    scoring: Scoring,
    dq: Array,
    dk: Array,
    dv: Array,
    mask: Array | None = None,
) -> None:
    """Write the gradients of q, k and v into dq, dk and dv, whose memory may be strided and hold anything."""
    xp = array_module(q)
    grad, q, k, v, out, mask = map(wide, (grad, q, k, v, out, mask))
    capped = _capped_scores(q, k, scoring)
    shift = xp.where(xp.isneginf(log_total), 0, log_total)[..., None]
    weights = xp.exp(_hide(capped, scoring, mask) - shift)
    # sum_s weight_s dweight_s is the product of the output with its own gradient
    inner = (_heads_first(grad) * _heads_first(out)).sum(axis=-1, keepdims=True)
    dscores = weights * (_products(grad, v) - inner)
    _write_gradients(grad, q, k, weights, _before_cap(dscores, capped, scoring), dq, dk, dv)


@kernel
@widening(1)
def row_attention(q: Array, k: Array, v: Array, scoring: Scoring, rows: Rows, mask: Array | None = None) -> Array:
    """rows(scores) v for every item and head, with any function of rows of scores in softmax's place.

    Args:
        rows: from scores (..., T, S), -inf where a key is hidden, to weights of that shape, 0 there. A faster version
            may leave out keys that are hidden from all queries, and queries that see no key.
    """
    return _mix(rows(attention_scores.plain(q, k, scoring, mask)), v)


@kernel
def row_attention_backward(
    grad: Array,
    q: Array,
    k: Array,
    v: Array,
    scoring: Scoring,
    rows: Rows,
    rows_backward: RowsBackward,
    dq: Array,
    dk: Array,
    dv: Array,
    mask: Array | None = None,
) -> None:
    """Write the gradients of q, k and v.

    Args:
        rows_backward: from the gradient of the weights, the scores and the weights to the gradient of the scores.
    """
    grad, q, k, v, mask = map(wide, (grad, q, k, v, mask))
    capped = _capped_scores(q, k, scoring)
    scores = _hide(capped, scoring, mask)
    weights = rows(scores)
    dscores = rows_backward(_products(grad, v), scores, weights)
    _write_gradients(grad, q, k, weights, _before_cap(dscores, capped, scoring), dq, dk, dv)


@kernel
def for_items(q: Array, work: Callable[[slice], None]) -> None:
    """Let `work` do its part of a computation over a batch for all items; a faster version gives out single ones."""
    work(slice(0, len(q)))


# -------------------------------------------------------------------- scores, and back
def _capped_scores(q: Array, k: Array, scoring: Scoring) -> Array:
    """(B, H, T, S), with nothing hidden."""
    scores = _products(q, k) * scoring.scale
    return scores if scoring.cap is None else scoring.cap * array_module(q).tanh(scores / scoring.cap)


def _hide(scores: Array, scoring: Scoring, mask: Array | None) -> Array:
    xp = array_module(scores)
    unseen = hidden(xp, scores.shape[2], scores.shape[3], scoring)
    if unseen is not None:
        scores = xp.where(unseen, -xp.inf, scores)
    return scores if mask is None else scores + mask


def _before_cap(dscores: Array, capped: Array, scoring: Scoring) -> Array:
    """The gradient of the products q . k, from that of the scores."""
    dproducts = dscores * scoring.scale
    return dproducts if scoring.cap is None else dproducts * (1 - (capped / scoring.cap) ** 2)


def _write_gradients(
    grad: Array, q: Array, k: Array, weights: Array, dproducts: Array, dq: Array, dk: Array, dv: Array
) -> None:
    n_key_heads = k.shape[2]
    _heads_first(dq)[...] = _heads_first(_mix(dproducts, k))
    for array, turned, rows in ((dk, dproducts, q), (dv, weights, grad)):
        turned = _by_key_head(turned, n_key_heads).swapaxes(-1, -2)
        _heads_first(array)[...] = array_module(q).matmul(turned, _by_key_head(_heads_first(rows), n_key_heads))


# -------------------------------------------------------------------- products of heads
def _heads_first(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3)


def _by_key_head(x: Array, n_key_heads: int) -> Array:
    """(B, H, T, ...) as (B, K, H/K * T, ...): the rows of all query heads that share a key head."""
    n_items, n_heads, n_rows, size = x.shape
    return x.reshape(n_items, n_key_heads, n_heads // n_key_heads * n_rows, size)


def _products(q: Array, k: Array) -> Array:
    """q . k for every query and key: (B, H, T, S)."""
    n_items, n_queries, n_heads, _ = q.shape
    products = array_module(q).matmul(_by_key_head(_heads_first(q), k.shape[2]), k.transpose(0, 2, 3, 1))
    return products.reshape(n_items, n_heads, n_queries, k.shape[1])


def _mix(weights: Array, v: Array) -> Array:
    """(B, H, T, S) and (B, S, K, E) to (B, T, H, E)."""
    xp = array_module(v)
    n_items, n_heads, n_queries, _ = weights.shape
    mixed = xp.matmul(_by_key_head(weights, v.shape[2]), _heads_first(v))
    return xp.ascontiguousarray(_heads_first(mixed.reshape(n_items, n_heads, n_queries, v.shape[3])))
