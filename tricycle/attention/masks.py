"""Boolean attention masks: True where a query may attend to a key. Shapes: B batch, T queries, S keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tricycle.devices import Array


def length_mask(
    lengths: Sequence[int] | Array, n_keys: int, n_items: int | None = None, least: int = 0, title: str = "length_mask"
) -> np.ndarray:
    """Return the mask (B, S), True for the first `lengths[b]` keys; ValueError unless `least` <= lengths <= S.

    Args:
        n_items: B, if known. least: the minimum length. title: the beginning of error messages.

    Raises:
        ValueError: lengths below `least` or above n_keys, not integers, or not one for each item.
    """
    counts = np.asarray(lengths)
    if counts.shape != (counts.size if n_items is None else n_items,) or (
        counts.size and counts.dtype.kind not in "iu"
    ):
        shape = f"({'batch' if n_items is None else n_items},)"
        raise ValueError(
            f"{title}: expected lengths as whole numbers of shape {shape}, got {counts.dtype} of shape {counts.shape}"
        )
    if counts.size and not least <= counts.min() <= counts.max() <= n_keys:
        raise ValueError(f"{title}: expected lengths from {least} to {n_keys}, got {counts.min()} to {counts.max()}")
    return np.arange(n_keys) < counts[:, None]


def causal_mask(n_queries: int, n_keys: int | None = None) -> np.ndarray:
    """Return the boolean mask (1, T, S), True for visible: the last of T queries attends to all S keys (default T)."""
    n_keys = n_queries if n_keys is None else n_keys
    return np.tri(n_queries, n_keys, n_keys - n_queries, bool)[None]
