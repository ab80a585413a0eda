"""RMS norm for training, each direction in one pass over memory."""

from __future__ import annotations

from types import NotImplementedType

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.compiled.elementwise import fits
from tricycle_accelerators.compiled.generation import loops


def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | NotImplementedType:
    if centred or bias is not None or not fits(x, gain):
        return NotImplemented
    rows = x.reshape(-1, x.shape[-1])
    y = np.empty_like(rows)
    scale = np.empty(len(rows), np.float32)
    compute = loops().rms_norm
    threads.parallel(lambda piece: compute(rows[piece], gain, eps, y[piece], scale[piece]), pieces.cut(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), np.zeros(statistics, np.float32), scale.reshape(statistics)


def layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | NotImplementedType:
    if centred or not fits(x, grad, gain, scale):
        return NotImplemented
    rows, slopes = (a.reshape(-1, x.shape[-1]) for a in (x, grad))
    scales = scale.reshape(-1)
    dx = np.empty_like(rows)
    compute = loops().rms_norm_backward

    def work(piece: slice) -> np.ndarray:
        sums = np.zeros((2, rows.shape[1]), np.float32)
        compute(slopes[piece], rows[piece], gain, scales[piece], dx[piece], sums)
        return sums

    dgain, dbias = pieces.sum_over(work, pieces.cut(*rows.shape))
    return dx.reshape(x.shape), dgain, dbias
