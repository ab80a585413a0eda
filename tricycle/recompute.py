"""Layers that forget what they computed: what no gradient needs, or all of it, to compute it again when the backward
pass comes to them.

Of a stack of layers that compute again only what goes from one to the next stays in memory, and the insides of one
layer at a time. It costs one more forward pass. Source: Chen et al. 2016, "Training deep nets with sublinear memory
cost".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.layers import Layer, generators_in
from tricycle.ops import Wanted, as_tensor
from tricycle.tensor import Operand, Tensor, forget_inside, gradients_of, no_grad, record, remembering, remembers


def lean(layer: Layer, x: Operand, *args: Any, **kwargs: Any) -> Tensor:
    """`layer(x, *args, **kwargs)`, of whose insides, in a block of `forgetting`, only what gradients need is kept.

    Layers of others, and such as somebody looks into, keep everything.
    """
    x = as_tensor(x)
    result: Tensor = layer(x, *args, **kwargs)
    if all(_is_ours(part) for part in layer.layers()):
        forget_inside(result, x)
    return result


def _is_ours(layer: Layer) -> bool:
    return type(layer).__module__.startswith("tricycle.") and "forward" not in vars(layer)


def recompute(layer: Layer, x: Operand, *args: Any, **kwargs: Any) -> Tensor:
    """`layer(x, *args, **kwargs)`, computed inside once more for its gradients, which are the same bit by bit.

    The second time dropout draws the same masks, and the layers are in training or not as they were; generators stand
    afterwards where they stood before.

    Args:
        x: the only input, with the layer's own parameters, that gets a gradient.
    """
    x = as_tensor(x)
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    inputs = (x, *parameters)
    if not remembers(*inputs):
        return layer(x, *args, **kwargs)
    situation = Situation(layer)
    array = x.array
    with no_grad():
        result = layer(x, *args, **kwargs)

    def backward(grad: Array, wanted: Wanted) -> list[Array | None]:
        again = Tensor(array, wanted[0], x.is_batched, x.name)
        with situation.again(), remembering():
            second = layer(again, *args, **kwargs)
        return gradients_of(second, grad, [again, *parameters])

    return record(result.array, inputs, backward, "recompute", result.is_batched)


class Situation:
    """What a layer's result depends on beside its inputs and parameters, as it is now."""

    def __init__(self, layer: Layer) -> None:
        self.layers = [(part, part.training, part.precision) for part in layer.layers()]
        self.generators = [(generator, generator.bit_generator.state) for generator in generators_in(layer)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within this block everything is as it was; then as it is before the block."""
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
