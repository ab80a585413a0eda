"""Layer norm in float32."""

from __future__ import annotations

from types import NotImplementedType

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.onednn import library


def _rows(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | NotImplementedType:
    if not centred or not library.is_float32(x, gain, bias):
        return NotImplemented
    rows = _rows(x)
    gain = np.ascontiguousarray(gain)
    bias = None if bias is None else np.ascontiguousarray(bias)
    y = np.empty_like(rows)
    mean = np.empty(len(rows), x.dtype)
    scale = np.empty(len(rows), x.dtype)

    def work(piece: slice) -> None:
        library.layer_norm(rows[piece], gain, bias, eps, y[piece], mean[piece], scale[piece])
        spread = scale[piece]  # the variance until here
        spread += eps
        np.sqrt(spread, out=spread)
        np.divide(1, spread, out=spread)

    threads.parallel(work, pieces.cut(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), mean.reshape(statistics), scale.reshape(statistics)


def layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, centred: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | NotImplementedType:
    if not centred or not library.is_float32(grad, x, gain, mean, scale):
        return NotImplemented
    rows = _rows(x)
    row_grads = _rows(grad)
    gain = np.ascontiguousarray(gain)
    means = np.ascontiguousarray(mean).reshape(-1)
    variance = np.ascontiguousarray(scale).reshape(-1) ** -2
    dx = np.empty_like(rows)

    def work(piece: slice) -> np.ndarray:
        sums = np.empty((2, x.shape[-1]), x.dtype)
        library.layer_norm_backward(
            row_grads[piece], rows[piece], gain, means[piece], variance[piece], dx[piece], sums[0], sums[1]
        )
        return sums

    dgain, dbias = pieces.sum_over(work, pieces.cut(*rows.shape))
    return dx.reshape(x.shape), dgain, dbias
