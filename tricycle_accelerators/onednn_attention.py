"""Attention whose products are of bfloat16, by oneDNN: the kernels `attention` and `attention_backward`.

Some heads of one item at a time, and some queries of these. oneDNN makes exponentials of scores, and multiplies their
gradients, where it sums them: so scores are written once, with 16 bits, and never looked at. Exponentials are not
shifted by each row's maximum; where their sums come near the ends of float32, NumPy does those heads again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tricycle.backend import parallel
from tricycle_accelerators import cpu, onednn


class _Block(NamedTuple):
    """Some queries; how many keys the last of them sees; how many of the last of these are hidden from some of them."""

    queries: slice
    n_seen: int
    n_diagonal: int


def _blocks(n_queries: int, n_keys: int, offset: int | None) -> list[_Block]:
    found = []
    for start in range(0, n_queries, cpu.QUERY_BLOCK):
        stop = min(start + cpu.QUERY_BLOCK, n_queries)
        n_seen = n_keys if offset is None else min(n_keys, stop + offset)
        found.append(_Block(slice(start, stop), n_seen, 0 if offset is None else max(0, n_seen - start - offset)))
    return found


def _suits(q: np.ndarray, k: np.ndarray, v: np.ndarray, offset: int | None, mask: np.ndarray | None) -> bool:
    """Whether this is our business: no mask, every query sees a key, and there are enough of them."""
    regular = all(array.strides[-1] == array.itemsize and min(array.strides) > 0 for array in (q, k, v))
    return mask is None and regular and q.shape[1] >= 16 and k.size > 0 and (offset is None or offset >= 0)


def _float32(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float32) for array in arrays]


def _heads_first(x: np.ndarray, group: tuple[int, slice]) -> np.ndarray:
    """(B, T, H, D) as (H, T, D) for some heads of one item, a view."""
    item, heads = group
    return x[item, :, heads].transpose(1, 0, 2)


def _one_item(group: tuple[int, slice]) -> tuple[slice, slice, slice]:
    """What takes (B, T, H, D) to (1, T, H, D) for some heads of one item."""
    item, heads = group
    return slice(item, item + 1), slice(None), heads


def _and_ones(values: np.ndarray, n_ones: int) -> np.ndarray:
    """(H, S, D) as (H, S, D + n_ones), with ones in the last columns: a product with them sums as it goes."""
    size = values.shape[-1]
    wider = np.empty((*values.shape[:-1], size + n_ones), values.dtype)
    wider[..., :size], wider[..., size:] = values, 1
    return wider


def _exponentials(queries: np.ndarray, keys: np.ndarray, block: _Block, seen: np.ndarray) -> np.ndarray:
    """exp(q k^T / sqrt(D)) (H, T, S), bfloat16, 0 where a query does not see a key.

    Args:
        seen: (T, T), all bits where a query sees a key of the diagonal.
    """
    rows = queries[:, block.queries]
    weights = np.empty((*rows.shape[:2], block.n_seen), queries.dtype)
    scale = 1 / math.sqrt(queries.shape[-1])
    onednn.product(rows, keys[:, : block.n_seen].swapaxes(1, 2), weights, None, ("linear", scale), ("exp",))
    if block.n_diagonal:
        bits = weights.view(np.uint16)[:, :, -block.n_diagonal :]
        bits &= seen[: rows.shape[1], : block.n_diagonal]
    return weights


def _seen(n_queries: int) -> np.ndarray:
    n = min(n_queries, cpu.QUERY_BLOCK)
    return np.tri(n, dtype=np.uint16) * np.uint16(0xFFFF)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, offset: int | None, nothing: bool, mask: np.ndarray | None = None
) -> Any:
    if not q.dtype == k.dtype == v.dtype == onednn.bfloat16():
        return NotImplemented
    if not _suits(q, k, v, offset, mask):
        return cpu.attention(*_float32(q, k, v), offset, nothing, mask)
    (n_items, n_queries, n_heads, size), n_keys = q.shape, k.shape[1]
    out, log_total = np.empty(q.shape, np.float32), np.empty((n_items, n_heads, n_queries), np.float32)
    blocks, seen = _blocks(n_queries, n_keys, offset), _seen(n_queries)

    def fast(group: tuple[int, slice]) -> bool:
        queries, keys, values = (_heads_first(array, group) for array in (q, k, v))
        values, result, logs = _and_ones(values, 1), _heads_first(out, group), log_total[group]
        for block in blocks:
            weights = _exponentials(queries, keys, block, seen)
            mixed = np.empty((*weights.shape[:2], size + 1), np.float32)
            onednn.product(weights, values[:, : block.n_seen], mixed)
            total = mixed[..., -1:] + np.float32(nothing)
            if not (total.min() > 1 / cpu.MOST and total.max() < cpu.MOST):
                return False
            np.divide(mixed[..., :-1], total, out=result[:, block.queries])
            np.log(total[..., 0], out=logs[:, block.queries])
        return True

    def work(group: tuple[int, slice]) -> None:
        if not fast(group):
            place, (item, heads) = _one_item(group), group
            found = cpu.attention(*_float32(q[place], k[place], v[place]), offset, nothing)
            out[place], log_total[item, heads] = found[0], found[1][0]

    parallel(work, cpu._groups(q, n_keys))
    return out, log_total


def attention_backward(
    grad: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, log_total: np.ndarray,
    offset: int | None, dq: np.ndarray, dk: np.ndarray, dv: np.ndarray, mask: np.ndarray | None = None,
) -> Any:
    if not q.dtype == k.dtype == v.dtype == onednn.bfloat16():
        return NotImplemented
    regular = all(array.strides[-1] == 4 and min(array.strides) > 0 for array in (dq, dk, dv))
    if not regular or not _suits(q, k, v, offset, mask):
        return cpu.attention_backward(grad, *_float32(q, k, v), out, log_total, offset, dq, dk, dv, mask)
    (n_queries, size), n_keys = (q.shape[1], q.shape[3]), k.shape[1]
    blocks, seen, scale = _blocks(n_queries, n_keys, offset), _seen(n_queries), 1 / math.sqrt(size)

    def work(group: tuple[int, slice]) -> None:
        logs = log_total[group][..., None]
        if not np.abs(logs).max() < cpu.SAFE_EXPONENT:
            place = _one_item(group)
            taken = _float32(q[place], k[place], v[place])
            rest = out[place], log_total[group][None], offset, dq[place], dk[place], dv[place]
            cpu.attention_backward(grad[place], *taken, *rest)
            return
        queries, keys, values = (_heads_first(array, group) for array in (q, k, v))
        to_q, to_k, to_v = (_heads_first(array, group) for array in (dq, dk, dv))
        values, grads = _and_ones(values, 2), _with_inner(_heads_first(grad, group), _heads_first(out, group), logs)
        to_k[:, blocks[-1].n_seen :], to_v[:, blocks[-1].n_seen :] = 0, 0
        more: tuple = ()  # the last block, which sees most keys, writes their gradients first, the others add to them
        for block in reversed(blocks):
            rows, keys_seen = grads[:, block.queries], slice(0, block.n_seen)
            weights = _exponentials(queries, keys, block, seen)
            dscores = np.empty_like(weights)
            onednn.product(
                rows, values[:, keys_seen].swapaxes(1, 2), dscores, None, ("times",), ("linear", scale),
                factors=(weights,),
            )
            onednn.product(weights.swapaxes(1, 2), rows[..., :size], to_v[:, keys_seen], None, *more)
            onednn.product(dscores.swapaxes(1, 2), queries[:, block.queries], to_k[:, keys_seen], None, *more)
            onednn.product(dscores, keys[:, keys_seen], to_q[:, block.queries])
            more = (("add",),)

    parallel(work, cpu._groups(q, n_keys))
    return None


def _with_inner(grads: np.ndarray, out: np.ndarray, log_total: np.ndarray) -> np.ndarray:
    """Gradients dy (H, T, D), divided by the sums of exponentials, and -y.dy in two columns more, bfloat16.

    So [dy, -y.dy] [v, 1]^T = dy v^T - y.dy. One column of 16 bits holds y.dy with an error that all keys of a row have
    in common, which would add up; the second one takes what the first has lost.
    """
    size = grads.shape[-1]
    wide = np.empty((*grads.shape[:-1], size + 2), np.float32)
    np.multiply(grads, np.exp(-log_total), out=wide[..., :size])
    inner = wide[..., size]
    np.vecdot(wide[..., :size], out, out=inner)
    np.negative(inner, out=inner)
    np.subtract(inner, inner.astype(onednn.bfloat16()), out=wide[..., size + 1])
    found = np.empty(wide.shape, onednn.bfloat16())
    onednn.convert(wide, found)
    return found
