"""Cross-entropy in one pass over memory: what a row needs stays near while its gradient is made."""

from __future__ import annotations

from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle_accelerators import buffers, pieces
from tricycle_accelerators.compiled.elementwise import as_numbers, why_not_large
from tricycle_accelerators.compiled.loaded import load
from tricycle_accelerators.providers import unless


def _why_not_cross_entropy(logits: np.ndarray, *_: Any, **__: Any) -> str | None:
    return why_not_large(logits)


@unless(_why_not_cross_entropy)
def cross_entropy(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float = 0.0, with_gradient: bool = True
) -> tuple[np.ndarray, np.ndarray | None] | NotImplementedType:
    if not 0 <= labels.min() <= labels.max() < logits.shape[1]:
        return NotImplemented
    slope = buffers.empty(logits.shape if with_gradient else (len(logits), 0), logits.dtype)
    rows, slopes = as_numbers(logits), as_numbers(slope)
    places = labels.astype(np.int64)
    shares = weights.astype(np.float32)
    compute = load("training_loops").cross_entropy

    def work(piece: slice) -> float:
        cost: float = compute(rows[piece], places[piece], shares[piece], smoothing, slopes[piece])
        return cost

    loss = np.asarray(pieces.sum_over(work, pieces.cut(*logits.shape)), np.float32)
    return loss, slope if with_gradient else None
