"""Norms for training, each direction in one pass over memory."""

from __future__ import annotations

from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.compiled.elementwise import FLOAT32, SMALL, as_numbers, is_few_rows
from tricycle_accelerators.compiled.loaded import loops, training_loops

# what is normed or its gradient, and what comes of it: all that the loops are compiled for
CENTRED = {("float32", "float32"), ("float32", "bfloat16")}
NOT_CENTRED = CENTRED | {("bfloat16", "bfloat16")}


def _takes(x: np.ndarray, other: Any, centred: bool, *statistics: np.ndarray | None) -> bool:
    """Whether there is a loop for rows and results of these dtypes, and it is worth it: x is large and in one piece."""
    dtypes = x.dtype.name, np.dtype(other).name
    fit = (a is None or (a.dtype == np.float32 and a.flags.carray) for a in statistics)
    return x.size >= SMALL and dtypes in (CENTRED if centred else NOT_CENTRED) and x.flags.carray and all(fit)


def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centred: bool, dtype: Any = None
) -> Any:
    if is_few_rows(x) and (dtype is None or dtype == FLOAT32) and gain.dtype == FLOAT32 and gain.flags.carray:
        return _normalize_few_rows(x, gain, bias, eps, centred)
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    if not _takes(x, dtype, centred, gain, bias) or not (centred or bias is None):
        return NotImplemented
    rows = as_numbers(x).reshape(-1, x.shape[-1])
    y = np.empty(rows.shape, dtype)
    out = as_numbers(y)
    means, scales = np.zeros((2, len(rows)), np.float32)

    def work(piece: slice) -> None:
        if centred:
            shift = np.zeros_like(gain) if bias is None else bias
            loops().layer_norm(rows[piece], gain, shift, eps, out[piece], means[piece], scales[piece])
        else:
            loops().rms_norm(rows[piece], gain, eps, out[piece], scales[piece])

    threads.parallel(work, pieces.cut(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), means.reshape(statistics), scales.reshape(statistics)


def _normalize_few_rows(x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centred: bool) -> Any:
    """Compute `layer_norm` of a few tokens in this thread."""
    if bias is not None and not (centred and bias.dtype == FLOAT32 and bias.flags.carray):
        return NotImplemented
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    y = np.empty(rows.shape, FLOAT32)
    means, scales = np.zeros(len(rows), FLOAT32), np.empty(len(rows), FLOAT32)
    if centred:
        loops().layer_norm(rows, gain, np.zeros_like(gain) if bias is None else bias, eps, y, means, scales)
    else:
        loops().rms_norm(rows, gain, eps, y, scales)
    statistics = (*shape[:-1], 1)
    return y.reshape(shape), means.reshape(statistics), scales.reshape(statistics)


def layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | NotImplementedType:
    if not _takes(x, grad.dtype, centred, gain, mean, scale) or not grad.flags.carray:
        return NotImplemented
    dx = np.empty_like(x)
    rows, slopes, out = (as_numbers(a).reshape(-1, x.shape[-1]) for a in (x, grad, dx))
    means, scales = mean.reshape(-1), scale.reshape(-1)

    def work(piece: slice) -> np.ndarray:
        sums = np.zeros((2, rows.shape[1]), np.float32)
        if centred:
            compute = training_loops().layer_norm_backward
            compute(slopes[piece], rows[piece], gain, means[piece], scales[piece], out[piece], sums)
        else:
            training_loops().rms_norm_backward(slopes[piece], rows[piece], gain, scales[piece], out[piece], sums)
        return sums

    dgain, dbias = pieces.sum_over(work, pieces.cut(*rows.shape))
    return dx, dgain, dbias
