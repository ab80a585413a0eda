"""Further methods of `Tensor`: printing, conversion, comparison, GPU transfer, copies, and single gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tricycle import devices
from tricycle.autograd import GradientSums, OwnedGradient, SlicedGradient, sum_slices, topological_order, walk_backward
from tricycle.devices import Array
from tricycle.tensor import Operand, Tensor

BackFn: TypeAlias = Callable[[Tensor], "Array | Tensor"]


def to_string(x: Tensor) -> str:
    """Format a Tensor as "Tensor([...], name=...)": its values, on one line if they fit, and its name if any."""
    array, end = x.numpy(), f", name={x.name})" if x.name else ")"
    if array.ndim == 0:
        return f"Tensor({array!s}{end}"  # !s: format() would go through a Python float
    text = np.array2string(array, prefix="Tensor(")
    one_line = re.sub(r"\]\s*\n\s*\[", "], [", text)
    fits = "\n" not in one_line and len(one_line) <= np.get_printoptions()["linewidth"]
    return f"Tensor({one_line if fits else text}{end}"


def format_element(x: Tensor, spec: str) -> str:
    """Format a one-element Tensor's element by a specification, ValueError for other sizes; without one, `str(x)`."""
    return format(x.item(), spec) if spec else str(x)


def item(x: Tensor) -> Any:
    """Return the element of a one-element Tensor as a Python number; raise a ValueError for another size."""
    if x.size != 1:
        raise ValueError(f"item: expected a Tensor of one element, got shape {x.shape}")
    return x.array.item()


def as_numpy(x: Tensor, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """Convert a Tensor to a NumPy array, for `numpy.asarray(x)`; raise a TypeError for a Tensor on a GPU."""
    if x.on_gpu:
        raise TypeError("numpy: expected a Tensor in host memory, got one on a GPU: call .numpy()")
    return np.array(x.array, dtype=dtype, copy=copy)


def length(x: Tensor) -> int:
    """Return the length of axis 0; raise a TypeError if there are no axes."""
    if x.ndim == 0:
        raise TypeError("len: a Tensor without axes has no length")
    return x.shape[0]


def to_bool(x: Tensor) -> bool:
    """Return the truth value of a one-element Tensor's element; raise a ValueError for another size."""
    if x.size == 1:
        return bool(x.item())
    instead = ".array.any(), .array.all() or close_to"
    raise ValueError(f"the truth of a Tensor of shape {x.shape} is ambiguous: use {instead}")


def close_to(x: Tensor, other: Operand, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Return whether all elements are within `atol + rtol * |other|` of those of a Tensor, array or number."""
    array = other.array if isinstance(other, Tensor) else other
    array = devices.to_cpu(array) if devices.is_array(array) else array
    return bool(np.allclose(x.numpy(), array, rtol, atol, equal_nan))


# -------------------------------------------------------------------- devices, copies
def to_gpu(x: Tensor, device: int = 0) -> Tensor:
    """Move array and gradient of an input or parameter, RuntimeError for a result, to a GPU in place; return x."""
    if x.args:
        got = f"the result of {x.name or 'an operation'}"
        raise RuntimeError(f"to_gpu: expected a Tensor without a history, got {got}; move detach() or its inputs")
    x.array = devices.to_gpu(x.array, device)
    if x.grad is not None:
        x.grad.to_gpu(device)
    return x


def from_gpu(x: Tensor) -> Tensor:
    """Move the array and any gradient to host memory, in place, even for results; return x."""
    x.array = devices.to_cpu(x.array)
    if x.grad is not None:
        x.grad.from_gpu()
    return x


def detach(x: Tensor) -> Tensor:
    """Return a Tensor with the same array that is not part of the graph: no gradient flows through it."""
    return Tensor(x.array, requires_grad=False, is_batched=x.is_batched, name=x.name)


# Copies and pickles exclude the graph, which has functions. Arrays are pickled as NumPy arrays, which load anywhere.
def get_state(x: Tensor) -> dict[str, Any]:
    """Return a dict for pickling: "array" (NumPy) and the attributes in `_copied`, without graph and gradient."""
    return {"array": x.numpy(), **{name: getattr(x, name) for name in x._copied}}


def set_state(x: Tensor, state: dict[str, Any]) -> None:
    """Restore a Tensor in place from the dict of `get_state`, without graph and gradient."""
    Tensor.__init__(x, state["array"])
    for name in x._copied:
        setattr(x, name, state[name])


def deep_copy(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a Tensor with a copy of the array, on the same device, without graph and gradient."""
    twin = type(x).__new__(type(x))
    set_state(twin, {"array": x.array.copy(), **{name: getattr(x, name) for name in x._copied}})
    return twin


# -------------------------------------------------------------------- the batch
def to_batched(x: Tensor) -> Tensor:
    """Mark axis 0 as the batch axis, in place; return x; raise a ValueError if there are no axes."""
    if x.ndim == 0:
        raise ValueError("to_batched: a Tensor without axes has no batch axis")
    x.is_batched = True
    return x


def from_batched(x: Tensor) -> Tensor:
    """Mark a Tensor as having no batch axis, in place; return x."""
    x.is_batched = False
    return x


# -------------------------------------------------------------------- single gradients
def leaf_gradients(result: Tensor, grad: Array, inputs: Sequence[Tensor]) -> list[Array | None]:
    """Return each input's gradient, or None, by a separate backward pass; change no Tensor's `grad`; free the graph.

    For operations whose backward function runs a separate backward pass. The arrays may share memory.
    """
    leaves = walk_backward(topological_order(result), grad, GradientSums())
    arrived = {id(leaf): array for leaf, array in leaves}
    return [arrived.get(id(node)) for node in inputs]


def back_fn_of(x: Tensor, i: int) -> BackFn:
    """Return a function from the gradient of x, a Tensor, to that of its arg `i`, as the backward function gives it."""
    arg, saved = x.args[i], x._saved
    backward: Any = x._backward  # not None, as x has args
    needs_grad = [place == i for place in range(len(x.args))]

    def back_fn(grad: Tensor) -> Array | Tensor:
        gradient = backward(grad.array, needs_grad, *saved)[i]
        if type(gradient) is SlicedGradient:
            return sum_slices([gradient], arg.array)
        return gradient.array if type(gradient) is OwnedGradient else gradient

    return back_fn


def set_back_fns(x: Tensor, back_fns: tuple[BackFn, ...]) -> None:
    """Replace, in place, the backward function of x by one per arg, called with the gradient of x (a Tensor)."""

    def call_back_fns(grad: Array, needs_grad: Sequence[bool]) -> list[Any]:
        incoming = Tensor(grad, False)
        return [back_fn(incoming) if needs else None for back_fn, needs in zip(back_fns, needs_grad, strict=True)]

    x._backward, x._saved = call_back_fns, ()


for _name, _method in {
    "__str__": to_string,
    "__repr__": to_string,
    "__format__": format_element,
    "item": item,
    "__int__": lambda x: int(x.item()),
    "__float__": lambda x: float(x.item()),
    "__array__": as_numpy,
    "__len__": length,
    "__bool__": to_bool,
    "__getstate__": get_state,
    "__setstate__": set_state,
    "__deepcopy__": deep_copy,
    "detach": detach,
    "to_gpu": to_gpu,
    "from_gpu": from_gpu,
    "close_to": close_to,
    "to_batched": to_batched,
    "from_batched": from_batched,
    "back_fns": property(lambda x: tuple(back_fn_of(x, i) for i in range(len(x.args))), set_back_fns),
}.items():
    setattr(Tensor, _name, _method)
