"""Which keys a query may see. Shapes: B batch, T queries, S keys, H heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.tensor import Tensor

Mask = Tensor | Array | None


def length_mask(
    lengths: Sequence[int] | Array, n_keys: int, n_items: int | None = None, least: int = 0, title: str = "length_mask"
) -> np.ndarray:
    """(B, S) booleans: True for the first `lengths[b]` keys of item b.

    Args:
        n_items: B, if it is known. least: no length may be smaller. title: who refuses.

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
    """(1, T, S) booleans: the last query sees all keys (T of them unless array), each one before it one key fewer."""
    n_keys = n_queries if n_keys is None else n_keys
    return np.tri(n_queries, n_keys, n_keys - n_queries, bool)[None]


def additive_mask(op: str, mask: Mask, like: Array, n_queries: int, n_keys: int, n_heads: int = 1) -> Array | None:
    """What is added to scores (B, H, T, S): 0, and -inf where a key is hidden.

    Args:
        like: an array of the scores' batch size, dtype and device.
        mask: booleans, True where a key may be seen: (B, S), (B, T, S) or (B, H, T, S), whose axes may be 1 but for S.

    Returns:
        (B or 1, H or 1, T or 1, S).

    Raises:
        ValueError: another dtype or shape.
    """
    if mask is None:
        return None
    xp = array_module(like)
    array = mask.array if isinstance(mask, Tensor) else mask
    n_items = len(like)
    full = {2: (n_items, n_keys), 3: (n_items, n_queries, n_keys), 4: (n_items, n_heads, n_queries, n_keys)}
    wanted = full.get(array.ndim, ())
    fits = [n in (1, m) for n, m in zip(array.shape[:-1], wanted)]
    if not wanted or array.dtype != bool or array.shape[-1] != n_keys or not all(fits):
        shapes = " or ".join(map(str, full.values()))
        raise ValueError(f"{op}: expected a mask of booleans of shape {shapes}, got {array.dtype} of {array.shape}")
    spread = array[(slice(None), *[None] * (4 - array.ndim))]
    return xp.where(xp.asarray(spread), 0, -xp.inf).astype(like.dtype)
