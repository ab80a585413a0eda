"""Gradient checkpointing: recompute the activations of a layer in the backward pass to save memory.

A model whose attribute `recompute` is `checkpoint_activations` recomputes each of its blocks. Only the inputs of the
blocks, and the activations of one block at a time, are stored, at the cost of one more forward pass.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import numpy as np

from tricycle.autograd import NeedsGrad, current_modes, grad_enabled_for
from tricycle.create_graph import unfused
from tricycle.devices import Array
from tricycle.layers import Layer, generators_in
from tricycle.ops import as_tensor
from tricycle.tensor import Operand, Tensor, no_grad, record
from tricycle.tensor_methods import leaf_gradients


def checkpoint_activations(layer: Layer, x: Operand, *args: Any, **kwargs: Any) -> Tensor:
    """Return `layer(x, *args, **kwargs)` without storing its activations; recompute them in the backward pass.

    The recomputation gives the same bits: it draws the same dropout masks, in the same modes of the layers.

    Args:
        x: the only input, besides the layer's parameters, that gets a gradient.
    """
    x = as_tensor(x)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    inputs = (x, *parameters)
    if not grad_enabled_for(*inputs):
        return layer(x, *args, **kwargs)
    saved = SavedState(layer)
    array, context = x.array, copy_context()  # such as the router statistics of `tricycle.experts`
    with no_grad():
        result = layer(x, *args, **kwargs)

    def recompute(again: Tensor) -> Tensor:
        with enable_grad():
            result: Tensor = layer(again, *args, **kwargs)
        return result

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | None]:
        again = Tensor(array, needs_grad[0], x.is_batched, x.name)
        with saved.restored():
            second = context.run(recompute, again)
        return leaf_gradients(second, grad, [again, *parameters])

    return record(result.array, inputs, backward, "recompute", result.is_batched)


@unfused("tricycle.activation_checkpointing.checkpoint_activations", closure=True)
def _recompute(node: Tensor, variables: Any) -> Tensor:
    with variables.saved.restored():
        result: Tensor = variables.context.run(variables.recompute, node.args[0])
    return result


@contextmanager
def enable_grad() -> Iterator[None]:
    """Enable graph building, and end `evaluation`, in this thread within a `with` block, regardless of outer blocks."""
    token = current_modes.set(())
    try:
        yield
    finally:
        current_modes.reset(token)


class SavedState:
    """The modes, precisions and random generator states of a layer and all layers inside it."""

    def __init__(self, layer: Layer) -> None:
        self.layers = [(part, part.training, part.precision) for part in layer.layers()]
        self.generators = [(generator, generator.bit_generator.state) for generator in generators_in(layer)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the saved modes, precisions and generator states in a `with` block; set the previous ones after it."""
        now = [(part, part.training, part.precision) for part, _, _ in self.layers]
        states = [(generator, generator.bit_generator.state) for generator, _ in self.generators]
        _set(self.layers, self.generators)
        try:
            yield
        finally:
            _set(now, states)


def _set(layers: list[tuple[Layer, bool, str]], generators: list[tuple[np.random.Generator, Any]]) -> None:
    for layer, training, precision in layers:
        layer.training = training
        layer.precision = precision
    for generator, state in generators:
        generator.bit_generator.state = state
