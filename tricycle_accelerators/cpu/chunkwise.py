"""Any elementwise function or reduction of large arrays in NumPy: chunks that stay in a core's cache, in threads."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.kernels import activations
from tricycle.kernels.dispatch import Kernel, is_16_bit, upcast
from tricycle.kernels.quantized import round_float32
from tricycle_accelerators import buffers, threads
from tricycle_accelerators.chunks import CHUNK_SIZE
from tricycle_accelerators.providers import decline_when

MIN_RUN = 512  # elements of the last axis: shorter runs of memory take longer to read
# Functions that write their results into place, or make no array, which do the same for a chunk.
UFUNCS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.copy: lambda x: x,  # assigned to the result
    operator.add: np.add,
    operator.sub: np.subtract,
    operator.mul: np.multiply,
    operator.truediv: np.true_divide,
    operator.neg: np.negative,
}


def _decline_reason(
    like: np.ndarray, function: Callable[..., np.ndarray], operands: Sequence[Any], whole_axes: Sequence[int] = ()
) -> str | None:
    """Return why the function is not called for chunks: too few elements, or no axis to divide; else None."""
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    if max((x.size for x in arrays), default=0) < 2 * CHUNK_SIZE:
        return "too few elements to share"
    return None if len(whole_axes) < max(x.ndim for x in arrays) else "no axis to divide"


@decline_when(_decline_reason)
def compute_in_chunks(
    like: np.ndarray, function: Callable[..., np.ndarray], operands: Sequence[Any], whole_axes: Sequence[int] = ()
) -> np.ndarray:
    """Return function(*operands), called for chunks in threads."""
    return _compute(function, operands, whole_axes)


@decline_when(lambda a, b, out=None: _decline_reason(a, np.add, (a, b)))
def add(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return a + b, in `out` if given, by NumPy in threads; NotImplemented for small arrays."""
    return _compute(np.add, (a, b), out=out)


def _chunked(kernel: Kernel[..., Any], by_rows: bool = False) -> Any:
    """Return a version of a kernel that calls its reference for chunks, of whole rows if `by_rows`, in threads."""
    reference = kernel.reference
    whole_axes: Callable[[Any], Sequence[int]] = lambda x: (x.ndim - 1,) if by_rows else ()

    @decline_when(lambda x, *others, **options: _decline_reason(x, reference, (x, *others), whole_axes(x)))
    @wraps(reference, ("__name__", "__doc__"))
    def version(x: np.ndarray, *others: Any, **options: Any) -> np.ndarray:
        return _compute(partial(reference, **options), (x, *others), whole_axes(x))

    return version


multiply, sigmoid = _chunked(kernels.multiply), _chunked(kernels.sigmoid)
exact_gelu, exact_gelu_backward = _chunked(activations.exact_gelu), _chunked(activations.exact_gelu_backward)
softmax, log_softmax = _chunked(kernels.softmax, by_rows=True), _chunked(kernels.log_softmax, by_rows=True)
softmax_backward = _chunked(kernels.softmax_backward, by_rows=True)


def _compute(
    function: Callable[..., Any], operands: Sequence[Any], whole_axes: Sequence[int] = (), out: np.ndarray | None = None
) -> np.ndarray:
    """Return function(*operands), in `out` if given, else in the memory order of an operand of its shape."""
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    order = list(range(len(shape)))
    like = next((x for x in arrays if x.shape == shape and 0 not in x.strides), None) if out is None else out
    if like is not None and not whole_axes:
        order.sort(key=lambda axis: -abs(like.strides[axis]))
    views = [np.broadcast_to(x, shape).transpose(order) if isinstance(x, np.ndarray) else x for x in operands]
    shape = tuple(shape[axis] for axis in order)
    run = UFUNCS.get(function, function)
    if out is None:
        sample = run(*_parts(views, tuple(slice(None if i in whole_axes else 1) for i in range(len(shape)))))
        size = tuple(sample.shape[i] if i in whole_axes else n for i, n in enumerate(shape))
        result = buffers.empty(size, sample.dtype)
    else:
        result = out.transpose(order)

    def work(index: tuple[slice, ...]) -> None:
        parts = map(upcast, _parts(views, index))  # 16-bit floats are computed in float32
        if is_16_bit(result):
            round_float32(run(*parts), result[index])
        elif isinstance(run, np.ufunc):
            run(*parts, out=result[index])
        else:
            result[index] = run(*parts)

    threads.parallel_for(work, _indexes(shape, whole_axes), calls_blas=False)
    if out is not None:
        return out
    return result if order == sorted(order) else result.transpose(np.argsort(order))


def _parts(views: Sequence[Any], index: tuple[slice, ...]) -> list[Any]:
    """Return the parts of arrays at an index, and numbers as they are."""
    return [x[index] if isinstance(x, np.ndarray) else x for x in views]


def _indexes(shape: tuple[int, ...], whole_axes: Sequence[int]) -> list[tuple[slice, ...]]:
    """Return indexes that divide an array into chunks of about CHUNK_SIZE elements along all axes but `whole_axes`."""
    indexes: list[tuple[slice, ...]] = [()]
    size = math.prod(shape)  # of the part at each index so far
    for axis, n in enumerate(shape):
        if axis not in whole_axes and size > CHUNK_SIZE:
            most = max(MIN_RUN if axis == len(shape) - 1 else 1, CHUNK_SIZE * n // size)
            step = -(-n // -(-n // most))  # of parts of nearly equal length
            slices = [slice(start, start + step) for start in range(0, n, step)]
            indexes = [(*index, part) for index in indexes for part in slices]
            size = size // n * step
        else:
            indexes = [(*index, slice(None)) for index in indexes]
    return indexes
