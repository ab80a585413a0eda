"""Which keys and queries see each other under a `Scoring`, for attention that is computed part by part."""

from __future__ import annotations

from tricycle.kernels.reference.attention import Scoring


def keys_seen(scoring: Scoring, queries: slice, n_keys: int) -> slice:
    """Return the keys that at least one of these queries sees, from the first to the last."""
    if scoring.offset is None:
        return slice(0, n_keys if queries.start < queries.stop else 0)
    start, stop = 0, min(n_keys, queries.stop + scoring.offset)
    if scoring.window is not None:
        start = max(0, queries.start + scoring.offset - scoring.window + 1)
    return slice(start, stop) if start < stop and queries.start < queries.stop else slice(0, 0)


def queries_seeing(scoring: Scoring, n_queries: int, n_keys: int) -> slice:
    """Return the queries that see at least one key."""
    if scoring.offset is None:
        return slice(0, n_queries if n_keys else 0)
    start, stop = max(0, -scoring.offset), n_queries
    if scoring.window is not None:
        stop = min(stop, n_keys - 1 - scoring.offset + scoring.window)
    return slice(start, stop) if n_keys and start < stop else slice(0, 0)


def scoring_of_part(scoring: Scoring, first_query: int, first_key: int) -> Scoring:
    """Return the scoring of the queries and keys from these on, counted from 0 again."""
    return scoring if scoring.offset is None else scoring._replace(offset=scoring.offset + first_query - first_key)
