"""Layer norm and RMS norm kernels by Numba, forward and backward in one pass over memory each."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle_accelerators import buffers, chunks, threads
from tricycle_accelerators.compiled.elementwise import (
    CONTIGUOUS,
    FLOAT32,
    MIN_SIZE,
    TOO_SMALL,
    as_contiguous,
    few_rows_decline_reason,
    view_for_loops,
)
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when

# what is normed or its gradient, and what comes of it: all that the loops are compiled for
LAYER_NORM_DTYPES = {("float32", "float32"), ("float32", "bfloat16")}
RMS_NORM_DTYPES = LAYER_NORM_DTYPES | {("bfloat16", "bfloat16")}


def _large_decline_reason(x: np.ndarray, other: Any, subtract_mean: bool) -> str | None:
    """Return why no loop for many rows runs (x small, dtypes not allowed for this norm), or None."""
    if x.size < MIN_SIZE:
        return TOO_SMALL
    dtypes = x.dtype.name, x.dtype.name if other is None else np.dtype(other).name
    if dtypes not in (LAYER_NORM_DTYPES if subtract_mean else RMS_NORM_DTYPES):
        return f"rows of {dtypes[0]} with results or gradients of {dtypes[1]}"
    return None


def _float32_decline_reason(*statistics: np.ndarray | None) -> str | None:
    """Return why arrays that are not None are not all contiguous float32, or None if they are."""
    for array in statistics:
        if array is not None and not (array.dtype == FLOAT32 and array.flags.carray):
            return f"parameters and statistics of float32 {CONTIGUOUS}"
    return None


def _layer_norm_decline_reason(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> str | None:
    """Return why no loop runs (bias without mean, dtypes, memory order; x may be small or large), or None."""
    if bias is not None and not subtract_mean:
        return "a bias of rows that are not centred"
    if x.size >= MIN_SIZE:
        return _large_decline_reason(x, dtype, subtract_mean) or _float32_decline_reason(gain, bias)
    if dtype is not None and dtype != FLOAT32:
        return f"results of float32 from few rows, got {np.dtype(dtype)}"
    return few_rows_decline_reason(x) or _float32_decline_reason(gain, bias)


@decline_when(_layer_norm_decline_reason)
def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> Any:
    """Return layer norm (RMS norm without `subtract_mean`, means 0), means and 1 / deviations (..., 1), by Numba."""
    if x.size < MIN_SIZE:
        return _normalize_few_rows(x, gain, bias, eps, subtract_mean)
    rows = view_for_loops(x).reshape(-1, x.shape[-1])
    y = buffers.empty(rows.shape, x.dtype if dtype is None else dtype)
    out = view_for_loops(y)
    means, scales = np.zeros((2, len(rows)), np.float32)

    def work(piece: slice) -> None:
        old = as_contiguous(rows[piece])
        if subtract_mean:
            shift = np.zeros_like(gain) if bias is None else bias
            load_loops("loops").layer_norm(old, gain, shift, eps, out[piece], means[piece], scales[piece])
        else:
            load_loops("loops").rms_norm(old, gain, eps, out[piece], scales[piece])

    threads.parallel_for(work, chunks.row_chunks(*rows.shape), calls_blas=False)
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), means.reshape(statistics), scales.reshape(statistics)


def _normalize_few_rows(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, subtract_mean: bool
) -> Any:
    """Return `layer_norm`'s results of a few float32 rows, in this thread and in two thirds of its time for one row."""
    shape = x.shape
    rows = as_contiguous(x).reshape(-1, shape[-1])
    y = np.empty(rows.shape, FLOAT32)
    means, scales = np.zeros(len(rows), FLOAT32), np.empty(len(rows), FLOAT32)
    if subtract_mean:
        load_loops("loops").layer_norm(rows, gain, np.zeros_like(gain) if bias is None else bias, eps, y, means, scales)
    else:
        load_loops("loops").rms_norm(rows, gain, eps, y, scales)
    statistics = (*shape[:-1], 1)
    return y.reshape(shape), means.reshape(statistics), scales.reshape(statistics)


def _layer_norm_backward_decline_reason(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, subtract_mean: bool
) -> str | None:
    """Return why the loop cannot run: x is small, or dtypes or memory order do not fit; else None."""
    return _large_decline_reason(x, grad.dtype, subtract_mean) or _float32_decline_reason(gain, mean, scale)


@decline_when(_layer_norm_backward_decline_reason)
def layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, subtract_mean: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of input, gain and bias of layer norm or RMS norm, by Numba, chunks of rows in parallel."""
    dx = buffers.empty(x.shape, x.dtype)
    rows, slopes, out = (view_for_loops(a).reshape(-1, x.shape[-1]) for a in (x, grad, dx))
    means, scales = mean.reshape(-1), scale.reshape(-1)

    def work(piece: slice) -> np.ndarray:
        sums = np.zeros((2, rows.shape[1]), np.float32)
        slope, old = as_contiguous(slopes[piece]), as_contiguous(rows[piece])
        if subtract_mean:
            compute = load_loops("training_loops").layer_norm_backward
            compute(slope, old, gain, means[piece], scales[piece], out[piece], sums)
        else:
            load_loops("training_loops").rms_norm_backward(slope, old, gain, scales[piece], out[piece], sums)
        return sums

    dgain, dbias = chunks.sum_over_chunks(work, chunks.row_chunks(*rows.shape), calls_blas=False)
    return dx, dgain, dbias
