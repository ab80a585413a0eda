"""Boolean masks of attention: True where a key may be seen. Shapes: B batch, T queries, S keys."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tricycle.devices import Array


def length_mask(
    lengths: Sequence[int] | Array, n_keys: int, n_items: int | None = None, least: int = 0, title: str = "length_mask"
) -> np.ndarray:
    """Return booleans (B, S): True for the first `lengths[b]` keys of item b.

    Args:
        n_items: B, if it is known. least: no length may be smaller. title: named in errors.

    Raises:
        ValueError: a length below `least` or above n_keys, or that is no whole number, or not one for each item.
    """
    counts = np.asarray(lengths)
    if counts.shape != (counts.size if n_items is None else n_items,) or (
        counts.size and counts.dtype.kind not in "iu"
    ):
        wanted = f"({'batch' if n_items is None else n_items},)"
        raise ValueError(
            f"{title}: expected lengths as whole numbers of shape {wanted}, got {counts.dtype} of shape {counts.shape}"
        )
    if counts.size and not least <= counts.min() <= counts.max() <= n_keys:
        raise ValueError(f"{title}: expected lengths from {least} to {n_keys}, got {counts.min()} to {counts.max()}")
    return np.arange(n_keys) < counts[:, None]


def causal_mask(n_queries: int, n_keys: int | None = None) -> np.ndarray:
    """Return booleans (1, T, S): the last query sees all S keys (T unless given), each one before it one key fewer."""
    n_keys = n_queries if n_keys is None else n_keys
    return np.tri(n_queries, n_keys, n_keys - n_queries, bool)[None]
