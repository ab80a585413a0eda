"""Recorded forward passes of a decoder, from whose activations later blocks and later tokens can be computed again.

A run that changes one block needs no earlier block, and no token before the first changed one: their residual stream,
keys and values are equal to those of the recorded run.

Shapes: B batch, T tokens, C channels, H heads, K key heads, D head size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from tricycle.attention import KeyValueCache
from tricycle.blocks import MultiHeadSelfAttention
from tricycle.devices import Array
from tricycle.models import GPT
from tricycle.tensor import Tensor
from tricycle_lab.hooks import add_hook

Change = Callable[[Tensor], Any]  # maps the result of a layer or op to another one


class Recording(NamedTuple):
    """The activations of one text, a list with an array for each block.

    Attributes:
        stream: the residual stream before each block and after the last one, (1, T, C); one more than blocks.
        keys, values: the inputs of the attention op, with RoPE, (1, T, K, D).
        heads: the results of the attention heads, before the output projection, (1, T, H, D).
        attention, mlp: the results of the attention layers and MLPs, (1, T, C).
    """

    stream: list[Array]
    keys: list[Array]
    values: list[Array]
    heads: list[Array]
    attention: list[Array]
    mlp: list[Array]


def record_run(model: GPT, tokens: Sequence[int]) -> Recording:
    """Run a model on a text in evaluation mode, and return its activations by layer as a Recording."""
    recording = Recording([], [], [], [], [], [])

    def record_heads(op: Any, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> None:
        for arrays, x in ((recording.heads, out), (recording.keys, key), (recording.values, value)):
            arrays.append(x.array)

    with ExitStack() as hooks:
        hooks.enter_context(model.evaluating())
        for block in model.blocks:
            # called after the block, which keeps the order of the blocks
            hooks.callback(add_hook(block, "observers", lambda _, out, x, *args: recording.stream.append(x.array)))
            hooks.callback(add_hook(block.attention.attention, "observers", record_heads))
            for layer, arrays in ((block.attention, recording.attention), (block.mlp, recording.mlp)):
                store = lambda _, out, *args, arrays=arrays, **options: arrays.append(out.array)
                hooks.callback(add_hook(layer, "observers", store))
        recording.stream.append(model.hidden_states(model.place(np.array([tokens]))).array)
    return recording


def reuses_keys(block: Any) -> bool:
    """Return whether tokens of a block depend on earlier ones by keys and values alone: no shift, state or latents."""
    attention: Any = getattr(block, "attention", None)
    caches_keys = isinstance(attention, MultiHeadSelfAttention) and not getattr(attention, "caches_latents", False)
    return caches_keys and not attention.uses_shift


def run_block(
    model: GPT, layer: int, x: Array, earlier: Recording, changes: Sequence[tuple[Any, Change]] = ()
) -> Array:
    """Return the result (B, n, C) of a block for the last n tokens of a text; they attend to the `earlier` run's keys.

    Args:
        layer: the index of the block.
        x: the input of the block, (B, n, C).
        earlier: a run with the same earlier tokens, whose keys and values the n tokens attend to.
        changes: pairs of a layer or op of the block, and a function that returns another result for it.
    """
    n_tokens = earlier.stream[0].shape[1]
    n_earlier = n_tokens - x.shape[1]
    run: Any = operator.call  # without a cache if there are no earlier tokens
    if n_earlier:
        cache = KeyValueCache(n_tokens)
        shared = (earlier.keys[layer][:, :n_earlier], earlier.values[layer][:, :n_earlier])
        cache.append(*(array.repeat(len(x), axis=0) for array in shared))
        run = cache.call
    with ExitStack() as hooks:
        for target, change in changes:
            hooks.callback(add_hook(target, "changes", lambda out, *args, change=change: change(out)))
        result: Array = run(model.blocks[layer], Tensor(x, requires_grad=False), None).array
    return result


def run_blocks(model: GPT, layer: int, x: Array, earlier: Recording) -> Array:
    """Return the residual stream (B, n, C) after the last block, for inputs x (B, n, C) of block `layer`."""
    for i in range(layer, len(model.blocks)):
        x = run_block(model, i, x, earlier)
    return x
