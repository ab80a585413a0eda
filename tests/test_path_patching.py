"""Path patching equals a plain loop over heads, and its paths add up where a model is linear in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tables import bad_input
from test_models import TINY, lively
from test_patching import CLEAN, CONFIGS, CORRUPTED, PROMPTS, metric

from tricycle.models import GPT
from tricycle.tensor import Tensor, no_grad
from tricycle_lab.hooks import add_hook
from tricycle_lab.patching import patch_activations
from tricycle_lab.path_patching import INPUTS, patch_paths


def record(model: GPT, tokens: list[int], changes: dict[int, np.ndarray] | None = None) -> tuple[list, list]:
    """Return the arguments and results of the attention op of each block, some of whose results are replaced."""
    calls, hooks = [], []
    for i, block in enumerate(model.blocks):
        op = block.attention.attention
        if i in (changes or {}):
            hooks.append(add_hook(op, "changes", lambda out, *args, i=i: Tensor(changes[i], requires_grad=False)))
        hooks.append(add_hook(op, "observers", lambda _, out, *args: calls.append((args, out.array.copy()))))
    value = metric(model, tokens)
    for remove in hooks:
        remove()
    return calls, value


def patch_one(model: GPT, layer: int, head: int, receiver: tuple[int, int] | None, inputs=INPUTS) -> float:
    """Patch the paths of one head: freeze all later heads, then run once more with the receiver's new result."""
    clean, end = record(model, CLEAN)
    corrupted, start = record(model, CORRUPTED)
    frozen = {i: out.copy() for i, (_, out) in enumerate(corrupted)}
    frozen[layer][:, :, head] = clean[layer][1][:, :, head]
    if receiver is None:
        frozen = {i: out for i, out in frozen.items() if i >= layer}
        return (record(model, CORRUPTED, frozen)[1] - start) / (end - start)
    row, column = receiver
    del frozen[row]
    new = record(model, CORRUPTED, {i: out for i, out in frozen.items() if i < row})[0]
    chosen = [(new if name in inputs else corrupted)[row][0][i] for i, name in enumerate(INPUTS)]
    with no_grad():
        out = model.blocks[row].attention.attention(*chosen, *new[row][0][3:]).array
    results = corrupted[row][1].copy()
    results[:, :, column] = out[:, :, column]
    return (record(model, CORRUPTED, {row: results})[1] - start) / (end - start)


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_paths_equal_those_of_a_loop(name: str) -> None:
    model = lively(replace(CONFIGS[name], n_layers=3)).eval()
    heads = range(model.config.n_heads)
    expected = [[patch_one(model, i, h, None) for h in heads] for i in range(3)]
    np.testing.assert_allclose(patch_paths(model, PROMPTS, batch_size=4), expected, rtol=1e-3, atol=1e-3)
    for inputs in (INPUTS, ("key",)):
        effects = patch_paths(model, PROMPTS, (2, 1), inputs)
        expected = [[patch_one(model, i, h, (2, 1), inputs) for h in heads] for i in range(2)]
        np.testing.assert_allclose(effects[:2], expected, rtol=1e-3, atol=1e-3)
        assert np.ptp(effects[:2]) > 1e-3 and not effects[2].any()


def test_heads_of_the_last_layer_have_direct_paths_only() -> None:
    model = lively(TINY).eval()
    direct, total = patch_paths(model, PROMPTS), patch_activations(model, PROMPTS, "heads")
    np.testing.assert_allclose(direct[-1], total[-1], rtol=1e-4, atol=1e-5)
    assert abs(direct[0] - total[0]).max() > 0.01  # through heads of the last layer


MODEL = GPT(TINY)
test_invalid_arguments = bad_input(
    {
        "layer": (lambda: patch_paths(MODEL, PROMPTS, (2, 0)), "layer from 0 to 1.*head from 0 to 1"),
        "head": (lambda: patch_paths(MODEL, PROMPTS, (1, -1)), "head from 0 to 1"),
        "inputs": (lambda: patch_paths(MODEL, PROMPTS, (1, 0), ("queries",)), "query, key, value, got"),
        "no inputs": (lambda: patch_paths(MODEL, PROMPTS, (1, 0), ()), "query, key, value"),
        "batch": (lambda: patch_paths(MODEL, PROMPTS, batch_size=0), "batch_size"),
    }
)
