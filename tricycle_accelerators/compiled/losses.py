"""Cross-entropy in one pass over memory: what a row needs stays near while its gradient is made."""

from __future__ import annotations

from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle_accelerators import pieces
from tricycle_accelerators.compiled.elementwise import as_numbers, fit_16, fits
from tricycle_accelerators.compiled.loaded import training_loops


def cross_entropy(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float = 0.0
) -> np.ndarray | NotImplementedType:
    return _cross_entropy(logits, labels, weights, smoothing, np.empty((len(logits), 0), logits.dtype))


def cross_entropy_with_slope(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float = 0.0
) -> tuple[np.ndarray, np.ndarray] | NotImplementedType:
    slope = np.empty(logits.shape, logits.dtype)
    loss = _cross_entropy(logits, labels, weights, smoothing, slope)
    return NotImplemented if isinstance(loss, NotImplementedType) else (loss, slope)


def _cross_entropy(
    logits: np.ndarray, labels: np.ndarray, weights: np.ndarray, smoothing: float, slope: np.ndarray
) -> Any:
    if not (fits(logits) or fit_16(logits)) or not 0 <= labels.min() <= labels.max() < logits.shape[1]:
        return NotImplemented
    rows, slopes = as_numbers(logits), as_numbers(slope)
    places = labels.astype(np.int64)
    shares = weights.astype(np.float32)
    compute = training_loops().cross_entropy

    def work(piece: slice) -> float:
        cost: float = compute(rows[piece], places[piece], shares[piece], smoothing, slopes[piece])
        return cost

    return np.asarray(pieces.sum_over(work, pieces.cut(*logits.shape)), np.float32)
