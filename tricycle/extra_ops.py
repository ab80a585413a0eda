"""Further differentiable operations on Tensors: elementwise, comparison, selection, joining, reduction and shape.

They are registered in `ops.OPS`; the last lines attach operators and methods to `Tensor`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tricycle.autograd import NeedsGrad, SlicedGradient
from tricycle.devices import Array, array_module, is_array
from tricycle.kernels import LARGE, in_chunks, upcast
from tricycle.kernels.dispatch import upcasting
from tricycle.ops import (
    as_floating,
    as_tensor,
    as_tensors,
    binary_op,
    check_device,
    getitem,
    promote_integers,
    register,
    shape_error,
    swap_operands,
    unary_op,
    unbroadcast,
    unpack_arguments,
)
from tricycle.tensor import Axis, Operand, Tensor, record

# -------------------------------------------------------------------- elementwise
exp = unary_op("exp", lambda xp, x: xp.exp(x), lambda xp, g, x, y: g * y)
log = unary_op("log", lambda xp, x: xp.log(x), lambda xp, g, x, y: g / x)
sqrt = unary_op("sqrt", lambda xp, x: xp.sqrt(x), lambda xp, g, x, y: g / (2 * y))
sin = unary_op("sin", lambda xp, x: xp.sin(x), lambda xp, g, x, y: g * xp.cos(x))
cos = unary_op("cos", lambda xp, x: xp.cos(x), lambda xp, g, x, y: -g * xp.sin(x))
softplus = unary_op(
    "softplus",
    lambda xp, x: xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x))),
    lambda xp, g, x, y: g * xp.exp(x - y),
)
absolute = unary_op("absolute", lambda xp, x: xp.abs(x), lambda xp, g, x, y: g * xp.sign(x))


@register
def negative(x: Operand) -> Tensor:
    """Compute -x, elementwise."""
    x = as_tensor(x)
    backward = lambda grad, needs_grad: (in_chunks(operator.neg, grad),)
    return record(in_chunks(operator.neg, x.array), (x,), backward, "negative")


def _module(x: Any, y: Any) -> Any:
    """Return the array module of the first of two operands that is an array."""
    return array_module(x if is_array(x) else y)


def power_right(g: Array, x: Any, y: Any, z: Array) -> Array:
    """Return g z log x, for z = x ** y; 0 where x is not above 0."""
    xp = array_module(g)
    positive = (x if is_array(x) else xp.asarray(x)) > 0
    return g * xp.where(positive, z * xp.log(xp.where(positive, x, 1)), 0)


def power_left(g: Array, x: Array, y: Any, z: Array) -> Array:
    """Return g y x ** (y - 1), and 0 where y is 0."""
    xp = array_module(g)
    if isinstance(y, (int, float)):
        return g * (y * x ** (y - 1)) if y else xp.zeros_like(g)
    return g * y * x ** xp.where(y == 0, 1, y - 1)


subtract = binary_op(
    "sub", "-", operator.sub, lambda g, x, y, z: g, lambda g, x, y, z: in_chunks(operator.neg, g), saves=False
)
divide = binary_op(
    "div",
    "/",
    # the quotient of integers is float32
    lambda x, y: (as_floating(x) if is_array(x) else x) / (as_floating(y) if is_array(y) else y),
    lambda g, x, y, z: g / y,
    lambda g, x, y, z: -g * z / y,
)
power = binary_op("pow", "**", operator.pow, power_left, power_right)
# equal values get half of the gradient each
extremes = (
    lambda g, x, y, z: g * ((x == z) * (1 - 0.5 * (x == y))).astype(z.dtype),
    lambda g, x, y, z: g * ((y == z) * (1 - 0.5 * (x == y))).astype(z.dtype),
)
maximum = binary_op("maximum", "max", lambda x, y: _module(x, y).maximum(x, y), *extremes)
minimum = binary_op("minimum", "min", lambda x, y: _module(x, y).minimum(x, y), *extremes)


def comparison_op(name: str, compare: Callable[[Any, Any], Any]) -> Callable[[Operand, Operand], Tensor]:
    """Return a function op(x, y) that compares elementwise; its result is a Tensor of booleans without a gradient."""

    def op(x: Operand, y: Operand) -> Tensor:
        xp = next((v.xp for v in (x, y) if isinstance(v, Tensor)), np)
        a, b = (v.array if isinstance(v, Tensor) else xp.asarray(v) if isinstance(v, list) else v for v in (x, y))
        if is_array(a) and is_array(b) and type(a) is not type(b):
            check_device(name, a, b)
        batched = any(v.is_batched for v in (x, y) if isinstance(v, Tensor))
        try:
            return Tensor(compare(a, b), False, batched)
        except ValueError:
            raise ValueError(f"{name}: shapes {np.shape(a)} and {np.shape(b)} do not broadcast") from None

    op.__name__ = name
    return op


# -------------------------------------------------------------------- choosing, joining
@register
def where(condition: Operand, x: Operand, y: Operand) -> Tensor:
    """Select elements of x where the condition is true, of y elsewhere, with broadcasting."""
    x, y = as_tensors(x, y)
    condition = as_tensor(condition, None if is_array(condition) else x)
    chosen, xp = condition.array.astype(bool, copy=False), x.xp
    check_device("where", chosen, x.array, y.array)
    try:
        z = in_chunks(xp.where, chosen, *promote_integers(x.array, y.array))
    except ValueError as error:
        raise shape_error("where", error, chosen, x.array, y.array) from None

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, Array | None]:
        to_x = unbroadcast(in_chunks(xp.where, chosen, grad, 0), x.shape) if needs_grad[0] else None
        to_y = unbroadcast(in_chunks(xp.where, chosen, 0, grad), y.shape) if needs_grad[1] else None
        return to_x, to_y

    return record(z, (x, y), backward, "where", any(t.is_batched for t in (condition, x, y)))


def _joined(op: str, tensors: Sequence[Operand]) -> tuple[tuple[Tensor, ...], tuple[Array, ...], Any]:
    """Return (Tensors, arrays of one dtype, array module) to join; ValueError for none, or arrays on two devices."""
    tensors = as_tensors(*tensors)
    if not tensors:
        raise ValueError(f"{op}: expected at least one Tensor, got none")
    check_device(op, *(t.array for t in tensors))
    return tensors, promote_integers(*(t.array for t in tensors)), tensors[0].xp


@register
def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate Tensors along an existing axis; raise a ValueError for none, or if their other axes differ."""
    tensors, arrays, xp = _joined("concatenate", tensors)
    try:
        z = xp.concatenate(arrays, axis=axis)
    except ValueError as error:
        raise shape_error("concatenate", error, *arrays) from None
    indices = []
    start = 0
    for t in tensors:
        stop = start + t.shape[axis]
        indices.append((slice(None),) * (axis % z.ndim) + (slice(start, stop),))
        start = stop
    return record(z, tensors, lambda grad, needs_grad: [grad[index] for index in indices], "concatenate")


@register
def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Stack Tensors of equal shape along a new axis; raise a ValueError for none, or for unequal shapes."""
    tensors, arrays, xp = _joined("stack", tensors)
    try:
        z = xp.stack(arrays, axis=axis)
    except ValueError as error:
        raise shape_error("stack", error, *arrays) from None
    batched = any(t.is_batched for t in tensors) and axis % z.ndim != 0

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array]:
        parts = xp.moveaxis(grad, axis, 0)
        return [parts[i] for i in range(len(tensors))]

    return record(z, tensors, backward, "stack", batched)


# -------------------------------------------------------------------- reductions
def _axes(op: str, x: Tensor, axis: Axis) -> tuple[int, ...]:
    """Return `axis` (an integer, several, or None for all) as integers >= 0; ValueError if out of range or repeated."""
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    for a in axes:
        if not -x.ndim <= operator.index(a) < x.ndim:
            raise ValueError(f"{op}: axis {a} is out of range for a Tensor of shape {x.shape}")
    axes = tuple(a % x.ndim for a in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{op}: expected each axis once, got {axis} for a Tensor of shape {x.shape}")
    return axes


def restore_axes(grad: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    """Return the gradient of a reduction, an array or Tensor, with the reduced axes restored, of length 1."""
    return grad.reshape(tuple(1 if i in axes else n for i, n in enumerate(shape)))


@upcasting(1)
def _reduced(x: Array, name: str, axes: tuple[int, ...], keepdims: bool) -> Array:
    """Return x reduced over axes by its method of this name."""
    return getattr(x, name)(axis=axes, keepdims=keepdims)


def _reduce(name: str, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    """Return x reduced over axes by its method of this name, large arrays in chunks."""
    if x.size < LARGE:
        return _reduced(x, name, axes, keepdims)
    y = in_chunks(lambda x: _reduced(x, name, axes, True), x, whole_axes=axes)
    return y if keepdims else y.reshape(tuple(n for i, n in enumerate(x.shape) if i not in axes))


@register
def sum(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the sum over one axis, a tuple of axes, or all (None); `keepdims` keeps them with length 1."""
    x = as_tensor(x)
    axes, xp, shape = _axes("sum", x, axis), x.xp, x.shape
    y = _reduce("sum", x.array, axes, keepdims)
    backward = lambda grad, needs_grad: (xp.broadcast_to(restore_axes(grad, shape, axes), shape),)
    return record(y, (x,), backward, "sum", x.is_batched and 0 not in axes)


@register
def mean(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over one axis, a tuple, or all (None), float32 for integers; ValueError for no elements."""
    x = as_tensor(x)
    axes, xp, shape = _axes("mean", x, axis), x.xp, x.shape
    count = math.prod(shape[a] for a in axes)
    if count == 0:
        raise ValueError(f"mean: expected at least one element along axes {axes}, got shape {shape}")
    y = _reduce("mean", as_floating(x.array), axes, keepdims)
    backward = lambda grad, needs_grad: (xp.broadcast_to(restore_axes(upcast(grad) / count, shape, axes), shape),)
    return record(y, (x,), backward, "mean", x.is_batched and 0 not in axes)


def _extreme(x: Operand, axis: Axis, keepdims: bool, name: str) -> Tensor:
    """Compute `max` or `min` by `name` over axes, gradient shared by equal extremes; ValueError without elements."""
    x = as_tensor(x)
    axes, array = _axes(name, x, axis), x.array
    if 0 in [array.shape[a] for a in axes]:
        raise ValueError(f"{name}: expected at least one element along axes {axes}, got shape {x.shape}")
    y = _reduce(name, array, axes, True)

    def share(grad: Array, array: Array, y: Array) -> Array:
        chosen = array == y
        return chosen * (grad / chosen.sum(axis=axes, keepdims=True)).astype(grad.dtype)

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
        return (in_chunks(share, restore_axes(grad, array.shape, axes), array, y, whole_axes=axes),)

    shape = y.shape if keepdims else tuple(n for i, n in enumerate(y.shape) if i not in axes)
    return record(y.reshape(shape), (x,), backward, name, x.is_batched and 0 not in axes)


@register
def max(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the maximum over one axis, a tuple of axes, or all (None); raise a ValueError for no elements."""
    return _extreme(x, axis, keepdims, "max")


@register
def min(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the minimum over one axis, a tuple of axes, or all (None); raise a ValueError for no elements."""
    return _extreme(x, axis, keepdims, "min")


# -------------------------------------------------------------------- shapes
@register
def transpose(x: Operand, *axes: int | Sequence[int]) -> Tensor:
    """Return a view of x with its axes in this order, by default reversed; ValueError unless all axes occur once."""
    x = as_tensor(x)
    order = _axes("transpose", x, unpack_arguments(axes)) or tuple(reversed(range(x.ndim)))
    if len(order) != x.ndim:
        raise ValueError(
            f"transpose: expected an order of {x.ndim} axes, got {unpack_arguments(axes)} for shape {x.shape}"
        )
    back = tuple(order.index(i) for i in range(x.ndim))
    y, batched = x.array.transpose(order), x.is_batched and order[:1] == (0,)
    return record(y, (x,), lambda grad, needs_grad: (grad.transpose(back),), "transpose", batched)


def split(x: Operand, n_splits: int, axis: int = -1) -> list[Tensor]:
    """Return a list of `n_splits` equal views of x along an axis; raise a ValueError if they do not fit."""
    x = as_tensor(x)
    (axis,) = _axes("split", x, axis)
    if n_splits < 1 or x.shape[axis] % n_splits:
        raise ValueError(f"split: {n_splits} equal parts do not fit axis {axis} of shape {x.shape}")
    return split_sizes(x, [x.shape[axis] // n_splits] * n_splits, axis)


def split_sizes(x: Tensor, sizes: Sequence[int], axis: int = -1) -> list[Tensor]:
    """Split x into consecutive views of `sizes` along `axis`, without checking their sum; gradients go to x."""
    array, ndim = x.array, x.array.ndim
    before, after = (slice(None),) * (axis % ndim), (slice(None),) * (ndim - 1 - axis % ndim)
    batched = x.is_batched and axis % ndim != 0
    parts = []
    start = 0
    for size in sizes:
        index = (*before, slice(start, start + size), *after)
        parts.append(record(array[index], (x,), _sliced_gradient, "getitem", batched, (index,)))
        start += size
    return parts


def _sliced_gradient(grad: Array, needs_grad: NeedsGrad, index: Any) -> tuple[SlicedGradient]:
    """Return the gradient of a part of x, as a SlicedGradient at `index` of x."""
    return (SlicedGradient(grad, index, unique=True),)


# -------------------------------------------------------------------- the operators and methods of Tensor
for _name, _compare in {
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}.items():
    setattr(Tensor, f"__{_compare.__name__}__", comparison_op(_name, _compare))
for _name, _op in {"sub": subtract, "truediv": divide, "pow": power}.items():
    setattr(Tensor, f"__{_name}__", _op)
    setattr(Tensor, f"__r{_name}__", swap_operands(_op))
for _name, _method in {
    "__neg__": negative,
    "__iter__": lambda x: (getitem(x, i) for i in range(len(x))),
    "exp": exp,
    "log": log,
    "sqrt": sqrt,
    "sum": sum,
    "mean": mean,
    "max": max,
    "min": min,
    "transpose": transpose,
    "split": split,
}.items():
    setattr(Tensor, _name, _method)
