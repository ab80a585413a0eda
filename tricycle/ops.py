"""Elementwise operations, reductions, shapes and indexing: each forward with its gradient beside it.

Every function takes Tensors (numbers and arrays beside a Tensor), asks its arrays for the module `xp` that computes on
them, and records the result with a backward function: a closure over local variables, or a function of what was saved.
The last lines make them the operators and methods of `Tensor`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tricycle import kernels
from tricycle.autograd import Backward, SlicedGradient
from tricycle.devices import Array, array_module, is_array, on_gpu
from tricycle.tensor import Axis, Operand, Tensor, record, to_tensor

Function = TypeVar("Function", bound=Callable[..., Any])
NeedsGrad: TypeAlias = Sequence[bool]  # which args of an operation want a gradient

# Every operation with a gradient, by name. A test fails when one of them has no gradient check.
OPS: dict[str, Callable[..., Any]] = {}


def register(op: Function) -> Function:
    """Add a function to the registry of operations."""
    OPS[op.__name__] = op
    return op


class Op:
    """A callable with hyper-parameters and no other state: any number of calls may be alive at once.

    A subclass defines `forward(*tensors)`. Subclasses enter the registry by themselves, unless declared a base.
    """

    @property
    def computes_wide(self) -> bool:
        """Whether 16-bit inputs are computed with in float32, and only the result is rounded."""
        return False

    def __init_subclass__(cls, is_base: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not is_base and not cls.__name__.startswith("_") and cls.__module__.startswith("tricycle."):
            OPS[cls.__name__] = cls

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes along which NumPy broadcast an input of this shape."""
    if grad.shape == shape:
        return grad
    added = grad.ndim - len(shape)
    stretched = tuple(added + i for i, n in enumerate(shape) if n == 1 and grad.shape[added + i] != 1)
    return grad.sum(axis=tuple(range(added)) + stretched, keepdims=True).reshape(shape)


def floating(array: Array) -> Array:
    """Convert integers and booleans to float32; return floats as they are."""
    return array.astype(np.float32) if array.dtype.kind in "biu" else array


def as_tensor(x: Operand, like: Tensor | None = None) -> Tensor:
    """Return a Tensor as it is; make anything else a constant, in the dtype of the Tensor `like`."""
    if isinstance(x, Tensor):
        return x
    array: Array = x if is_array(x) else (np if like is None else like.xp).asarray(x)
    if like is not None and like.dtype.kind == "f":
        return to_tensor(array, dtype=like.dtype, requires_grad=False)
    keep = array.dtype if array.dtype.kind in "biu" else None
    return to_tensor(array, dtype=keep, requires_grad=False)


def as_tensors(*xs: Operand) -> tuple[Tensor, ...]:
    """Return Tensors as they are; make anything else a constant, in the dtype of the first Tensor."""
    tensors = [x for x in xs if isinstance(x, Tensor)]
    if len(tensors) == len(xs):
        return tuple(tensors)
    return tuple(as_tensor(x, tensors[0] if tensors else None) for x in xs)


def common_kind(*arrays: Array) -> tuple[Array, ...]:
    """Convert integers to the dtype of the floats beside them (NumPy would make both float64)."""
    floats = [a.dtype for a in arrays if a.dtype.kind not in "biu"]
    return tuple(a.astype(floats[0]) if floats and a.dtype.kind in "biu" else a for a in arrays)


def refusal(op: str, error: ValueError, *arrays: Array) -> ValueError:
    """Return NumPy's error with the op and the shapes that came."""
    shapes = " and ".join(str(array.shape) for array in arrays)
    rule = "do not broadcast" if "broadcast" in str(error) else f"do not fit: {error}"
    return ValueError(f"{op}: shapes {shapes} {rule}")


def check_device(op: str, *arrays: Array) -> None:
    """Refuse arrays of different devices.

    Raises:
        ValueError: one array is in host memory, another on a GPU.
    """
    kind = type(arrays[0])
    for array in arrays:
        if type(array) is not kind:
            break
    else:
        return
    modules = {array_module(array).__name__ for array in arrays}
    if len(modules) > 1:
        raise ValueError(f"{op}: expected all inputs on one device, got {' and '.join(sorted(modules))} arrays")


def check_width(title: str, x: Tensor, size: int) -> None:
    """Refuse a Tensor whose last axis has not this size.

    Raises:
        ValueError: names the layer or op by its title, the rule and the shape.
    """
    if x.shape[-1:] != (size,):
        raise ValueError(f"{title}: expected the last axis to be {size}, got shape {x.shape}")


def check_range(what: str, ids: Array, limit: int) -> None:
    """Refuse ids outside 0..limit-1. Host arrays only: a check on a GPU would wait for it.

    Raises:
        ValueError: the smallest or largest id is out of range.
    """
    if ids.size and not on_gpu(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limit:
            raise ValueError(f"{what}: expected ids from 0 to {limit - 1}, got {low if low < 0 else high}")


def positive(layer: str, **sizes: int) -> None:
    """Refuse sizes that are not integers above 0.

    Raises:
        ValueError: names the layer and the argument.
    """
    for name, size in sizes.items():
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{layer}: expected {name} to be a whole number above 0, got {size!r}")


# -------------------------------------------------------------------- elementwise, one input
def unary(name: str, forward: Callable[..., Array], gradient: Callable[..., Array]) -> Callable[[Operand], Tensor]:
    """Make an elementwise op: `forward(xp, x)` returns y, `gradient(xp, g, x, y)` the gradient of x."""

    def op(x: Operand) -> Tensor:
        x = as_tensor(x)
        array = floating(x.array)
        y = forward(x.xp, array)
        return record(y, (x,), backward, name, None, (array, y))

    def backward(grad: Array, needs_grad: NeedsGrad, x: Array, y: Array) -> tuple[Array]:
        return (gradient(array_module(x), grad, x, y),)

    op.__name__ = name
    return register(op)


exp = unary("exp", lambda xp, x: xp.exp(x), lambda xp, g, x, y: g * y)
log = unary("log", lambda xp, x: xp.log(x), lambda xp, g, x, y: g / x)
sqrt = unary("sqrt", lambda xp, x: xp.sqrt(x), lambda xp, g, x, y: g / (2 * y))
sin = unary("sin", lambda xp, x: xp.sin(x), lambda xp, g, x, y: g * xp.cos(x))
cos = unary("cos", lambda xp, x: xp.cos(x), lambda xp, g, x, y: -g * xp.sin(x))
absolute = unary("absolute", lambda xp, x: xp.abs(x), lambda xp, g, x, y: g * xp.sign(x))
tanh = unary("tanh", lambda xp, x: xp.tanh(x), lambda xp, g, x, y: g * (1 - y * y))
sigmoid = unary("sigmoid", lambda xp, x: kernels.sigmoid(x), lambda xp, g, x, y: g * y * (1 - y))


@register
def negative(x: Operand) -> Tensor:
    x = as_tensor(x)
    return record(-x.array, (x,), lambda grad, needs_grad: (-grad,), "negative")


# -------------------------------------------------------------------- elementwise, two inputs
def binary(
    name: str,
    symbol: str,
    forward: Callable[..., Array],
    left: Callable[..., Array],
    right: Callable[..., Array],
    saves: bool = True,
) -> Callable[..., Tensor]:
    """Make an elementwise op of two inputs, with broadcasting.

    `forward(x, y)` returns z; `left(g, x, y, z)` and `right(g, x, y, z)` return the gradients of x and y before
    un-broadcasting. If neither reads x, y and z, these need not be saved. A plain number is no node of the graph: it is
    part of the result's name, "+ 4" for `x + 4`.
    """

    def op(x: Operand, y: Operand) -> Tensor:
        if not isinstance(x, Tensor):
            if isinstance(y, Tensor) and isinstance(x, Real):
                return with_number_left(_plain(x), y)
            x = as_tensor(x, y if isinstance(y, Tensor) else None)
        if not isinstance(y, Tensor):
            if isinstance(y, Real):
                return with_number_right(x, _plain(y))
            y = as_tensor(y, x)
        a, b = x.array, y.array
        if type(a) is not type(b):
            check_device(name, a, b)
        if a.dtype is not b.dtype:
            a, b = common_kind(a, b)
        try:
            z = forward(a, b)
        except ValueError as error:
            raise refusal(name, error, a, b) from None
        values = (a, b, z) if saves else nothing
        if a.shape == b.shape:  # the most frequent case, and the cheapest
            return record(z, (x, y), backward, result_name, None, values)
        return record(z, (x, y), backward_unbroadcast, result_name, None, (a.shape, b.shape, *values))

    result_name = "b" + name
    nothing = (None, None, None)
    backward, backward_unbroadcast = _backward_functions(left, right)

    def with_number_right(x: Tensor, y: float) -> Tensor:
        a = _ready_for(x.array, y)
        z = forward(a, y)
        return record(z, (x,), lambda grad, needs_grad: (left(grad, a, y, z),), f"{symbol} {y}")

    def with_number_left(x: float, y: Tensor) -> Tensor:
        b = _ready_for(y.array, x)
        z = forward(x, b)
        name = f"{symbol} {x}" if symbol in "+*" else f"{x} {symbol}"
        return record(z, (y,), lambda grad, needs_grad: (right(grad, x, b, z),), name)

    op.__name__ = name
    return register(op)


def _backward_functions(left: Callable[..., Array], right: Callable[..., Array]) -> tuple[Backward, Backward]:
    """Return the backward functions for inputs in the shape of the result, and for inputs that were broadcast."""

    def backward(grad: Array, needs_grad: NeedsGrad, x: Any, y: Any, z: Any) -> tuple[Array | None, Array | None]:
        to_left = left(grad, x, y, z) if needs_grad[0] else None
        to_right = right(grad, x, y, z) if needs_grad[1] else None
        return to_left, to_right

    def backward_unbroadcast(
        grad: Array, needs_grad: NeedsGrad, x_shape: tuple[int, ...], y_shape: tuple[int, ...], *values: Any
    ) -> tuple[Array | None, Array | None]:
        to_left, to_right = backward(grad, needs_grad, *values)
        to_left = None if to_left is None else unbroadcast(to_left, x_shape)
        to_right = None if to_right is None else unbroadcast(to_right, y_shape)
        return to_left, to_right

    return backward, backward_unbroadcast


def _plain(number: Any) -> Any:
    """Return a Python number, which does not change the dtype of an array beside it as NumPy's scalars do."""
    return number.item() if isinstance(number, np.generic) else number


def _ready_for(array: Array, number: float) -> Array:
    return floating(array) if isinstance(number, float) else array


def _module(x: Any, y: Any) -> Any:
    """Return the array module of whichever is an array."""
    return array_module(x if is_array(x) else y)


def _power_right(g: Array, x: Any, y: Any, z: Array) -> Array:
    """Return g x ** y log x, which goes to 0 with x."""
    xp = array_module(g)
    positive = xp.asarray(x) > 0
    return g * xp.where(positive, z * xp.log(xp.where(positive, x, 1)), 0)


def _power_left(g: Array, x: Array, y: Any, z: Array) -> Array:
    xp = array_module(g)
    if isinstance(y, (int, float)):
        return g * (y * x ** (y - 1)) if y else xp.zeros_like(g)
    return g * y * x ** xp.where(y == 0, 1, y - 1)


add = binary("add", "+", operator.add, lambda g, x, y, z: g, lambda g, x, y, z: g, saves=False)
subtract = binary("sub", "-", operator.sub, lambda g, x, y, z: g, lambda g, x, y, z: -g, saves=False)
multiply = binary("mul", "*", operator.mul, lambda g, x, y, z: g * y, lambda g, x, y, z: g * x)
divide = binary(
    "div",
    "/",
    # the quotient of integers is float32, as every other result here
    lambda x, y: (floating(x) if is_array(x) else x) / (floating(y) if is_array(y) else y),
    lambda g, x, y, z: g / y,
    lambda g, x, y, z: -g * z / y,
)
power = binary("pow", "**", operator.pow, _power_left, _power_right)
# equal values share the gradient, as the mean of the one-sided derivatives
_extremes = (
    lambda g, x, y, z: g * ((x == z) * (1 - 0.5 * (x == y))).astype(z.dtype),
    lambda g, x, y, z: g * ((y == z) * (1 - 0.5 * (x == y))).astype(z.dtype),
)
maximum = binary("maximum", "max", lambda x, y: _module(x, y).maximum(x, y), *_extremes)
minimum = binary("minimum", "min", lambda x, y: _module(x, y).minimum(x, y), *_extremes)


def comparison(name: str, compare: Callable[[Any, Any], Any]) -> Callable[[Operand, Operand], Tensor]:
    """Make a comparison, which returns a Tensor of booleans: no gradient flows through it."""

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
    """Select x where the condition holds, y elsewhere, with broadcasting."""
    x, y = as_tensors(x, y)
    chosen = as_tensor(condition, None if is_array(condition) else x).array.astype(bool)
    xp = x.xp
    check_device("where", chosen, x.array, y.array)
    try:
        z = xp.where(chosen, *common_kind(x.array, y.array))
    except ValueError as error:
        raise refusal("where", error, chosen, x.array, y.array) from None

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, Array | None]:
        to_x = unbroadcast(xp.where(chosen, grad, 0), x.shape) if needs_grad[0] else None
        to_y = unbroadcast(xp.where(chosen, 0, grad), y.shape) if needs_grad[1] else None
        return to_x, to_y

    return record(z, (x, y), backward, "where")


def _joined(op: str, tensors: Sequence[Operand]) -> tuple[tuple[Tensor, ...], tuple[Array, ...], Any]:
    """Return the inputs of an op that joins them: as Tensors, as arrays of one dtype kind, and their module."""
    tensors = as_tensors(*tensors)
    if not tensors:
        raise ValueError(f"{op}: expected at least one Tensor, got none")
    check_device(op, *(t.array for t in tensors))
    return tensors, common_kind(*(t.array for t in tensors)), tensors[0].xp


@register
def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join Tensors along an axis that they have."""
    tensors, arrays, xp = _joined("concatenate", tensors)
    try:
        z = xp.concatenate(arrays, axis=axis)
    except ValueError as error:
        raise refusal("concatenate", error, *arrays) from None
    indices = []
    start = 0
    for t in tensors:
        stop = start + t.shape[axis]
        indices.append((slice(None),) * (axis % z.ndim) + (slice(start, stop),))
        start = stop
    return record(z, tensors, lambda grad, needs_grad: [grad[index] for index in indices], "concatenate")


@register
def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join Tensors of one shape along a new axis."""
    tensors, arrays, xp = _joined("stack", tensors)
    try:
        z = xp.stack(arrays, axis=axis)
    except ValueError as error:
        raise refusal("stack", error, *arrays) from None
    batched = any(t.is_batched for t in tensors) and axis % z.ndim != 0

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array]:
        parts = xp.moveaxis(grad, axis, 0)
        return [parts[i] for i in range(len(tensors))]

    return record(z, tensors, backward, "stack", batched)


# -------------------------------------------------------------------- reductions
def _axes(op: str, x: Tensor, axis: Axis) -> tuple[int, ...]:
    """Return the axes that `axis` names, counted from the front."""
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    for a in axes:
        if not -x.ndim <= operator.index(a) < x.ndim:
            raise ValueError(f"{op}: axis {a} is out of range for a Tensor of shape {x.shape}")
    axes = tuple(a % x.ndim for a in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{op}: expected each axis once, got {axis} for a Tensor of shape {x.shape}")
    return axes


def _kept(grad: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """Return the gradient of a reduction with the reduced axes restored, of length 1."""
    return grad.reshape(tuple(1 if i in axes else n for i, n in enumerate(shape)))


@register
def sum(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Sum over an axis, several, or all."""
    x = as_tensor(x)
    axes, xp, shape = _axes("sum", x, axis), x.xp, x.shape
    y = x.array.sum(axis=axes, keepdims=keepdims)
    backward = lambda grad, needs_grad: (xp.broadcast_to(_kept(grad, shape, axes), shape),)
    return record(y, (x,), backward, "sum", x.is_batched and 0 not in axes)


@register
def mean(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over an axis, several, or all."""
    x = as_tensor(x)
    axes, xp, shape = _axes("mean", x, axis), x.xp, x.shape
    count = math.prod(shape[a] for a in axes)
    if count == 0:
        raise ValueError(f"mean: expected at least one element along axes {axes}, got shape {shape}")
    y = floating(x.array).mean(axis=axes, keepdims=keepdims)
    backward = lambda grad, needs_grad: (xp.broadcast_to(_kept(grad / count, shape, axes), shape),)
    return record(y, (x,), backward, "mean", x.is_batched and 0 not in axes)


def _extreme(x: Operand, axis: Axis, keepdims: bool, name: str) -> Tensor:
    """Compute `max` or `min`. Equal extremes share the gradient evenly."""
    x = as_tensor(x)
    axes, array = _axes(name, x, axis), x.array
    if 0 in [array.shape[a] for a in axes]:
        raise ValueError(f"{name}: expected at least one element along axes {axes}, got shape {x.shape}")
    y = getattr(array, name)(axis=axes, keepdims=True)

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
        chosen = array == y
        return (chosen * (_kept(grad, array.shape, axes) / chosen.sum(axis=axes, keepdims=True)),)

    shape = y.shape if keepdims else tuple(n for i, n in enumerate(y.shape) if i not in axes)
    return record(y.reshape(shape), (x,), backward, name, x.is_batched and 0 not in axes)


@register
def max(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the largest value over an axis, several, or all."""
    return _extreme(x, axis, keepdims, "max")


@register
def min(x: Operand, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest value over an axis, several, or all."""
    return _extreme(x, axis, keepdims, "min")


# -------------------------------------------------------------------- shapes and indexing
def _flat(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return (2, 3) for the arguments of both `f(2, 3)` and `f((2, 3))`."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], Sequence) else args


@register
def reshape(x: Operand, *shape: int | Sequence[int]) -> Tensor:
    """Return the same values in another shape; one length may be -1."""
    x = as_tensor(x)
    shape_before = x.array.shape
    try:
        y = x.array.reshape(_flat(shape))
    except ValueError:
        raise ValueError(f"reshape: {x.size} elements of shape {shape_before} do not fit {_flat(shape)}") from None
    batched = x.is_batched and y.shape[:1] == shape_before[:1]
    return record(y, (x,), lambda grad, needs_grad: (grad.reshape(shape_before),), "reshape", batched)


@register
def transpose(x: Operand, *axes: int | Sequence[int]) -> Tensor:
    """Permute the axes; reverse them if no order is given."""
    x = as_tensor(x)
    order = _axes("transpose", x, _flat(axes)) or tuple(reversed(range(x.ndim)))
    if len(order) != x.ndim:
        raise ValueError(f"transpose: expected an order of {x.ndim} axes, got {_flat(axes)} for shape {x.shape}")
    back = tuple(order.index(i) for i in range(x.ndim))
    batched = x.is_batched and order[:1] == (0,)
    return record(
        x.array.transpose(order), (x,), lambda grad, needs_grad: (grad.transpose(back),), "transpose", batched
    )


def _array_index(index: Any, xp: Any) -> Any:
    """Replace the Tensors of an index by their arrays; move NumPy arrays to the device of the indexed array."""
    if isinstance(index, tuple):
        return tuple(_array_index(i, xp) for i in index)
    index = index.array if isinstance(index, Tensor) else index
    return xp.asarray(index) if isinstance(index, np.ndarray) else index


@register
def getitem(x: Operand, index: Any) -> Tensor:
    """Index as NumPy does: integers, slices, None, Ellipsis, arrays or Tensors of integers or booleans."""
    x = as_tensor(x)
    index = _array_index(index, x.xp)
    try:
        y = x.array[index]
    except IndexError as error:
        raise IndexError(f"getitem: {error}, for a Tensor of shape {x.shape}") from None
    first = index[:1] if isinstance(index, tuple) else (index,)
    batched = x.is_batched and not isinstance(first[0] if first else ..., (int, np.integer, type(None)))
    return record(y, (x,), lambda grad, needs_grad: (SlicedGradient(grad, index),), "getitem", batched)


def split(x: Operand, n_splits: int, axis: int = -1) -> list[Tensor]:
    """Split into equal parts along an axis."""
    x = as_tensor(x)
    (axis,) = _axes("split", x, axis)
    if n_splits < 1 or x.shape[axis] % n_splits:
        raise ValueError(f"split: {n_splits} equal parts do not fit axis {axis} of shape {x.shape}")
    return split_sizes(x, [x.shape[axis] // n_splits] * n_splits, axis)


def split_sizes(x: Tensor, sizes: Sequence[int], axis: int = -1) -> list[Tensor]:
    """Split into parts of these sizes along an axis: views of the same memory."""
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
    return (SlicedGradient(grad, index, once=True),)


def split_heads(x: Tensor, n_heads: Sequence[int], head_size: int) -> list[Tensor]:
    """Split the channels of x (B, T, C) into heads: for each number n in `n_heads` a view (B, T, n, head_size)."""
    array = x.array
    parts = []
    start = 0
    for n in n_heads:
        index = (slice(None), slice(None), slice(start, start + n * head_size))
        part = array[index]
        heads = part.reshape(*array.shape[:2], n, head_size)
        parts.append(record(heads, (x,), _heads_gradient, "heads", None, (index, part.shape)))
        start += n * head_size
    return parts


def _heads_gradient(grad: Array, needs_grad: NeedsGrad, index: Any, shape: tuple[int, ...]) -> tuple[SlicedGradient]:
    return (SlicedGradient(grad.reshape(shape), index, once=True),)


def _iterate(x: Tensor) -> Iterator[Tensor]:
    return (getitem(x, i) for i in range(len(x)))


# -------------------------------------------------------------------- the operators and methods of Tensor
def _reflected(op: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda x, y: op(y, x)


for _name, _op in {"add": add, "sub": subtract, "mul": multiply, "truediv": divide, "pow": power}.items():
    setattr(Tensor, f"__{_name}__", _op)
    setattr(Tensor, f"__r{_name}__", _reflected(_op))
for _name, _compare in {
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}.items():
    setattr(Tensor, f"__{_compare.__name__}__", comparison(_name, _compare))
for _name, _method in {
    "__neg__": negative,
    "__getitem__": getitem,
    "__iter__": _iterate,
    "reshape": reshape,
    "transpose": transpose,
    "split": split,
    "sum": sum,
    "mean": mean,
    "max": max,
    "min": min,
    "exp": exp,
    "log": log,
    "sqrt": sqrt,
}.items():
    setattr(Tensor, _name, _method)
