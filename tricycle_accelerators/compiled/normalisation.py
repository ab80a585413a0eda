"""Norms for training, each direction in one pass over memory."""

from __future__ import annotations

from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.compiled.elementwise import SMALL, as_numbers, few_rows
from tricycle_accelerators.compiled.loaded import loops, training_loops

# what is normed or its gradient, and what comes of it: all that the loops are compiled for
CENTRED = {("float32", "float32"), ("float32", "bfloat16")}
NOT_CENTRED = CENTRED | {("bfloat16", "bfloat16")}


def _takes(x: np.ndarray, other: Any, centred: bool, *statistics: np.ndarray | None) -> bool:
    """Whether there is a loop for rows and results of these dtypes, and it is worth it: x is large, or of few rows, and
    in one piece.
    """
    dtypes = x.dtype.name, np.dtype(other).name
    fit = (a is None or (a.dtype == np.float32 and a.flags.carray) for a in statistics)
    worth_it = x.size >= SMALL or few_rows(x)
    return worth_it and dtypes in (CENTRED if centred else NOT_CENTRED) and x.flags.carray and all(fit)


def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centred: bool, dtype: Any = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | NotImplementedType:
    dtype = np.dtype(dtype or x.dtype)
    if not _takes(x, dtype, centred, gain, bias) or (bias is not None and not centred):
        return NotImplemented
    rows = as_numbers(x).reshape(-1, x.shape[-1])
    y = np.empty(rows.shape, dtype)
    out = as_numbers(y)
    means, scales = np.zeros((2, len(rows)), np.float32)
    few = few_rows(x)

    def work(piece: slice) -> None:
        if centred:
            shift = np.zeros_like(gain) if bias is None else bias
            loops().layer_norm(rows[piece], gain, shift, eps, out[piece], means[piece], scales[piece])
        else:
            loops().rms_norm(rows[piece], gain, eps, out[piece], scales[piece])

    if few:
        work(slice(0, len(rows)))
    else:
        threads.parallel(work, pieces.cut(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), means.reshape(statistics), scales.reshape(statistics)


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
