"""GELU of float32 and of bfloat16."""

from __future__ import annotations

from types import NotImplementedType

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.onednn import library


def _takes(*arrays: np.ndarray) -> bool:
    return library.is_float32(*arrays) or all(a.size and a.dtype == library.bfloat16() for a in arrays)


def gelu(x: np.ndarray) -> np.ndarray | NotImplementedType:
    if not _takes(x):
        return NotImplemented
    flat = np.ascontiguousarray(x).reshape(-1)
    y = np.empty(x.size, x.dtype)
    threads.parallel(lambda piece: library.gelu(flat[piece], y[piece]), pieces.cut(x.size))
    return y.reshape(x.shape)


def gelu_with_slope(x: np.ndarray) -> tuple[np.ndarray, None] | NotImplementedType:
    y = gelu(x)
    return y if isinstance(y, NotImplementedType) else (y, None)


def gelu_backward(grad: np.ndarray, x: np.ndarray | None, slope: np.ndarray | None) -> np.ndarray | NotImplementedType:
    if slope is not None or x is None or not _takes(grad, x):
        return NotImplemented
    flat_grad, flat = (np.ascontiguousarray(array).reshape(-1) for array in (grad, x))
    dx = np.empty(x.size, x.dtype)
    threads.parallel(lambda piece: library.gelu_backward(flat_grad[piece], flat[piece], dx[piece]), pieces.cut(x.size))
    return dx.reshape(x.shape)
