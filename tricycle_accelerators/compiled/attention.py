"""Attention of many queries, forward: BLAS multiplies, and all between its two products is one call for each block."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tricycle.kernels import Scoring
from tricycle.kernels.reference.widening import wide
from tricycle_accelerators import threads
from tricycle_accelerators.attention_blocks import heads_first, stack, unstack
from tricycle_accelerators.compiled.generation import loops

LEAST_QUERIES = 16
QUERIES = 64  # of each head in a block
SCORES = 2**18  # in a block, about


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scoring: Scoring,
    nothing: bool,
    mask: np.ndarray | None = None,
    dtype: Any = None,
) -> Any:
    """Threads take some queries each, of as many heads as make scores that stay in a core's cache."""
    dtype = dtype or q.dtype
    q, k, v = map(wide, (q, k, v))
    n_items, n_queries, n_heads, _ = q.shape
    n_keys, n_key_heads = k.shape[1:3]
    group = n_heads // max(1, n_key_heads)
    all_see = scoring.queries_seeing(n_queries, n_keys) == slice(0, n_queries)
    if mask is not None or scoring.cap is not None or n_queries < LEAST_QUERIES or not all_see or not v.size:
        return NotImplemented
    if not q.dtype == k.dtype == v.dtype == np.float32:
        return NotImplemented
    out = np.empty((n_items, n_queries, n_heads, v.shape[3]), np.float32)
    log_total = np.empty((n_items, n_heads, n_queries), np.float32)
    step = max(LEAST_QUERIES, min(QUERIES, SCORES // (group * n_keys) // 16 * 16))
    at_once = max(1, SCORES // (group * step * n_keys))  # key heads

    def attend(task: tuple[int, int, int]) -> None:
        start, item, first = task
        rows = slice(start, min(start + step, n_queries))
        key_heads = slice(first, min(first + at_once, n_key_heads))
        heads = slice(key_heads.start * group, key_heads.stop * group)
        seen = scoring.keys_seen(rows, n_keys)
        queries = stack(heads_first(q[:, rows], item, heads), key_heads.stop - first)
        weights = queries @ heads_first(k[:, seen], item, key_heads).swapaxes(1, 2)
        totals = np.empty((heads.stop - heads.start, rows.stop - rows.start), np.float32)
        last = n_keys if scoring.offset is None else scoring.offset + rows.start - seen.start
        flat = weights.reshape(totals.size, -1)
        loops().softmax_rows(flat, totals, float(scoring.scale), last, scoring.window or 0, nothing)
        mixed = weights @ heads_first(v[:, seen], item, key_heads)
        heads_first(out[:, rows], item, heads)[...] = unstack(mixed, len(totals))
        log_total[item, heads, rows] = totals

    # the longest first, so that no thread is left with one at the end
    tasks = itertools.product(range(0, n_queries, step)[::-1], range(n_items), range(0, n_key_heads, at_once))
    threads.parallel(attend, tasks)
    return out.astype(dtype, copy=False), log_total
