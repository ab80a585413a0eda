"""Norms for training, each direction in one pass over memory."""

from __future__ import annotations

from types import NotImplementedType

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.compiled.elementwise import fits
from tricycle_accelerators.compiled.generation import loops, training_loops


def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | NotImplementedType:
    if not fits(x, gain, gain if bias is None else bias) or (bias is not None and not centred):
        return NotImplemented
    rows = x.reshape(-1, x.shape[-1])
    y = np.empty_like(rows)
    means, scales = np.zeros((2, len(rows)), np.float32)

    def work(piece: slice) -> None:
        if centred:
            shift = np.zeros_like(gain) if bias is None else bias
            training_loops().layer_norm(rows[piece], gain, shift, eps, y[piece], means[piece], scales[piece])
        else:
            loops().rms_norm(rows[piece], gain, eps, y[piece], scales[piece])

    threads.parallel(work, pieces.cut(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), means.reshape(statistics), scales.reshape(statistics)


def layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | NotImplementedType:
    if not fits(x, grad, gain, mean, scale):
        return NotImplemented
    rows, slopes = (a.reshape(-1, x.shape[-1]) for a in (x, grad))
    means, scales = mean.reshape(-1), scale.reshape(-1)
    dx = np.empty_like(rows)

    def work(piece: slice) -> np.ndarray:
        sums = np.zeros((2, rows.shape[1]), np.float32)
        if centred:
            compute = training_loops().layer_norm_backward
            compute(slopes[piece], rows[piece], gain, means[piece], scales[piece], dx[piece], sums)
        else:
            training_loops().rms_norm_backward(slopes[piece], rows[piece], gain, scales[piece], dx[piece], sums)
        return sums

    dgain, dbias = pieces.sum_over(work, pieces.cut(*rows.shape))
    return dx.reshape(x.shape), dgain, dbias
