"""Less memory for activations: free those that no gradient needs while the forward pass goes on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tricycle.autograd import Mode, graph_mode
from tricycle.devices import array_module
from tricycle.layers import Layer
from tricycle.tensor import Tensor


def free_activations() -> AbstractContextManager[None]:
    """Within this block (and this thread), let models free what no gradient needs inside of each transformer block."""
    return graph_mode(Mode(run_block=run_and_free))


def run_and_free(block: Layer, x: Tensor, *args: Any) -> Tensor:
    """Return `block(x, *args)`, and free what no gradient needs inside of it.

    Blocks with a layer of another module, or whose `forward` was replaced (by a probe, say), keep everything.
    """
    result: Tensor = block(x, *args)
    if all(_is_ours(part) for part in block.layers()):
        free_activations_inside(result, x)
    return result


def free_activations_inside(result: Tensor, start: Tensor) -> None:
    """Free the arrays of all Tensors on the way from `start` to a result, both spared.

    Backward functions hold the arrays that they need, so gradients stay the same; the Tensors are NaN from now on, in
    their shapes and dtypes. Inputs and result of an operation whose backward function is not one of the library's are
    spared, because it may read a Tensor's `array` only when it is called.
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
            array = tensor.array
            tensor.array = array_module(array).broadcast_to(array.dtype.type(np.nan), array.shape)


def _holds_its_arrays(backward: Any) -> bool:
    module = getattr(backward, "__module__", None) or ""
    # back_fns that a user set are called by a function of the library
    return module.startswith("tricycle.") and getattr(backward, "__name__", "") != "call_back_fns"


def _is_ours(layer: Layer) -> bool:
    return type(layer).__module__.startswith("tricycle.") and "forward" not in vars(layer)
