"""Gradient checkpointing: recompute the activations of a layer in the backward pass to save memory.

A model whose attribute `recompute` is `checkpoint_activations` recomputes each of its blocks. Only the inputs of the
blocks, and the activations of one block at a time, are stored, at the cost of one more forward pass.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import numpy as np

from tricycle.autograd import NeedsGrad, current_modes, grad_enabled_for
from tricycle.create_graph import gradients, rule, unfused
from tricycle.devices import Array
from tricycle.extra_ops import concatenate, split_sizes
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
    """Recompute the layer's result by operations on Tensors, with the saved modes and generator states."""
    with variables.saved.restored():
        result: Tensor = variables.context.run(variables.recompute, node.args[0])
    return result


def recompute_derivatives(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Return `function(*args)`, and store no graph: derivatives of all orders recompute it.

    Args:
        function: a function of Tensors which uses no other Tensors that require a gradient.
    """
    result = _call_with_graph(function, args, [x.requires_grad for x in args])[0]
    return record(result.array, args, _recomputed_gradients, result.name, None, (function, args))


def _call_with_graph(
    function: Callable[..., Tensor], args: Sequence[Tensor], needs_grad: NeedsGrad
) -> tuple[Tensor, list[Tensor]]:
    """Call a function on new leaf Tensors with the arrays of `args`, recording a graph; return (result, leaves)."""
    inputs = [Tensor(x.array, needs, x.is_batched) for x, needs in zip(args, needs_grad)]
    with enable_grad():
        return function(*inputs), inputs


def _recomputed_gradients(grad: Array, needs_grad: NeedsGrad, function: Any, args: Sequence[Tensor]) -> Sequence[Any]:
    """Call `function` again with a graph; return the gradient of each arg for `grad`, None where none is needed."""
    result, inputs = _call_with_graph(function, args, needs_grad)
    return leaf_gradients(result, grad, inputs)


@rule("tricycle.activation_checkpointing._recomputed_gradients")
def _gradients_in_one_vector(node: Tensor, grad: Tensor, variables: Any) -> list[Tensor | None]:
    """Compute gradients of all args that need one (None for others) as one function that recomputes its derivatives."""
    function, places = node._saved[0], [i for i, x in enumerate(node.args) if x.requires_grad]

    def pull_back(*args: Tensor) -> Tensor:
        inputs = [args[i] for i in places]
        grads = gradients([function(*args[:-1])], [args[-1]], inputs)
        zeros = (Tensor(x.xp.zeros_like(x.array), False) for x in inputs)
        return concatenate([(zero if g is None else g).reshape(zero.size) for zero, g in zip(zeros, grads)])

    sizes = [node.args[i].size for i in places]
    parts = split_sizes(recompute_derivatives(pull_back, *node.args, grad), sizes)
    found = {i: part.reshape(node.args[i].shape) for i, part in zip(places, parts)}
    return [found.get(i) for i in range(len(node.args))]


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
        # what `train` and `eval` have set: `part.training` is False within `evaluation`, whatever they have set
        now = [(part, vars(part).get("training", True), part.precision) for part, _, _ in self.layers]
        states = [(generator, generator.bit_generator.state) for generator, _ in self.generators]
        _set(self.layers, self.generators)
        try:
            yield
        finally:
            _set(now, states)


def _set(layers: list[tuple[Layer, bool, str]], generators: list[tuple[np.random.Generator, Any]]) -> None:
    """Set the mode and precision of each layer, and the state of each random generator."""
    for layer, training, precision in layers:
        layer.training = training
        layer.precision = precision
    for generator, state in generators:
        generator.bit_generator.state = state
