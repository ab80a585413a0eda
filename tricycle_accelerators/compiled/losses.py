"""Cross-entropy kernel by Numba, in one pass over memory."""

from __future__ import annotations

from types import NotImplementedType

import numpy as np

from tricycle_accelerators import buffers, chunks
from tricycle_accelerators.compiled.elementwise import large_array_decline_reason, view_for_loops
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when


@decline_when(lambda logits, *_, **__: large_array_decline_reason(logits))
def cross_entropy(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float = 0.0, with_gradient: bool = True
) -> tuple[np.ndarray, np.ndarray | None] | NotImplementedType:
    """Return weighted cross-entropy sum, gradient (or None) by Numba; NotImplemented for few logits or bad labels."""
    if not 0 <= labels.min() <= labels.max() < logits.shape[1]:
        return NotImplemented
    slope = buffers.empty(logits.shape if with_gradient else (len(logits), 0), logits.dtype)
    rows, slopes = view_for_loops(logits), view_for_loops(slope)
    places = labels.astype(np.int64)
    shares = weights.astype(np.float32)
    compute = load_loops("training_loops").cross_entropy

    def work(piece: slice) -> float:
        cost: float = compute(rows[piece], places[piece], shares[piece], smoothing, slopes[piece])
        return cost

    loss = np.asarray(chunks.sum_over_chunks(work, chunks.row_chunks(*logits.shape), calls_blas=False), np.float32)
    return loss, slope if with_gradient else None
