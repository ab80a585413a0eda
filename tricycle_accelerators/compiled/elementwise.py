"""Elementwise steps of training, each in one pass over memory: GELU, gates and rotations."""

from __future__ import annotations

from collections.abc import Sequence
from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.kernels import FEW_ROWS
from tricycle_accelerators import pieces, threads
from tricycle_accelerators.compiled.loaded import loops, training_loops

SMALL = 2**16  # numbers below which NumPy is as quick, for they stay in a core's cache
FLOAT32 = np.dtype(np.float32)


def is_few_rows(x: np.ndarray) -> bool:
    """Return whether these are float32 rows of a few tokens, contiguous: in generation a call of NumPy takes longer
    than its work, and so would more than one thread.
    """
    return (
        x.ndim > 0 and 0 < x.size < SMALL and x.size <= FEW_ROWS * x.shape[-1] and x.dtype == FLOAT32 and x.flags.carray
    )


def fits(*arrays: np.ndarray) -> bool:
    """Whether the loops take these and are worth it: the first is large, all are float32 in one piece and aligned."""
    return arrays[0].size >= SMALL and all(a.dtype == FLOAT32 and a.flags.carray for a in arrays)


def fit_16(*arrays: np.ndarray) -> bool:
    """The same for bfloat16."""
    return arrays[0].size >= SMALL and all(a.dtype.name == "bfloat16" and a.flags.carray for a in arrays)


def as_numbers(array: np.ndarray) -> np.ndarray:
    """As the loops take it: a bfloat16 by its bits."""
    return array.view(np.uint16) if array.dtype.itemsize == 2 else array


def _over_numbers(name: str, *arrays: np.ndarray) -> Any:
    """What a loop over (N,) makes of arrays of one shape."""
    if not (fits(*arrays) or fit_16(*arrays)):
        return NotImplemented
    compute = _loop_of(name)
    flat = [as_numbers(array).reshape(-1) for array in arrays]
    result = np.empty_like(flat[0])
    threads.parallel(lambda part: compute(*(x[part] for x in flat), result[part]), pieces.cut(result.size))
    return result.reshape(arrays[0].shape).view(arrays[0].dtype)


def _over_rows(name: str, arrays: Sequence[np.ndarray], size: int) -> Any:
    """What a loop over rows makes of arrays (..., C), rows of that size."""
    if not (fits(*arrays) or fit_16(*arrays)):
        return NotImplemented
    compute = _loop_of(name)
    rows = [as_numbers(array).reshape(-1, array.shape[-1]) for array in arrays]
    result = np.empty((len(rows[0]), size), rows[0].dtype)
    threads.parallel(lambda part: compute(*(x[part] for x in rows), result[part]), pieces.cut(len(result), 2 * size))
    return result.reshape(*arrays[0].shape[:-1], size).view(arrays[0].dtype)


def _loop_of(name: str) -> Any:
    return getattr(training_loops() if name.endswith("backward") else loops(), name)


def gelu(x: np.ndarray) -> Any:
    if is_few_rows(x):
        y = np.empty_like(x)
        loops().gelu(x.reshape(-1), y.reshape(-1))
        return y
    return _over_numbers("gelu", x)


def gelu_with_slope(x: np.ndarray) -> Any:
    """Without the slope, which is computed again in less time than it takes to be written and read."""
    y = gelu(x)
    return NotImplemented if isinstance(y, NotImplementedType) else (y, None)


def gelu_backward(grad: np.ndarray, x: np.ndarray | None, slope: np.ndarray | None) -> Any:
    return NotImplemented if slope is not None or x is None else _over_numbers("gelu_backward", grad, x)


def swiglu(x: np.ndarray) -> Any:
    if is_few_rows(x):
        y = np.empty((*x.shape[:-1], x.shape[-1] // 2), FLOAT32)
        loops().swiglu(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))
        return y
    return _over_rows("swiglu", [x], x.shape[-1] // 2)


def swiglu_backward(grad: np.ndarray, x: np.ndarray) -> Any:
    return _over_rows("swiglu_backward", [grad, x], x.shape[-1])


def sum_rows(x: np.ndarray) -> np.ndarray | NotImplementedType:
    """Of bfloat16; those of float32 BLAS sums."""
    if x.ndim != 2 or not fit_16(x):
        return NotImplemented
    bits = x.view(np.uint16)

    def work(piece: slice) -> np.ndarray:
        sums = np.zeros(x.shape[1], np.float32)
        training_loops().add_rows(bits[piece], sums)
        return sums

    total: np.ndarray = pieces.sum_over(work, pieces.cut(*x.shape))
    return total


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray | NotImplementedType:
    """A thread takes an item at a time; a single item, as in generation, is computed in this thread."""
    is_single = len(x) == 1 and x.dtype == FLOAT32
    if not is_single and (x.size < SMALL or x.dtype.name not in ("float32", "bfloat16")):
        return NotImplemented
    if x.strides[-1] != x.itemsize or not x.flags.behaved:
        return NotImplemented
    if not (cos.dtype == FLOAT32 and cos.flags.carray and sin.dtype == FLOAT32 and sin.flags.carray):
        return NotImplemented
    y = np.empty(x.shape, x.dtype)
    compute = loops().rotate
    if is_single:
        compute(x[0], cos, sin, y[0])
    else:
        heads, rotated = as_numbers(x), as_numbers(y)
        threads.parallel(lambda i: compute(heads[i], cos, sin, rotated[i]), range(len(x)))
    return y


def sum_squares(x: np.ndarray) -> np.ndarray | NotImplementedType:
    """As fast as memory gives the numbers: BLAS's product of a vector with itself takes half as long again."""
    if x.size < pieces.PIECE or not fits(x):
        return NotImplemented
    flat = x.reshape(-1)
    compute = training_loops().sum_squares
    return np.asarray(pieces.sum_over(lambda piece: compute(flat[piece]), pieces.cut(flat.size)), np.float32)
