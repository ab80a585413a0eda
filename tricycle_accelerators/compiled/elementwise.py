"""Elementwise steps of training, each in one pass over memory: GELU, gates and rotations."""

from __future__ import annotations

import math
from types import NotImplementedType

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.compiled.generation import loops, training_loops

SMALL = 2**16  # numbers below which NumPy is as quick, for they stay in a core's cache


def fits(*arrays: np.ndarray) -> bool:
    """Whether the loops take these and are worth it: the first is large, all are float32 in one piece and aligned."""
    return arrays[0].size >= SMALL and all(a.dtype == np.float32 and a.flags.carray for a in arrays)


def gelu(x: np.ndarray) -> np.ndarray | NotImplementedType:
    if not fits(x):
        return NotImplemented
    numbers = x.reshape(-1)
    y = np.empty_like(numbers)
    compute = training_loops().gelu
    threads.parallel(lambda piece: compute(numbers[piece], y[piece]), pieces.cut(x.size))
    return y.reshape(x.shape)


def gelu_with_slope(x: np.ndarray) -> tuple[np.ndarray, None] | NotImplementedType:
    """Without the slope, which is computed again in less time than it takes to be written and read."""
    y = gelu(x)
    return NotImplemented if isinstance(y, NotImplementedType) else (y, None)


def gelu_backward(grad: np.ndarray, x: np.ndarray | None, slope: np.ndarray | None) -> np.ndarray | NotImplementedType:
    if slope is not None or x is None or not fits(x, grad):
        return NotImplemented
    numbers, slopes = x.reshape(-1), grad.reshape(-1)
    dx = np.empty_like(numbers)
    compute = training_loops().gelu_backward
    threads.parallel(lambda piece: compute(slopes[piece], numbers[piece], dx[piece]), pieces.cut(x.size))
    return dx.reshape(x.shape)


def swiglu(x: np.ndarray) -> np.ndarray | NotImplementedType:
    if not fits(x):
        return NotImplemented
    rows = _rows(x)
    y = np.empty((len(rows), x.shape[-1] // 2), np.float32)
    compute = loops().gated_swish
    threads.parallel(lambda piece: compute(rows[piece], y[piece]), pieces.cut(*rows.shape))
    return y.reshape(*x.shape[:-1], y.shape[1])


def swiglu_backward(grad: np.ndarray, x: np.ndarray) -> np.ndarray | NotImplementedType:
    if not fits(x, grad):
        return NotImplemented
    rows, slopes = _rows(x), _rows(grad)
    dx = np.empty_like(rows)
    compute = training_loops().gated_swish_backward
    threads.parallel(lambda piece: compute(slopes[piece], rows[piece], dx[piece]), pieces.cut(*rows.shape))
    return dx.reshape(x.shape)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray | NotImplementedType:
    """A thread takes an item at a time."""
    if x.size < SMALL or x.dtype != np.float32 or x.strides[-1] != 4 or not x.flags.behaved:
        return NotImplemented
    if not all(a.dtype == np.float32 and a.flags.carray for a in (cos, sin)):
        return NotImplemented
    y = np.empty(x.shape, np.float32)
    compute = training_loops().turned
    threads.parallel(lambda i: compute(x[i], cos, sin, y[i]), range(len(x)))
    return y


def _rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
