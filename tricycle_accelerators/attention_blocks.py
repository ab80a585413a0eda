"""Partition attention for threads: groups of heads of one batch item, and blocks of queries with their visible keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tricycle.kernels import ScoreOptions
from tricycle.kernels.ranges import visible_keys
from tricycle_accelerators import chunks, threads

QUERY_BLOCK, KEY_BLOCK = 128, 1024  # queries of a head, and keys
LONG_SEQUENCE = 1024  # keys seen, from which on blocks of twice as many queries are quicker, though more is hidden
MAX_STACKED_ROWS = 512  # of a product, where several heads share their keys: their scores stay in a core's cache


class QueryBlock(NamedTuple):
    """A range of queries and the keys that at least one of these queries sees, divided into key blocks.

    Attributes:
        diagonal: the last key that the first query sees, None where it sees all: later keys are hidden from it, one
            fewer from each query after it.
        edge: the last key before the first query's window: it and one key more for each later query are hidden.
    """

    queries: slice
    keys: list[slice]
    diagonal: int | None
    edge: int | None

    @property
    def visible(self) -> slice:
        """Return the slice of keys from the first to the last that any query of this block sees."""
        return slice(self.keys[0].start, self.keys[-1].stop)


def _query_blocks(n_queries: int, n_keys: int, score_options: ScoreOptions, step: int) -> list[QueryBlock]:
    """Return QueryBlocks of `step` queries (the last shorter), with visible key blocks, diagonal and window edge."""
    blocks = []
    for start in range(0, n_queries, step):
        queries = slice(start, min(start + step, n_queries))
        seen = visible_keys(score_options, queries, n_keys)
        diagonal = None if score_options.offset is None else start + score_options.offset
        edge = None if diagonal is None or score_options.window is None else diagonal - score_options.window
        n_diagonal = 0 if diagonal is None else max(0, seen.stop - diagonal)
        last = max(seen.start, seen.stop - max(KEY_BLOCK, n_diagonal))  # the diagonal lies in the last block whole
        cuts = [*range(seen.start, last, KEY_BLOCK), last]
        keys = [slice(a, b) for a, b in zip(cuts, [*cuts[1:], seen.stop])]
        blocks.append(QueryBlock(queries, keys, diagonal, edge))
    return blocks


class HeadGroup(NamedTuple):
    """Query heads of one batch item and the key heads that they use.

    A group has either all query heads of its key heads, or some query heads of one key head.
    """

    item: int
    heads: slice
    key_heads: slice


class AttentionPlan(NamedTuple):
    """The partition of an attention computation into head groups and query blocks.

    Attributes:
        groups: what one call of a thread's work does.
        blocks: the queries of each group, with their keys.
        splits_key_heads: whether the query heads of one key head lie in several groups.
    """

    groups: list[HeadGroup]
    blocks: list[QueryBlock]
    splits_key_heads: bool


def make_head_groups(q: np.ndarray, k: np.ndarray) -> tuple[list[HeadGroup], bool]:
    """Return head groups of q (B, T, H, D), k (B, S, K, D) for threads, and whether heads of one key head are split."""
    n_items, _, n_heads, _ = q.shape
    n_key_heads = k.shape[2]
    workers = 1 if threads.in_worker() else threads.n_threads()
    if n_heads > n_key_heads and n_items * n_key_heads < workers:
        n_together = max(1, n_items * n_heads // (2 * workers))
        return _split_groups(n_items, n_key_heads, n_heads // n_key_heads, n_together), True
    n_together = max(1, min(n_key_heads, n_items * n_key_heads // (4 * workers)))
    return _whole_groups(n_items, n_key_heads, n_heads // n_key_heads, n_together), False


def plan_attention(q: np.ndarray, k: np.ndarray, score_options: ScoreOptions) -> AttentionPlan:
    """Plan attention of q (B, T, H, D), k (B, S, K, D): head groups, query blocks; assumes each query sees a key."""
    n_items, n_queries, n_heads, _ = q.shape
    n_keys, n_key_heads = k.shape[1:3]
    n_sharing = n_heads // n_key_heads
    workers = 1 if threads.in_worker() else threads.n_threads()
    in_parts = n_sharing > 1 and n_items * n_key_heads < workers
    n_stacked = max(1, n_items * n_heads // (2 * workers)) if in_parts else n_sharing
    step = _query_block_size(n_stacked, min(n_queries, score_options.window or n_queries))
    blocks = _query_blocks(n_queries, n_keys, score_options, step)
    if in_parts:
        return AttentionPlan(_split_groups(n_items, n_key_heads, n_sharing, n_stacked), blocks, in_parts)
    widest = max(keys.stop - keys.start for block in blocks for keys in block.keys)
    fit = chunks.CHUNK_SIZE // (n_stacked * min(n_queries, step) * widest)
    n_together = max(1, min(fit, n_items * n_key_heads // (4 * workers if workers > 1 else 1)))
    return AttentionPlan(_whole_groups(n_items, n_key_heads, n_sharing, n_together), blocks, in_parts)


def _query_block_size(n_stacked: int, n_seen: int) -> int:
    """Return the queries per block: 16 or more, fewer for many `n_stacked` heads, up to twice QUERY_BLOCK if long.

    Args:
        n_seen: keys that a query sees at most, about.
    """
    most = QUERY_BLOCK if n_seen < LONG_SEQUENCE else 2 * QUERY_BLOCK
    return min(most, max(16, MAX_STACKED_ROWS // (16 * n_stacked) * 16))


def _whole_groups(n_items: int, n_key_heads: int, n_sharing: int, step: int) -> list[HeadGroup]:
    """Return a HeadGroup for each item and each `step` key heads, with all of their query heads."""
    parts = [slice(start, min(start + step, n_key_heads)) for start in range(0, n_key_heads, step)]
    heads = [slice(part.start * n_sharing, part.stop * n_sharing) for part in parts]
    return [HeadGroup(item, *pair) for item in range(n_items) for pair in zip(heads, parts)]


def _split_groups(n_items: int, n_key_heads: int, n_sharing: int, step: int) -> list[HeadGroup]:
    """Return a HeadGroup for each item, key head and `step` of its query heads."""
    return [
        HeadGroup(item, slice(start, min(start + step, (key_head + 1) * n_sharing)), slice(key_head, key_head + 1))
        for item, key_head in np.ndindex(n_items, n_key_heads)
        for start in range(key_head * n_sharing, (key_head + 1) * n_sharing, step)
    ]


def head_major(x: np.ndarray, item: int, heads: slice) -> np.ndarray:
    """Return a view (H, T, D) of some heads of one batch item of an array (B, T, H, D)."""
    return x[item, :, heads].transpose(1, 0, 2)
