"""Attention whose products are of bfloat16, by oneDNN: the kernels `attention` and `attention_backward`.

Some heads of one item at a time, and some queries of these. oneDNN makes exponentials of scores, and multiplies their
gradients, where it sums them: so scores are written once, with 16 bits, and never looked at. Exponentials are not
shifted by each row's maximum; where their sums come near the ends of float32, NumPy does those heads again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.kernels import Scoring
from tricycle_accelerators import pieces, threads
from tricycle_accelerators.attention_blocks import Block, Group, heads_first, make_plan, stack, unstack
from tricycle_accelerators.onednn import library


# -------------------------------------------------------------------- what is taken
def _takes(q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring, mask: np.ndarray | None) -> bool:
    """Whether this is our business: enough queries that each see a key, no mask and no cap."""
    regular = all(array.strides[-1] == array.itemsize and min(array.strides) > 0 for array in (q, k, v))
    n_queries, n_keys = q.shape[1], k.shape[1]
    all_see = scoring.queries_seeing(n_queries, n_keys) == slice(0, n_queries)
    return mask is None and scoring.cap is None and regular and n_queries >= 16 and k.size > 0 and all_see


def _takes_gradients(*gradients: np.ndarray) -> bool:
    return all(array.itemsize == 4 == array.strides[-1] and min(array.strides) > 0 for array in gradients)


# -------------------------------------------------------------------- weights that are not divided yet
class _Band(NamedTuple):
    """All bits where a query sees a key of a square of scores: up to the diagonal, and after it."""

    upto: np.ndarray
    after: np.ndarray


def _band(blocks: list[Block]) -> _Band:
    longest = max(block.queries.stop - block.queries.start for block in blocks)
    upto = np.tri(longest, dtype=np.uint16) * np.uint16(0xFFFF)
    return _Band(upto, ~upto)


def _exponentials(
    rows: np.ndarray, keys: np.ndarray, block: Block, n_heads: int, scale: float, band: _Band
) -> np.ndarray:
    """exp(scale * q k^T) (K, H/K * T, S), bfloat16, 0 where a query does not see a key.

    Args:
        rows: the block's queries (K, H/K * T, D). keys: (K, S, D), of which the block sees some.
    """
    seen = block.seen
    weights = np.empty((*rows.shape[:2], seen.stop - seen.start), rows.dtype)
    library.product(rows, keys[:, seen].swapaxes(1, 2), weights, None, ("linear", scale), ("exp",))
    bits = unstack(weights.view(np.uint16), n_heads)
    n_queries = bits.shape[1]
    if block.diagonal is not None and block.diagonal < seen.stop:
        start = max(seen.start, block.diagonal)
        columns = slice(start - block.diagonal, seen.stop - block.diagonal)
        bits[:, :, start - seen.start :] &= band.upto[:n_queries, columns]
    if block.edge is not None and seen.start < block.edge + n_queries:
        stop = min(seen.stop, block.edge + n_queries)
        columns = slice(seen.start - block.edge, stop - block.edge)
        bits[:, :, : stop - seen.start] &= band.after[:n_queries, columns]
    return weights


def _and_ones(values: np.ndarray, n_ones: int) -> np.ndarray:
    """(K, S, E) as (K, S, E + n_ones), with ones in the last columns: a product with them sums as it goes."""
    size = values.shape[-1]
    wider = np.empty((*values.shape[:-1], size + n_ones), values.dtype)
    wider[..., :size], wider[..., size:] = values, 1
    return wider


# -------------------------------------------------------------------- forward
def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scoring: Scoring,
    nothing: bool,
    mask: np.ndarray | None = None,
    dtype: Any = None,
) -> Any:
    if not q.dtype == k.dtype == v.dtype == library.bfloat16():
        return NotImplemented
    compute = _attend if _takes(q, k, v, scoring, mask) else _in_float32
    out, log_total = compute(q, k, v, scoring, nothing, mask)
    return out.astype(dtype or q.dtype, copy=False), log_total


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring, nothing: bool, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """What `attention` gives, with `out` in float32."""
    n_items, n_queries, n_heads, _ = q.shape
    out = np.empty((*q.shape[:3], v.shape[3]), np.float32)
    log_total = np.empty((n_items, n_heads, n_queries), np.float32)
    plan = make_plan(q, k, scoring)
    band = _band(plan.blocks)

    def attend(group: Group) -> bool:
        """Whether the sums of exponentials stayed where float32 and bfloat16 hold them well."""
        queries = heads_first(q, group.item, group.heads)
        keys = heads_first(k, group.item, group.key_heads)
        values = _and_ones(heads_first(v, group.item, group.key_heads), 1)
        results, logs = heads_first(out, group.item, group.heads), log_total[group.item, group.heads]
        for block in plan.blocks:
            rows = stack(queries[:, block.queries], len(keys))
            weights = _exponentials(rows, keys, block, len(queries), scoring.scale, band)
            mixed = np.empty((*weights.shape[:2], values.shape[2]), np.float32)
            library.product(weights, values[:, block.seen], mixed)
            mixed = unstack(mixed, len(queries))
            total = mixed[..., -1:] + np.float32(nothing)
            if not (total.min() > 1 / pieces.MOST and total.max() < pieces.MOST):
                return False
            np.divide(mixed[..., :-1], total, out=results[:, block.queries])
            np.log(total[..., 0], out=logs[:, block.queries])
        return True

    def work(group: Group) -> None:
        if not attend(group):
            heads, key_heads = _of_item(group)
            wide = _float32(q[heads], k[key_heads], v[key_heads])
            again, logs = kernels.attention(wide[0], wide[1], wide[2], scoring, nothing)
            out[heads], log_total[group.item, group.heads] = again, logs[0]

    threads.parallel(work, plan.groups)
    return out, log_total


def _in_float32(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring, nothing: bool, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The same by others; of a long cache only the keys that are seen are converted."""
    keys = scoring.keys_seen(slice(0, q.shape[1]), k.shape[1])
    queries, k, v = _float32(q, k[:, keys], v[:, keys])
    mask = None if mask is None else mask[..., keys]
    return kernels.attention(queries, k, v, scoring.of_part(0, keys.start), nothing, mask)


def _of_item(group: Group) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """What takes (B, T, H, D) to (1, T, H, D) for the heads of a group, and for its key heads."""
    item = slice(group.item, group.item + 1)
    return (item, slice(None), group.heads), (item, slice(None), group.key_heads)


def _float32(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float32) for array in arrays]


# -------------------------------------------------------------------- backward
class _Group(NamedTuple):
    """What the gradients of one group are made of, and where they go.

    Attributes:
        queries, keys: (H, T, D) and (K, S, D).
        values: (K, S, E + 2), with ones.
        grads: (H, T, E + 2), as `_with_inner` gives them.
        dq, dk, dv: like queries, keys and values, float32.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    grads: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def add_block(self, block: Block, scale: float, band: _Band, more: tuple[Any, ...]) -> None:
        """Write dq of its queries, and write or, with `more`, add to dk and dv of its keys."""
        n_heads, n_key_heads, seen = len(self.queries), len(self.keys), block.seen
        rows, grads = (stack(array[:, block.queries], n_key_heads) for array in (self.queries, self.grads))
        weights = _exponentials(rows, self.keys, block, n_heads, scale, band)
        dscores = np.empty_like(weights)
        then = ("times",), ("linear", scale)
        library.product(grads, self.values[:, seen].swapaxes(1, 2), dscores, None, *then, factors=(weights,))
        library.product(weights.swapaxes(1, 2), grads[..., :-2], self.dv[:, seen], None, *more)
        library.product(dscores.swapaxes(1, 2), rows, self.dk[:, seen], None, *more)
        place = self.dq[:, block.queries]
        if n_heads == n_key_heads:
            library.product(dscores, self.keys[:, seen], place)
        else:
            stacked = np.empty(rows.shape, np.float32)
            library.product(dscores, self.keys[:, seen], stacked)
            place[...] = unstack(stacked, n_heads)


def attention_backward(
    grad: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    log_total: np.ndarray,
    scoring: Scoring,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    mask: np.ndarray | None = None,
) -> Any:
    if not q.dtype == k.dtype == v.dtype == library.bfloat16():
        return NotImplemented
    if not _takes(q, k, v, scoring, mask) or not _takes_gradients(dq, dk, dv):
        q, k, v = _float32(q, k, v)
        return kernels.attention_backward(grad, q, k, v, out, log_total, scoring, dq, dk, dv, mask)
    plan = make_plan(q, k, scoring)
    band = _band(plan.blocks)
    parts: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of key heads whose query heads lie in several groups

    def work(i: int) -> None:
        group = plan.groups[i]
        heads, key_heads = _of_item(group)
        place_k, place_v = dk[key_heads], dv[key_heads]
        if plan.in_parts:
            place_k, place_v = (np.empty(array.shape, np.float32) for array in (place_k, place_v))
            parts[i] = place_k, place_v
        logs = log_total[group.item, group.heads][None]
        if not np.abs(logs).max() < pieces.SAFE_EXPONENT:
            wide = _float32(q[heads], k[key_heads], v[key_heads])
            operands = grad[heads], wide[0], wide[1], wide[2], out[heads], logs
            kernels.attention_backward(*operands, scoring, dq[heads], place_k, place_v)
            return
        everything = slice(None)
        here = _Group(
            heads_first(q, group.item, group.heads),
            heads_first(k, group.item, group.key_heads),
            _and_ones(heads_first(v, group.item, group.key_heads), 2),
            _with_inner(grad[heads], out[heads], logs),
            heads_first(dq, group.item, group.heads),
            heads_first(place_k, 0, everything),
            heads_first(place_v, 0, everything),
        )
        _differentiate(here, plan.blocks, scoring.scale, band)

    threads.parallel(work, range(len(plan.groups)))
    if plan.in_parts:
        _add_parts(plan.groups, parts, dk, dv)
    return None


def _differentiate(group: _Group, blocks: list[Block], scale: float, band: _Band) -> None:
    """The last block writes the gradients of its keys first, and those before add to them; no others are touched."""
    last = blocks[-1].seen
    for array in (group.dk, group.dv):
        array[:, : last.start] = 0
        array[:, last.stop :] = 0
    more: tuple[Any, ...] = ()
    for block in reversed(blocks):
        group.add_block(block, scale, band, more)
        more = (("add",),)


def _add_parts(
    groups: list[Group], parts: dict[int, tuple[np.ndarray, np.ndarray]], dk: np.ndarray, dv: np.ndarray
) -> None:
    """In the order of the groups, so that every run gives the same sums."""
    dk[...] = 0
    dv[...] = 0
    for i, group in enumerate(groups):
        key_heads = _of_item(group)[1]
        dk[key_heads] += parts[i][0]
        dv[key_heads] += parts[i][1]


def _with_inner(grad: np.ndarray, out: np.ndarray, log_total: np.ndarray) -> np.ndarray:
    """Gradients dy of one item, divided by the sums of exponentials, and -y.dy in two columns: (H, T, E + 2), bfloat16.

    So [dy, -y.dy] [v, 1]^T = dy v^T - y.dy. One column of 16 bits holds y.dy with an error that all keys of a row have
    in common, which would add up; the second one takes what the first has lost.

    Args:
        grad, out: (1, T, H, E). log_total: (1, H, T).
    """
    grads, size = grad[0].transpose(1, 0, 2), grad.shape[-1]
    wide = np.empty((*grads.shape[:-1], size + 2), np.float32)
    np.multiply(grads, np.exp(-log_total[0][..., None]), out=wide[..., :size])
    inner = wide[..., size]
    np.vecdot(wide[..., :size], out[0].transpose(1, 0, 2), out=inner)
    np.negative(inner, out=inner)
    np.subtract(inner, inner.astype(library.bfloat16()), out=wide[..., size + 1])
    narrow = np.empty(wide.shape, library.bfloat16())
    library.convert(wide, narrow)
    return narrow
