"""Cross-entropy, some rows at a time."""

from __future__ import annotations

from types import NotImplementedType

import numpy as np

from tricycle.kernels.reference.widening import wide
from tricycle_accelerators import pieces


def cross_entropy(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float = 0.0
) -> np.ndarray | NotImplementedType:
    if not logits.size:
        return NotImplemented
    wide_logits = wide(logits)

    def work(piece: slice) -> np.ndarray:
        return _cross_entropy(wide_logits[piece], labels[piece], weights[piece], smoothing, None)

    total: np.ndarray = pieces.sum_over(work, pieces.cut(*logits.shape))
    return total


def cross_entropy_with_slope(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float = 0.0
) -> tuple[np.ndarray, np.ndarray] | NotImplementedType:
    if not logits.size:
        return NotImplemented
    wide_logits = wide(logits)
    slope = np.empty(logits.shape, wide_logits.dtype)

    def work(piece: slice) -> np.ndarray:
        return _cross_entropy(wide_logits[piece], labels[piece], weights[piece], smoothing, slope[piece])

    total: np.ndarray = pieces.sum_over(work, pieces.cut(*logits.shape))
    return total, slope.astype(logits.dtype, copy=False)


def _cross_entropy(
    rows: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float, slope: np.ndarray | None
) -> np.ndarray:
    """The sum for some rows, whose gradient overwrites the exponentials.

    Exponentials are not shifted by each row's maximum where one look at all of them says that nothing can overflow or
    vanish.
    """
    shift = np.zeros((len(rows), 1), rows.dtype)
    ones = pieces.ones(rows.shape[1], rows)
    exponentials = slope
    total = None
    if rows.max() < pieces.SAFE_EXPONENT:
        exponentials = np.exp(rows, out=slope)
        total = exponentials @ ones
    if total is None or not total.min() > 1 / pieces.MOST:
        shift = rows.max(axis=1, keepdims=True)
        exponentials = np.subtract(rows, shift, out=slope)
        np.exp(exponentials, out=exponentials)
        total = exponentials @ ones
    places = np.arange(len(rows)), labels
    truth = rows[places]
    if smoothing:
        truth = (1 - smoothing) * truth + smoothing * rows.mean(axis=1)
    # where, for a row that does not count may cost infinitely much, and 0 times that is not 0
    costs = np.where(weights == 0, 0, shift[:, 0] + np.log(total) - truth)
    if slope is not None:
        slope *= (weights / total)[:, None]
        if smoothing:
            slope -= (weights * (smoothing / rows.shape[1]))[:, None]
        slope[places] -= weights * (1 - smoothing)
    return np.asarray((costs * weights).sum())
