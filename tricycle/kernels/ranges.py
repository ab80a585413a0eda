"""Ranges of visible keys and queries under causal and sliding-window attention, for blockwise kernels."""

from __future__ import annotations

from tricycle.kernels.reference.attention import ScoreOptions


def visible_keys(score_options: ScoreOptions, queries: slice, n_keys: int) -> slice:
    """Return the slice of keys visible to any of a slice of queries, by causal offset and window; (0, 0) if none."""
    if score_options.offset is None:
        return slice(0, n_keys if queries.start < queries.stop else 0)
    start, stop = 0, min(n_keys, queries.stop + score_options.offset)
    if score_options.window is not None:
        start = max(0, queries.start + score_options.offset - score_options.window + 1)
    return slice(start, stop) if start < stop and queries.start < queries.stop else slice(0, 0)


def queries_with_keys(score_options: ScoreOptions, n_queries: int, n_keys: int) -> slice:
    """Return the slice of queries that attend to at least one key, by causal offset and window; (0, 0) if none."""
    if score_options.offset is None:
        return slice(0, n_queries if n_keys else 0)
    start, stop = max(0, -score_options.offset), n_queries
    if score_options.window is not None:
        stop = min(stop, n_keys - 1 - score_options.offset + score_options.window)
    return slice(start, stop) if n_keys and start < stop else slice(0, 0)


def block_score_options(score_options: ScoreOptions, first_query: int, first_key: int) -> ScoreOptions:
    """Return score options whose `offset` is for a block that begins at these indices; unchanged if it is None."""
    offset = score_options.offset
    return score_options if offset is None else score_options._replace(offset=offset + first_query - first_key)
