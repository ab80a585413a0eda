"""Differentiable operations on Tensors, each with its gradient, and helpers to write more of them.

Each operation computes with the array module `xp` of its inputs, and records the result with a backward function. The
last lines attach operators and methods to `Tensor`. `extra_ops.py` and `einsum.py` have further operations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad, SlicedGradient
from tricycle.devices import Array, array_module, is_array, on_gpu
from tricycle.kernels import LARGE, in_chunks, upcast
from tricycle.tensor import Operand, Tensor, record, to_tensor

Function = TypeVar("Function", bound=Callable[..., Any])
ArrayFunction: TypeAlias = Callable[..., Array]

# All differentiable operations by name. A test requires a gradient check of each.
OPS: dict[str, Callable[..., Any]] = {}


def register(op: Function) -> Function:
    """Register a differentiable operation in `OPS` under its name; return it."""
    OPS[op.__name__] = op
    return op


class Op:
    """The base of operations with hyper-parameters, and without any state of a call.

    A subclass defines `forward(*tensors)`. Subclasses are registered in `OPS`, unless declared with `is_base=True`.
    """

    def __init_subclass__(cls, is_base: bool = False, **kwargs: Any) -> None:
        """Register a subclass in `OPS` by name, unless it is a base, private or of another package."""
        super().__init_subclass__(**kwargs)
        if not is_base and not cls.__name__.startswith("_") and cls.__module__.startswith("tricycle."):
            OPS[cls.__name__] = cls

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the operation; raise a NotImplementedError unless a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call `forward`."""
        return self.forward(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"


def as_tensor(x: Operand, like: Tensor | None = None) -> Tensor:
    """Return a Tensor unchanged; make others a constant Tensor, in the float dtype of `like` (else integers stay)."""
    if isinstance(x, Tensor):
        return x
    array: Array = x if is_array(x) else (np if like is None else like.xp).asarray(x)
    if like is not None and like.dtype.kind == "f":
        return to_tensor(array, dtype=like.dtype, requires_grad=False)
    keep = array.dtype if array.dtype.kind in "biu" else None
    return to_tensor(array, dtype=keep, requires_grad=False)


def as_tensors(*xs: Operand) -> tuple[Tensor, ...]:
    """Convert numbers, lists and arrays to constant Tensors in the dtype of the first Tensor; keep Tensors."""
    tensors = [x for x in xs if isinstance(x, Tensor)]
    if len(tensors) == len(xs):
        return tuple(tensors)
    return tuple(as_tensor(x, tensors[0] if tensors else None) for x in xs)


def as_floating(array: Array) -> Array:
    """Convert an array of integers or booleans to float32; return floats unchanged."""
    return array.astype(np.float32) if array.dtype.kind in "biu" else array


def promote_integers(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays, integers cast to the dtype of the first float array (NumPy would use float64), if there is one."""
    floats = [a.dtype for a in arrays if a.dtype.kind not in "biu"]
    return tuple(a.astype(floats[0]) if floats and a.dtype.kind in "biu" else a for a in arrays)


def shape_error(op: str, error: ValueError, *arrays: Array) -> ValueError:
    """Return a ValueError for inputs whose shapes do not fit, with the operation's name and the shapes."""
    shapes = " and ".join(str(array.shape) for array in arrays)
    rule = "do not broadcast" if "broadcast" in str(error) else f"do not fit: {error}"
    return ValueError(f"{op}: shapes {shapes} {rule}")


def check_device(op: str, *arrays: Array) -> None:
    """Raise a ValueError that names `op` unless all arrays are in host memory (NumPy) or all on a GPU (CuPy)."""
    kind = type(arrays[0])
    for array in arrays:
        if type(array) is not kind:  # it may be a subclass
            modules = {array_module(array).__name__ for array in arrays}
            if len(modules) > 1:
                raise ValueError(f"{op}: expected all inputs on one device, got {' and '.join(sorted(modules))} arrays")


def check_last_axis(title: str, x: Tensor, size: int) -> None:
    """Raise a ValueError that begins with `title` unless the last axis of x has this size."""
    if x.shape[-1:] != (size,):
        raise ValueError(f"{title}: expected the last axis to be {size}, got shape {x.shape}")


def check_range(what: str, ids: Array, limit: int) -> None:
    """Raise a ValueError for ids outside 0 .. limit-1. Arrays on a GPU are not checked, as this would synchronize."""
    if not on_gpu(ids) and ((ids < 0) | (ids >= limit)).any():
        low, high = int(ids.min()), int(ids.max())
        raise ValueError(f"{what}: expected ids from 0 to {limit - 1}, got {low if low < 0 else high}")


def check_positive(layer: str, **sizes: int) -> None:
    """Raise a ValueError with the layer's and the argument's name unless all sizes are positive integers."""
    for name, size in sizes.items():
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{layer}: expected {name} to be a whole number above 0, got {size!r}")


def unary_op(name: str, forward: ArrayFunction, gradient: ArrayFunction) -> Callable[[Operand], Tensor]:
    """Make and register a differentiable elementwise op: y = `forward(xp, x)`, gradient = `gradient(xp, g, x, y)`."""

    def op(x: Operand) -> Tensor:
        x = as_tensor(x)
        array = as_floating(x.array)
        y = forward(x.xp, array) if array.size < LARGE else in_chunks(partial(forward, x.xp), array)
        return record(y, (x,), backward, name, None, (array, y))

    def backward(grad: Array, needs_grad: NeedsGrad, x: Array, y: Array) -> tuple[Array]:
        xp = array_module(x)
        return (gradient(xp, grad, x, y) if grad.size < LARGE else in_chunks(partial(gradient, xp), grad, x, y),)

    op.__name__ = name
    return register(op)


tanh = unary_op("tanh", lambda xp, x: xp.tanh(x), lambda xp, g, x, y: g * (1 - y * y))
sigmoid = unary_op("sigmoid", lambda xp, x: kernels.sigmoid(x), lambda xp, g, x, y: g * y * (1 - y))


def binary_op(
    name: str, symbol: str, forward: ArrayFunction, left: ArrayFunction, right: ArrayFunction, saves: bool = True
) -> Callable[..., Tensor]:
    """Make and register a differentiable elementwise op of two inputs that broadcast; gradients are summed back.

    `forward(x, y)` returns z; `left(g, x, y, z)` and `right(g, x, y, z)` return the gradients of x and y before
    un-broadcasting; `saves=False` if they do not read x, y and z. A Python number is not a node of the graph, but part
    of the result's name: "+ 4" for `x + 4`.
    """

    def op(x: Operand, y: Operand) -> Tensor:
        if not isinstance(x, Tensor):
            if isinstance(y, Tensor) and isinstance(x, Real):
                b, x = _beside_number(y.array, x)
                z = forward(x, b) if b.size < LARGE else in_chunks(forward, x, b)
                title = f"{symbol} {x}" if symbol in "+*" else f"{x} {symbol}"
                return record(z, (y,), backward_right, title, None, (x, b, z) if saves else nothing)
            x = as_tensor(x, y if isinstance(y, Tensor) else None)
        if not isinstance(y, Tensor):
            if isinstance(y, Real):
                a, y = _beside_number(x.array, y)
                z = forward(a, y) if a.size < LARGE else in_chunks(forward, a, y)
                return record(z, (x,), backward_left, f"{symbol} {y}", None, (a, y, z) if saves else nothing)
            y = as_tensor(y, x)
        a, b = x.array, y.array
        if type(a) is not type(b):
            check_device(name, a, b)
        if a.dtype is not b.dtype:
            a, b = promote_integers(a, b)
        try:
            z = forward(a, b) if a.size < LARGE > b.size else in_chunks(forward, a, b)
        except ValueError as error:
            raise shape_error(name, error, a, b) from None
        shapes = () if a.shape == b.shape else (a.shape, b.shape)
        return record(z, (x, y), backward, result_name, None, ((a, b, z) if saves else nothing) + shapes)

    def backward(
        grad: Array, needs_grad: NeedsGrad, x: Any, y: Any, z: Any, x_shape: Any = None, y_shape: Any = None
    ) -> tuple[Array | None, Array | None]:
        run = compute if grad.size >= LARGE else operator.call
        to_x = run(left, grad, x, y, z) if needs_grad[0] else None
        to_y = run(right, grad, x, y, z) if needs_grad[1] else None
        if x_shape is not None:
            to_x = None if to_x is None else unbroadcast(to_x, x_shape)
            to_y = None if to_y is None else unbroadcast(to_y, y_shape)
        return to_x, to_y

    backward_left = lambda grad, needs_grad, *values: (compute(left, grad, *values),)
    backward_right = lambda grad, needs_grad, *values: (compute(right, grad, *values),)
    result_name, nothing = "b" + name, (None, None, None)
    compute: ArrayFunction = in_chunks if saves else operator.call
    op.__name__ = name
    return register(op)


def _beside_number(array: Array, number: Any) -> tuple[Array, Any]:
    """Return (array, number): a NumPy scalar becomes a Python number; for a float, an integer array becomes float32."""
    number = number.item() if isinstance(number, np.generic) else number
    return as_floating(array) if isinstance(number, float) else array, number


def unbroadcast(grad: Array, shape: tuple[int, ...]) -> Array:
    """Return a gradient summed to `shape`, in float32 at least, over axes along which an input of it was broadcast."""
    if grad.shape == shape:
        return grad
    added = grad.ndim - len(shape)
    axes = (*range(added), *(added + i for i, n in enumerate(shape) if n == 1 and grad.shape[added + i] != 1))
    return in_chunks(lambda x: upcast(x).sum(axis=axes, keepdims=True), grad, whole_axes=axes).reshape(shape)


add = binary_op("add", "+", operator.add, lambda g, x, y, z: g, lambda g, x, y, z: g, saves=False)
multiply = binary_op("mul", "*", operator.mul, lambda g, x, y, z: g * y, lambda g, x, y, z: g * x)


def unpack_arguments(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the tuple (2, 3) for the arguments of both `f(2, 3)` and `f((2, 3))`."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], Sequence) else args


@register
def reshape(x: Operand, *shape: int | Sequence[int]) -> Tensor:
    """Return x in another shape, integers or one sequence, one of them -1 (inferred); ValueError if it does not fit."""
    x = as_tensor(x)
    before = x.array.shape
    try:
        y = x.array.reshape(unpack_arguments(shape))
    except ValueError:
        raise ValueError(f"reshape: {x.size} elements of shape {before} do not fit {unpack_arguments(shape)}") from None
    batched = x.is_batched and y.shape[:1] == before[:1]
    return record(y, (x,), lambda grad, needs_grad: (grad.reshape(before),), "reshape", batched)


def _array_index(index: Any, xp: Any) -> Any:
    """Replace the Tensors of an index by their arrays; move NumPy arrays to the device of the indexed array."""
    if isinstance(index, tuple):
        return tuple(_array_index(i, xp) for i in index)
    index = index.array if isinstance(index, Tensor) else index
    return xp.asarray(index) if isinstance(index, np.ndarray) else index


@register
def getitem(x: Operand, index: Any) -> Tensor:
    """Return x[index] as in NumPy, for integers, slices, None, Ellipsis, arrays or Tensors of integers or booleans."""
    x = as_tensor(x)
    index = _array_index(index, x.xp)
    try:
        y = x.array[index]
    except IndexError as error:
        raise IndexError(f"getitem: {error}, for a Tensor of shape {x.shape}") from None
    first = index[:1] if isinstance(index, tuple) else (index,)
    batched = x.is_batched and not isinstance(first[0] if first else ..., (int, np.integer, type(None)))
    return record(y, (x,), lambda grad, needs_grad: (SlicedGradient(grad, index),), "getitem", batched)


@register
def split_heads(x: Tensor, n_heads: Sequence[int], head_size: int) -> list[Tensor]:
    """Split the channels of x (B, T, C) into groups of heads: one view (B, T, n, head_size) for each n in `n_heads`."""
    n_items, n_tokens, n_channels = x.array.shape
    heads = x.array.reshape(n_items, n_tokens, n_channels // head_size, head_size)
    args, parts, start = (x,), [], 0
    for n in n_heads:
        parts.append(record(heads[:, :, start : start + n], args, _heads_gradient, "heads", None, (start * head_size,)))
        start += n
    return parts


def _heads_gradient(grad: Array, needs_grad: NeedsGrad, start: int) -> tuple[SlicedGradient]:
    """Return a part's gradient, by head, as a SlicedGradient of the channels of x from `start` on."""
    channels = grad.reshape(*grad.shape[:2], grad.shape[2] * grad.shape[3])
    index = (slice(None), slice(None), slice(start, start + channels.shape[2]))
    return (SlicedGradient(channels, index, unique=True),)


def swap_operands(op: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return an operation op(y, x) for op(x, y), for operators such as `__radd__`."""
    return lambda x, y: op(y, x)


for _name, _op in {"add": add, "mul": multiply}.items():
    setattr(Tensor, f"__{_name}__", _op)
    setattr(Tensor, f"__r{_name}__", swap_operands(_op))
for _name, _function in {"__getitem__": getitem, "reshape": reshape}.items():
    setattr(Tensor, _name, _function)
