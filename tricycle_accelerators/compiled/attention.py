"""Attention of many queries: BLAS multiplies, and all between its products is one call for each block.

Some heads of one item at a time, some queries of these, and some keys. A row's exponentials are shifted by the largest
of its scores so far, and sums of earlier blocks are made smaller when a larger one comes (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax"), so that memory grows with the number of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tricycle.kernels import Scoring
from tricycle.kernels.reference.widening import wide
from tricycle_accelerators import threads
from tricycle_accelerators.attention_blocks import Block, Group, Plan, heads_first, make_plan, stack, unstack
from tricycle_accelerators.compiled.generation import training_loops

LEAST_QUERIES = 16


def _takes(q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring, mask: np.ndarray | None) -> bool:
    """Whether this is our business: enough queries of float32 that each see a key, no mask and no cap."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    if mask is not None or scoring.cap is not None or n_queries < LEAST_QUERIES or not v.size:
        return False
    all_see = scoring.queries_seeing(n_queries, n_keys) == slice(0, n_queries)
    return all_see and q.dtype == k.dtype == v.dtype == np.float32


def _last_and_window(block: Block, seen: slice, scoring: Scoring) -> tuple[int, int]:
    """Query t of a block sees the keys from t + last - window + 1 to t + last of those in `seen`; window 0 for all."""
    last = seen.stop if block.diagonal is None else block.diagonal - seen.start
    return last, 0 if block.edge is None else scoring.window or 0


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scoring: Scoring,
    nothing: bool,
    mask: np.ndarray | None = None,
    dtype: Any = None,
) -> Any:
    dtype = dtype or q.dtype
    q, k, v = map(wide, (q, k, v))
    if not _takes(q, k, v, scoring, mask):
        return NotImplemented
    out = np.empty((*q.shape[:3], v.shape[3]), np.float32)
    log_total = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    plan = make_plan(q, k, scoring)

    def work(group: Group) -> None:
        queries = heads_first(q, group.item, group.heads)
        keys, values = (heads_first(array, group.item, group.key_heads) for array in (k, v))
        for block in plan.blocks:
            rows = stack(queries[:, block.queries], len(keys))
            shifts = np.full(queries[:, block.queries].shape[:2], 0 if nothing else -np.inf, np.float32)
            totals = np.full_like(shifts, nothing)
            mixed = np.zeros((*rows.shape[:2], values.shape[2]), np.float32)
            flat = mixed.reshape(-1, mixed.shape[-1])
            for seen in block.keys:
                scores = rows @ keys[:, seen].swapaxes(1, 2)
                limits = _last_and_window(block, seen, scoring)
                training_loops().add_exponentials(
                    scores.reshape(len(flat), -1), flat, shifts, totals, scoring.scale, *limits
                )
                mixed += scores @ values[:, seen]
            place = heads_first(out, group.item, group.heads)[:, block.queries]
            training_loops().divide(flat, shifts, totals, place, log_total[group.item, group.heads, block.queries])

    threads.parallel(work, plan.groups)
    return out.astype(dtype, copy=False), log_total


class _Group(NamedTuple):
    """What the gradients of one group are made of, and where they go.

    Attributes:
        queries, keys, values: (H, T, D), (K, S, D) and (K, S, E).
        grads: (H, T, E). logs, inner: (H, T), of the sums of exponentials; the products of results and their gradients.
        dq, dk, dv: like queries, keys and values; the last two in one piece.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    grads: np.ndarray
    logs: np.ndarray
    inner: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def add_block(self, block: Block, scoring: Scoring) -> None:
        """Write dq of its queries, and add to dk and dv of its keys."""
        n_key_heads = len(self.keys)
        rows, grads = (stack(array[:, block.queries], n_key_heads) for array in (self.queries, self.grads))
        logs, inner = self.logs[:, block.queries], self.inner[:, block.queries]
        dq: Any = 0
        for seen in block.keys:
            scores = rows @ self.keys[:, seen].swapaxes(1, 2)
            slopes = grads @ self.values[:, seen].swapaxes(1, 2)
            flat = (array.reshape(logs.size, -1) for array in (scores, slopes))
            limits = _last_and_window(block, seen, scoring)
            training_loops().differentiate(*flat, logs, inner, scoring.scale, *limits)
            self.dv[:, seen] += scores.swapaxes(1, 2) @ grads
            self.dk[:, seen] += slopes.swapaxes(1, 2) @ rows
            dq = dq + slopes @ self.keys[:, seen]
        self.dq[:, block.queries] = unstack(dq, len(self.queries))


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
    same = grad.dtype == out.dtype == log_total.dtype == dq.dtype == np.float32
    if not same or not log_total.flags.behaved or not _takes(q, k, v, scoring, mask):
        return NotImplemented
    plan = make_plan(q, k, scoring)
    sums: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of groups, for keys and values

    def work(i: int) -> None:
        group = plan.groups[i]
        keys, values = (heads_first(array, group.item, group.key_heads) for array in (k, v))
        grads = heads_first(grad, group.item, group.heads)
        here = _Group(
            heads_first(q, group.item, group.heads),
            keys,
            values,
            grads,
            log_total[group.item, group.heads],
            np.vecdot(grads, heads_first(out, group.item, group.heads)),
            heads_first(dq, group.item, group.heads),
            np.zeros(keys.shape, np.float32),
            np.zeros(values.shape, np.float32),
        )
        for block in plan.blocks:
            here.add_block(block, scoring)
        if plan.in_parts:
            sums[i] = here.dk, here.dv
        else:
            heads_first(dk, group.item, group.key_heads)[...] = here.dk
            heads_first(dv, group.item, group.key_heads)[...] = here.dv

    threads.parallel(work, range(len(plan.groups)))
    if plan.in_parts:
        _add_parts(plan, sums, dk, dv)
    return None


def _add_parts(plan: Plan, sums: dict[int, tuple[np.ndarray, np.ndarray]], dk: np.ndarray, dv: np.ndarray) -> None:
    """What several groups give to one key head, in their order, so that every run gives the same sums."""
    dk[...] = 0
    dv[...] = 0
    for i, group in enumerate(plan.groups):
        for place, part in zip((dk, dv), sums[i]):
            heads_first(place, group.item, group.key_heads)[...] += part
