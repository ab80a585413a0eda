"""Layer norm and RMS norm kernels in NumPy and threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.kernels.dispatch import upcast
from tricycle_accelerators import buffers, chunks, threads
from tricycle_accelerators.providers import decline_when


def layer_norm(
    x: np.ndarray, gain: np.ndarray, bias: np.ndarray | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return layer norm (or RMS norm, means 0), means and 1 / deviations (..., 1), by NumPy in threads."""
    dtype, x = dtype or x.dtype, upcast(x)
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    y = buffers.empty(rows.shape, rows.dtype)
    mean = np.zeros((len(rows), 1), x.dtype)
    scale = np.empty((len(rows), 1), x.dtype)
    average = chunks.ones_vector(rows.shape[1], x) / max(1, rows.shape[1])

    def work(piece: slice) -> None:
        out, spread = y[piece], scale[piece, 0]
        if subtract_mean:
            np.matmul(rows[piece], average, out=mean[piece, 0])
            np.subtract(rows[piece], mean[piece], out=out)
        else:
            out[...] = rows[piece]
        np.vecdot(out, out, out=spread)
        spread /= rows.shape[1]
        spread += eps
        np.sqrt(spread, out=spread)
        np.divide(1, spread, out=spread)
        out *= scale[piece]
        out *= gain
        if bias is not None:
            out += bias

    threads.parallel_for(work, chunks.row_chunks(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape).astype(dtype, copy=False), mean.reshape(statistics), scale.reshape(statistics)


@decline_when(lambda grad, x, *_, **__: None if x.size else "an empty array")
def layer_norm_backward(
    grad: np.ndarray, x: np.ndarray, gain: np.ndarray, mean: np.ndarray, scale: np.ndarray, subtract_mean: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return layer or RMS norm's gradients of input, gain, bias by NumPy in threads; NotImplemented if x is empty."""
    dtype, grad, x = x.dtype, upcast(grad), upcast(x)
    rows, row_grads = (np.ascontiguousarray(a).reshape(-1, x.shape[-1]) for a in (x, grad))
    mean = mean.reshape(-1, 1)
    scale = scale.reshape(-1, 1)
    dx = buffers.empty(rows.shape, rows.dtype)
    average = chunks.ones_vector(rows.shape[1], x) / max(1, rows.shape[1])

    def work(piece: slice) -> np.ndarray:
        out, spread = dx[piece], scale[piece]
        difference = rows[piece] - mean[piece] if subtract_mean else rows[piece].copy()
        dbias = chunks.ones_vector(len(out), x) @ row_grads[piece]
        np.multiply(row_grads[piece], difference, out=out)
        dgain = spread[:, 0] @ out
        np.multiply(row_grads[piece], gain, out=out)
        difference *= np.vecdot(out, difference)[:, None] * spread * spread / rows.shape[1]
        if subtract_mean:
            out -= (out @ average)[:, None]
        out -= difference
        out *= spread
        return np.stack([dgain, dbias])

    dgain, dbias = chunks.sum_over_chunks(work, chunks.row_chunks(*rows.shape))
    return dx.reshape(x.shape).astype(dtype, copy=False), dgain, dbias
