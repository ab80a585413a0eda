"""Free intermediate activations that no gradient needs, during the forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from tricycle.autograd import Mode, graph_mode
from tricycle.devices import Array, array_module
from tricycle.layers import Layer, flatten
from tricycle.tensor import Tensor


def free_activations() -> AbstractContextManager[None]:
    """Return a context manager in which models free, after each block, the activations that no gradient needs."""
    return graph_mode(Mode(run_block=run_and_free))


def run_and_free(block: Layer, x: Tensor, *args: Any) -> Tensor:
    """Return `block(x, *args)`; then free inner arrays unused by backward, if no layer is foreign or patched.

    Nothing is freed if the block contains a layer or function from another package, which may keep its input or result,
    or a layer whose `forward` was replaced (by a probe, for example).
    """
    result: Tensor = block(x, *args)
    if all(_is_ours(part) for part in block.layers()):
        free_activations_inside(result, x)
    return result


def free_activations_inside(result: Tensor, start: Tensor) -> None:
    """Replace Tensors' arrays between `start` and `result` by NaN, to free memory, except at a user's own operations.

    Backward functions hold the arrays that they need, so gradients do not change; the freed Tensors become NaN, with
    the same shapes and dtypes. The inputs and the result of a user's own operation are kept, because its backward
    function may read a Tensor's `array` when it is called.
    """
    inside: dict[int, Tensor] = {}
    spared = {id(start), id(result)}
    stack = [result]
    while stack:
        node = stack.pop()
        if not _holds_its_arrays(node._backward):
            spared.update(map(id, (node, *node.args)))
        for arg in node.args:
            if arg.args and id(arg) not in inside and arg is not start:
                inside[id(arg)] = arg
                stack.append(arg)
    for key, tensor in inside.items():
        if key not in spared:
            array, xp = tensor.array, array_module(tensor.array)
            nan = _nan(xp, getattr(array.device, "id", None), array.dtype)
            tensor.array = xp.broadcast_to(nan, array.shape)


# Cache: valid for the life of the process: one scalar for each device and dtype.
@cache
def _nan(xp: ModuleType, device: int | None, dtype: np.dtype[Any]) -> Array:
    """Return a 0-d NaN of a dtype on the current device, cached by module, device and dtype."""
    return xp.full((), np.nan, dtype)


def _holds_its_arrays(backward: Any) -> bool:
    """Return whether a backward function is the library's own, which reads no Tensor's array when called."""
    module = getattr(backward, "__module__", None) or ""
    # `call_back_fns` is a function of the library that calls a user's `back_fns`
    return module.startswith("tricycle.") and getattr(backward, "__name__", "") != "call_back_fns"


def _is_ours(layer: Layer) -> bool:
    """Return whether a layer and the functions it calls are of this package, and its `forward` was not replaced."""
    parts = [layer, *(value for _, value in flatten("", vars(layer)) if callable(value))]
    modules = [getattr(part, "__module__", None) or "" for part in parts]
    return "forward" not in vars(layer) and all(module.startswith("tricycle.") for module in modules)
