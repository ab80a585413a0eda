"""Less memory for activations: free all within a layer, and compute them again in the backward pass (gradient
checkpointing).

A model whose attribute `recompute` is the function `recompute` computes each block again.

Of a stack of layers that are computed again, only what goes from one to the next stays in memory, and the activations
of one layer at a time. It costs one more forward pass. Source: Chen et al. 2016, "Training deep nets with sublinear
memory cost".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tricycle.autograd import NeedsGrad, current_modes, grad_enabled_for
from tricycle.devices import Array
from tricycle.layers import Layer, generators_in
from tricycle.ops import as_tensor
from tricycle.tensor import Operand, Tensor, no_grad, record
from tricycle.tensor_methods import leaf_gradients


def checkpoint_activations(layer: Layer, x: Operand, *args: Any, **kwargs: Any) -> Tensor:
    """Return `layer(x, *args, **kwargs)`, and compute its activations again in the backward pass (to the same bits).

    The second time dropout draws the same masks, and layers are in the same modes; generators are restored afterwards.

    Args:
        x: the only input, with the layer's own parameters, that gets a gradient.
    """
    x = as_tensor(x)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    inputs = (x, *parameters)
    if not grad_enabled_for(*inputs):
        return layer(x, *args, **kwargs)
    saved = SavedState(layer)
    array = x.array
    with no_grad():
        result = layer(x, *args, **kwargs)

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | None]:
        again = Tensor(array, needs_grad[0], x.is_batched, x.name)
        with saved.restored(), enable_grad():
            second = layer(again, *args, **kwargs)
        return leaf_gradients(second, grad, [again, *parameters])

    return record(result.array, inputs, backward, "recompute", result.is_batched)


@contextmanager
def enable_grad() -> Iterator[None]:
    """Build graphs within this block (and this thread), whatever blocks are around it."""
    token = current_modes.set(())
    try:
        yield
    finally:
        current_modes.reset(token)


class SavedState:
    """What a layer's result depends on besides inputs and parameters: modes, precisions and the state of generators."""

    def __init__(self, layer: Layer) -> None:
        self.layers = [(part, part.training, part.precision) for part in layer.layers()]
        self.generators = [(generator, generator.bit_generator.state) for generator in generators_in(layer)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the saved state within this block, then the state before the block."""
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
