"""`BatchedArray`: the values of one array for all items of a batch, with which `transforms.vmap` calls a function once.

It looks like the array of one item: shape, axes and indices are those of an item, and each operation computes the
results of all items at once. NumPy's protocols call `__array_ufunc__` and the functions in FUNCTIONS. Everything else
raises a `NotVectorizedError`, and `vmap` then calls the function for each item. So do values on which control flow
depends, unless they are equal for all items.

Nested calls of `vmap` nest these arrays; a higher level is an inner call. Arrays of another level, and other arrays,
are the same for all items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from tricycle import create_graph, kernels
from tricycle.devices import ARRAY_MODULES, Array
from tricycle.functions import linear
from tricycle.tensor import Tensor


class NotVectorizedError(Exception):
    """An operation is not implemented for all items at once."""


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a NumPy reduction as a function of a BatchedArray that reduces axes of each item, by default all."""

    def reduce(x: BatchedArray, axis: Any = None, **options: Any) -> BatchedArray:
        return BatchedArray(function(x.items, axis=_item_axes(axis, x.ndim), **options), x.level)

    return reduce


REDUCTIONS = {getattr(np, name): _reduction(getattr(np, name)) for name in ("sum", "mean", "max", "min", "any", "all")}


class BatchedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array for each item of a batch.

    Attributes:
        items: the arrays of all items, stacked on axis 0: an array, or a BatchedArray of a lower level.
        level: the number of the call of `vmap`.
    """

    device, base = "cpu", None  # `base`: the memory of other arrays is never part of this one
    keeps_type = True  # for `to_tensor`, which makes NumPy arrays of others

    sum, mean, max, min, any, all = REDUCTIONS.values()

    def __init__(self, items: Array, level: int) -> None:
        self.items = items
        self.level = level
        self.shape: tuple[int, ...] = items.shape[1:]
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.dtype, self.itemsize, self.flags = items.dtype, items.dtype.itemsize, items.flags

    # ---------------------------------------------------------------- protocols
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Apply a ufunc (or its `at`) to each item of the highest level; NotVectorizedError if it has no such form."""
        level = max(map(level_of, (*inputs, *(out or ()))))
        if method == "at" and level_of(inputs[0]) == level:
            total, index, values = inputs
            return ufunc.at(total.items, total._index(index), aligned(values, level, total[index].ndim))
        if method != "__call__" or any(map(level_of, options.values())):
            raise NotVectorizedError(f"numpy.{ufunc.__name__}.{method}")
        if ufunc is np.matmul:
            result = _matmul(level, *inputs)
        elif ufunc.signature is None and ufunc.nout == 1:
            ndim = max(map(np.ndim, inputs))
            result = ufunc(*(aligned(x, level, ndim) for x in inputs), **options)
        else:
            raise NotVectorizedError(f"numpy.{ufunc.__name__}")
        if out is None:
            return BatchedArray(result, level)
        out[0][...] = BatchedArray(result, level)  # an error if `out` is the same for all items
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call the function in FUNCTIONS that replaces a NumPy function; NotVectorizedError if there is none."""
        if function not in FUNCTIONS:
            raise NotVectorizedError(f"numpy.{function.__name__}")
        return FUNCTIONS[function](*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Raise a NotVectorizedError: the items must not become one NumPy array."""
        raise NotVectorizedError("conversion to an array")

    def linear(
        self, x: Tensor, weights: Tensor, bias: Tensor | None, name: str, precision: str, dtype: Any = None
    ) -> Tensor:
        """Return x W + b with this matrix as W of each item; x, the same for all items, is repeated, differentiably."""
        repeat = lambda a: BatchedArray(items_of(a, self.level, len(self.items)), self.level)
        x = create_graph.linear_map(x, repeat, lambda grad: grad, "repeat")
        return linear(x, weights, bias, name, precision, dtype, self is not weights.array)

    # ---------------------------------------------------------------- values that are equal for all items
    def item(self) -> Any:
        """Return the element of one-element items as a number; raise a NotVectorizedError unless all are equal."""
        first = self.items[:1]
        if self.size != 1 or not bool((self.items == first).all()):
            raise NotVectorizedError("a number that differs between items")
        return first.reshape(()).item()

    def __bool__(self) -> bool:
        """Return the items' one number as a bool; NotVectorizedError if it differs between items."""
        return bool(self.item())

    def __int__(self) -> int:
        """Return the items' one number as an int; NotVectorizedError if it differs between items."""
        return int(self.item())

    def __index__(self) -> int:
        """Return the items' one number as an int; NotVectorizedError if it differs between items."""
        return int(self.item())

    def __float__(self) -> float:
        """Return the items' one number as a float; NotVectorizedError if it differs between items."""
        return float(self.item())

    def __len__(self) -> int:
        """Return the length of each item's first axis, not the number of items."""
        return self.shape[0]

    # ---------------------------------------------------------------- indices
    def __getitem__(self, index: Any) -> BatchedArray:
        """Return the part of each item at an index, which may differ between items."""
        return BatchedArray(self.items[self._index(index)], self.level)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set the part of each item at an index, in place, to one value for all items or to one for each."""
        self.items[self._index(index)] = aligned(value, self.level, self[index].ndim)

    def _index(self, index: Any) -> tuple[Any, ...]:
        """Return the index of `items` for an index of an item; NotVectorizedError for masks by item or arrays apart."""
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, (np.ndarray, BatchedArray, list)) for part in parts):
            return (slice(None), *parts)
        places = [i for i, part in enumerate(parts) if not isinstance(part, (slice, type(None), type(...)))]
        by_item = [part for part in parts if level_of(part) == self.level]
        if places != list(range(places[0], places[-1] + 1)) or (by_item and places[0]):
            raise NotVectorizedError("an index whose arrays are not side by side, or not first")
        if not by_item:
            return (slice(None), *parts)
        if any(part.dtype.kind == "b" for part in by_item):
            raise NotVectorizedError("a mask that differs between items")
        ndim = max(np.ndim(parts[i]) for i in places)
        numbers = np.arange(len(self.items)).reshape(-1, *(1,) * ndim)
        return (numbers, *(aligned(part, self.level, ndim) for part in parts[: len(places)]), *parts[len(places) :])

    # ---------------------------------------------------------------- shapes
    def reshape(self, *shape: Any) -> BatchedArray:
        """Return each item in another shape."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        return BatchedArray(self.items.reshape(len(self.items), *sizes), self.level)

    def transpose(self, *axes: Any) -> BatchedArray:
        """Return each item with its axes in this order, by default reversed."""
        order = tuple(axes[0]) if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)) else axes
        order = order or tuple(reversed(range(self.ndim)))
        return BatchedArray(self.items.transpose(0, *_item_axes(order, self.ndim)), self.level)

    @property
    def T(self) -> BatchedArray:
        """Each item transposed."""
        return self.transpose()

    def swapaxes(self, first: int, second: int) -> BatchedArray:
        """Return each item with two axes exchanged."""
        return BatchedArray(self.items.swapaxes(*_item_axes((first, second), self.ndim)), self.level)

    def squeeze(self, axis: Any) -> BatchedArray:
        """Return each item without axes of length 1."""
        return BatchedArray(self.items.squeeze(_item_axes(axis, self.ndim)), self.level)

    def astype(self, dtype: Any, copy: bool = True) -> BatchedArray:
        """Return the items in another dtype, as a new BatchedArray."""
        return BatchedArray(self.items.astype(dtype, copy=copy), self.level)

    def copy(self) -> BatchedArray:
        """Return a BatchedArray with a copy of the items."""
        return BatchedArray(self.items.copy(), self.level)


# -------------------------------------------------------------------- helpers
def level_of(x: Any) -> int:
    """Return the level of a BatchedArray, 0 for anything else."""
    return x.level if isinstance(x, BatchedArray) else 0


def items_of(x: Any, level: int, n_items: int) -> Array:
    """Return the arrays of all items of a level; a view of repeated values if they are the same for all."""
    return x.items if level_of(x) == level else np.broadcast_to(x, (n_items, *np.shape(x)))


def aligned(x: Any, level: int, ndim: int) -> Any:
    """Return the items of x with leading axes of length 1, `ndim` axes each; x itself if it is of another level."""
    if level_of(x) != level:
        return x
    return x.items.reshape(len(x.items), *(1,) * (ndim - x.ndim), *x.shape)


def _item_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the axes of `items` for axes (one, several, or None for all) of an item; ValueError out of range."""
    axes = range(ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    return tuple(1 + normalize_axis_index(a, ndim) for a in axes)


def _matmul(level: int, a: Any, b: Any) -> Array:
    """Return the array of a @ b for each item; one may be the same for all items. NotVectorizedError for vectors."""
    if np.ndim(a) == 1 or np.ndim(b) == 1:
        raise NotVectorizedError("a product with a vector")
    if level_of(a) == level and level_of(b) != level and np.ndim(b) == 2:  # one product of the rows of all items
        n_rows = len(a.items) * math.prod(a.shape[:-1])
        return (a.items.reshape(n_rows, a.shape[-1]) @ b).reshape(len(a.items), *a.shape[:-1], b.shape[-1])
    ndim = max(np.ndim(a), np.ndim(b))
    return np.matmul(aligned(a, level, ndim), aligned(b, level, ndim))


# -------------------------------------------------------------------- functions of NumPy
def _joining(function: Callable[..., Any], n_new: int) -> Callable[..., BatchedArray]:
    """Return concatenate or stack (`n_new` is 1) as a function of arrays of items and arrays that all items share."""

    def join(arrays: Sequence[Any], axis: int = 0) -> BatchedArray:
        top = max(arrays, key=level_of)
        items = [items_of(x, top.level, len(top.items)) for x in arrays]
        return BatchedArray(function(items, axis=_item_axes(axis, top.ndim + n_new)[0]), top.level)

    return join


def _filled_like(function: Callable[..., Any]) -> Callable[..., BatchedArray]:
    """Return a function such as `np.zeros_like` as one of a BatchedArray; its `shape` is that of an item."""

    def fill(x: BatchedArray, *args: Any, shape: tuple[int, ...] | None = None, **options: Any) -> BatchedArray:
        full = (len(x.items), *(x.shape if shape is None else shape))
        return BatchedArray(function(x.items, *args, shape=full, **options), x.level)

    return fill


def _where(condition: Any, x: Any, y: Any) -> BatchedArray:
    """Return x where a condition holds, else y, for each item; any of the three may be the same for all items."""
    level, ndim = max(map(level_of, (condition, x, y))), max(map(np.ndim, (condition, x, y)))
    return BatchedArray(np.where(*(aligned(part, level, ndim) for part in (condition, x, y))), level)


def _broadcast_to(x: BatchedArray, shape: Sequence[int]) -> BatchedArray:
    """Broadcast each item to a shape, as a view."""
    return BatchedArray(np.broadcast_to(aligned(x, x.level, len(shape)), (len(x.items), *shape)), x.level)


def _moveaxis(x: BatchedArray, source: int, destination: int) -> BatchedArray:
    """Move one axis of each item to another place, as a view."""
    return BatchedArray(np.moveaxis(x.items, *_item_axes((source, destination), x.ndim)), x.level)


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **REDUCTIONS,
    **{function: _filled_like(function) for function in (np.zeros_like, np.ones_like, np.full_like, np.empty_like)},
    np.concatenate: _joining(np.concatenate, 0),
    np.stack: _joining(np.stack, 1),
    np.copy: BatchedArray.copy,
    np.where: _where,
    np.broadcast_to: _broadcast_to,
    np.moveaxis: _moveaxis,
    np.isneginf: lambda x: x == -np.inf,
    np.shape: lambda x: x.shape,
    np.ndim: lambda x: x.ndim,
}

ARRAY_MODULES[BatchedArray] = np  # whose functions call those above


@kernels.dropout_mask.register(BatchedArray)
def _dropout_mask(like: Array, shape: tuple[int, ...], keep: float, generator: np.random.Generator) -> Array:
    """Raise a NotVectorizedError: dropout would need other random numbers for each item."""
    raise NotVectorizedError("random numbers, which differ between items")
