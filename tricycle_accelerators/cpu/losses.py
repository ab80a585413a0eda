"""Cross-entropy kernel in NumPy and threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.kernels.dispatch import upcast
from tricycle_accelerators import buffers, chunks
from tricycle_accelerators.providers import decline_when


@decline_when(lambda logits, *_, **__: None if logits.size else "an empty array")
def cross_entropy(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float = 0.0, with_gradient: bool = True
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (weighted loss sum, gradient in logits' dtype or None) by NumPy in threads; NotImplemented if empty."""
    wide_logits = upcast(logits)
    slope = buffers.empty(logits.shape, wide_logits.dtype) if with_gradient else None

    def work(piece: slice) -> np.ndarray:
        here = None if slope is None else slope[piece]
        return _cross_entropy(wide_logits[piece], labels[piece], weights[piece], smoothing, here)

    if logits.size <= chunks.UNSHARED_SIZE:
        total = _cross_entropy(wide_logits, labels, weights, smoothing, slope)
    else:
        total = chunks.sum_over_chunks(work, chunks.row_chunks(*logits.shape))
    return total, None if slope is None else slope.astype(logits.dtype, copy=False)


def _cross_entropy(
    rows: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float, slope: np.ndarray | None
) -> np.ndarray:
    """Return the weighted loss of some rows as a 0-d array; write the gradient into `slope` if that is not None."""
    shift: Any = 0
    ones = chunks.ones_vector(rows.shape[1], rows)
    exponentials = slope
    total = None
    if rows.max() < chunks.SAFE_EXPONENT:
        exponentials = np.exp(rows, out=slope)
        total = exponentials @ ones
    if total is None or not total.min() > 1 / chunks.MAX_EXP:
        highest = rows.max(axis=1, keepdims=True)
        exponentials = np.subtract(rows, highest, out=slope)
        shift = highest[:, 0]
        np.exp(exponentials, out=exponentials)
        total = exponentials @ ones
    # where the truth stands in all rows one after another
    places = np.arange(0, rows.size, rows.shape[1]) + labels.astype(np.intp, copy=False)
    truth = rows.take(places)
    if smoothing:
        truth = (1 - smoothing) * truth + smoothing * rows.mean(axis=1)
    costs = shift + np.log(total) - truth
    if np.count_nonzero(weights) < len(weights):  # such a row may cost infinitely much, and 0 times that is not 0
        costs = np.where(weights == 0, 0, costs)
    if slope is not None:
        slope *= (weights / total)[:, None]
        if smoothing:
            slope -= (weights * (smoothing / rows.shape[1]))[:, None]
        slope.reshape(-1)[places] -= weights * (1 - smoothing)  # a view: it is made here, in one piece
    return np.asarray((costs * weights).sum())
