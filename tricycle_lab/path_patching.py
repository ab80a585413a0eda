"""Path patching: the effect of an attention head on the logits, or on one later head, along the direct paths alone.

A direct path leads from the head through the residual stream, MLPs and norms, but not through other attention heads,
which keep their results of the corrupted run.

Source: Wang et al. 2022, "Interpretability in the Wild", section 3.1 (there from the corrupted to the clean run).

Shapes: B batch, T tokens, C channels, L layers, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.models import GPT
from tricycle.ops import check_positive
from tricycle.tensor import Tensor
from tricycle_lab.hooks import add_hook
from tricycle_lab.patching import PromptRuns, Prompts
from tricycle_lab.recorded_run import run_block, run_blocks

INPUTS = ("query", "key", "value")  # of a head, in the order of the arguments of the attention op


def patch_paths(
    model: GPT,
    prompts: Prompts,
    receiver: tuple[int, int] | None = None,
    inputs: Sequence[str] = INPUTS,
    batch_size: int = 64,
) -> np.ndarray:
    """Return the effect (L, H) of each head's clean result in the corrupted run, along direct paths to a receiver.

    The effect is scaled as in `patch_activations`. Heads that are not in front of the receiver have the effect 0.

    Args:
        receiver: the (layer, head) that the paths lead to; all later parts follow its changed result. None for direct
            paths to the logits.
        inputs: of the receiver, that the paths lead to: some of "query", "key" and "value".
        batch_size: the number of patched runs in one forward pass.

    Raises:
        ValueError: a layer, head or input that does not exist, or as of `patch_activations`.
    """
    check_positive("patch_paths", batch_size=batch_size)
    runs = PromptRuns("patch_paths", model, prompts)
    n_layers, n_heads = len(model.blocks), model.config.n_heads
    _check_receiver(receiver, inputs, n_layers, n_heads)
    last = n_layers if receiver is None else receiver[0]
    effects = np.zeros((n_layers, n_heads))
    with model.evaluating():
        for layer in range(last):
            for first in range(0, n_heads, batch_size):
                heads = list(range(first, min(first + batch_size, n_heads)))
                x = _run_direct(runs, layer, heads, last)
                x = x if receiver is None else _run_receiver(runs, receiver, inputs, x)
                effects[layer, heads] = runs.effects(x)
    return effects


def _check_receiver(receiver: tuple[int, int] | None, inputs: Sequence[str], n_layers: int, n_heads: int) -> None:
    """Raise ValueError for inputs that are not in INPUTS, or a receiver (layer, head) that the model does not have."""
    if not inputs or any(name not in INPUTS for name in inputs):
        raise ValueError(f"patch_paths: expected inputs of {', '.join(INPUTS)}, got {inputs!r}")
    if receiver is not None and not (0 <= receiver[0] < n_layers and 0 <= receiver[1] < n_heads):
        expected = f"a layer from 0 to {n_layers - 1} and a head from 0 to {n_heads - 1}"
        raise ValueError(f"patch_paths: expected a receiver with {expected}, got {receiver}")


def _run_direct(runs: PromptRuns, layer: int, heads: Sequence[int], last: int) -> Array:
    """Return the inputs (B, n, C) of block `last` of corrupted runs, each with a clean head, in which no head follows.

    Args:
        heads: of `layer`, whose clean result replaces the corrupted one in one run each.
        last: the index of a later block, or the number of blocks.
    """
    x = runs.corrupted.stream[layer][:, runs.start :].repeat(len(heads), axis=0)
    for i in range(layer, last):
        results = runs.corrupted.heads[i][:, runs.start :].repeat(len(heads), axis=0)
        if i == layer:
            for run, head in enumerate(heads):
                results[run, :, head] = runs.clean.heads[layer][0, runs.start :, head]
        x = _run_with_heads(runs, i, x, results)
    return x


def _run_with_heads(runs: PromptRuns, layer: int, x: Array, results: Array) -> Array:
    """Return the result (B, n, C) of a block for inputs x, with the given results of its heads, (B, n, H, D)."""
    change = lambda out: Tensor(results, requires_grad=False)
    return run_block(runs.model, layer, x, runs.corrupted, [(runs.model.blocks[layer].attention.attention, change)])


def _run_receiver(runs: PromptRuns, receiver: tuple[int, int], inputs: Sequence[str], x: Array) -> Array:
    """Return the last residual streams (B, n, C) of corrupted runs whose receiver reads the inputs x of its block."""
    layer, head = receiver
    op = runs.model.blocks[layer].attention.attention
    corrupted = runs.corrupted.stream[layer][:, runs.start :].repeat(len(x), axis=0)
    arguments: list[tuple[Any, ...]] = []
    for stream in (corrupted, x):
        remove = add_hook(op, "observers", lambda _, out, *args: arguments.append(args))
        run_block(runs.model, layer, stream, runs.corrupted)
        remove()
    mixed = [arguments[name in inputs][i] for i, name in enumerate(INPUTS)]
    results = runs.corrupted.heads[layer][:, runs.start :].repeat(len(x), axis=0)
    results[:, :, head] = op(*mixed, *arguments[0][len(INPUTS) :]).array[:, :, head]
    return run_blocks(runs.model, layer + 1, _run_with_heads(runs, layer, corrupted, results), runs.corrupted)
