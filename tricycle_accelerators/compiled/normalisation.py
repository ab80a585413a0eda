"""Norms for training, each direction in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle_accelerators import buffers, pieces, threads
from tricycle_accelerators.compiled.elementwise import (
    FLOAT32,
    IN_ONE_PIECE,
    SMALL,
    TOO_SMALL,
    as_numbers,
    why_not_few_rows,
)
from tricycle_accelerators.compiled.loaded import load
from tricycle_accelerators.providers import unless

# what is normed or its gradient, and what comes of it: all that the loops are compiled for
CENTRED = {("float32", "float32"), ("float32", "bfloat16")}
NOT_CENTRED = CENTRED | {("bfloat16", "bfloat16")}


def _why_not_large(x: np.ndarray, other: Any, subtract_mean: bool) -> str | None:
    """Return why there is no loop for many rows, and results of that dtype or none, or it is not worth it."""
    if x.size < SMALL:
        return TOO_SMALL
    dtypes = x.dtype.name, x.dtype.name if other is None else np.dtype(other).name
    if dtypes not in (CENTRED if subtract_mean else NOT_CENTRED):
        return f"rows of {dtypes[0]} with results or gradients of {dtypes[1]}"
    return None if x.flags.carray else f"rows {IN_ONE_PIECE}"


def _why_not_float32(*statistics: np.ndarray | None) -> str | None:
    for array in statistics:
        if array is not None and not (array.dtype == FLOAT32 and array.flags.carray):
            return f"parameters and statistics of float32 {IN_ONE_PIECE}"
    return None


def _why_not_layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> str | None:
    if bias is not None and not subtract_mean:
        return "a bias of rows that are not centred"
    if x.size >= SMALL:
        return _why_not_large(x, dtype, subtract_mean) or _why_not_float32(gain, bias)
    if dtype is not None and dtype != FLOAT32:
        return f"results of float32 from few rows, got {np.dtype(dtype)}"
    return why_not_few_rows(x) or _why_not_float32(gain, bias)


@unless(_why_not_layer_norm)
def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> Any:
    if x.size < SMALL:
        return _normalize_few_rows(x, gain, bias, eps, subtract_mean)
    rows = as_numbers(x).reshape(-1, x.shape[-1])
    y = buffers.empty(rows.shape, x.dtype if dtype is None else dtype)
    out = as_numbers(y)
    means, scales = np.zeros((2, len(rows)), np.float32)

    def work(piece: slice) -> None:
        if subtract_mean:
            shift = np.zeros_like(gain) if bias is None else bias
            load("loops").layer_norm(rows[piece], gain, shift, eps, out[piece], means[piece], scales[piece])
        else:
            load("loops").rms_norm(rows[piece], gain, eps, out[piece], scales[piece])

    threads.parallel(work, pieces.cut(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), means.reshape(statistics), scales.reshape(statistics)


def _normalize_few_rows(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, subtract_mean: bool
) -> Any:
    """Compute `layer_norm` of a few tokens in this thread."""
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    y = np.empty(rows.shape, FLOAT32)
    means, scales = np.zeros(len(rows), FLOAT32), np.empty(len(rows), FLOAT32)
    if subtract_mean:
        load("loops").layer_norm(rows, gain, np.zeros_like(gain) if bias is None else bias, eps, y, means, scales)
    else:
        load("loops").rms_norm(rows, gain, eps, y, scales)
    statistics = (*shape[:-1], 1)
    return y.reshape(shape), means.reshape(statistics), scales.reshape(statistics)


def _why_not_layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, subtract_mean: bool
) -> str | None:
    why = _why_not_large(x, grad.dtype, subtract_mean) or _why_not_float32(gain, mean, scale)
    return why if why or grad.flags.carray else f"a gradient {IN_ONE_PIECE}"


@unless(_why_not_layer_norm_backward)
def layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, subtract_mean: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dx = buffers.empty(x.shape, x.dtype)
    rows, slopes, out = (as_numbers(a).reshape(-1, x.shape[-1]) for a in (x, grad, dx))
    means, scales = mean.reshape(-1), scale.reshape(-1)

    def work(piece: slice) -> np.ndarray:
        sums = np.zeros((2, rows.shape[1]), np.float32)
        if subtract_mean:
            compute = load("training_loops").layer_norm_backward
            compute(slopes[piece], rows[piece], gain, means[piece], scales[piece], out[piece], sums)
        else:
            load("training_loops").rms_norm_backward(slopes[piece], rows[piece], gain, scales[piece], out[piece], sums)
        return sums

    dgain, dbias = pieces.sum_over(work, pieces.cut(*rows.shape))
    return dx, dgain, dbias
