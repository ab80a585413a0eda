"""Circuits: prompts of tasks, and faithfulness of a number of heads, compared with a plain loop."""

from __future__ import annotations

import re

import numpy as np
import pytest
from programs import good, run_here
from tables import bad_input
from test_models import TINY, lively
from test_patching import CLEAN, CONFIGS, CORRUPTED, PROMPTS, metric
from tiny_models import write_folder

from tricycle.models import GPT
from tricycle.tensor import Tensor
from tricycle_cli.inspect import main
from tricycle_lab.circuits import TASKS, measure_faithfulness, rank_heads, task_prompts
from tricycle_lab.hooks import add_hook
from tricycle_lab.recorded_run import record_run


@pytest.mark.parametrize("name", CONFIGS)
def test_faithfulness_equals_that_of_a_loop(name) -> None:
    model = lively(CONFIGS[name]).eval()
    n_heads = model.config.n_heads
    heads = [(layer, head) for head in range(n_heads) for layer in (1, 0)]
    other = record_run(model, CORRUPTED).heads
    start, end = metric(model, CORRUPTED), metric(model, CLEAN)
    expected = []
    for count in (0, 1, 3, len(heads)):
        hooks = []
        for layer, block in enumerate(model.blocks):
            frozen = [head for head in range(n_heads) if (layer, head) not in heads[:count]]

            def change(out, *args, layer=layer, frozen=frozen):
                array = out.array.copy()
                array[:, :, frozen] = other[layer][:, :, frozen]
                return Tensor(array, requires_grad=False)

            hooks.append(add_hook(block.attention.attention, "changes", change))
        expected.append((metric(model, CLEAN) - start) / (end - start))
        for remove in hooks:
            remove()
    values = measure_faithfulness(model, PROMPTS, heads, (0, 1, 3, len(heads)))
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-3)
    assert values[-1] == pytest.approx(1, abs=1e-3) and abs(values[0] - 1) > 0.01


def test_heads_are_ranked_by_absolute_effects() -> None:
    assert rank_heads(np.array([[0.1, -3], [2, 0]])) == [(0, 1), (1, 0), (0, 0), (1, 1)]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_differ_and_have_different_answers(task) -> None:
    encode = lambda text: [hash(word) for word in re.findall(r"\w+|\W", text)] if len(text) > 8 else [hash(text)]
    pairs = task_prompts(task, encode, 5)
    assert len(pairs) == 5 and pairs == task_prompts(task, encode, 5)
    for clean, corrupted, answers in pairs:
        assert len(clean) == len(corrupted) and clean != corrupted and answers[0] != answers[1]
    assert task_prompts(task, encode, 5, seed=1) != pairs


test_invalid_arguments = bad_input(
    {
        "task": (lambda: task_prompts("sums", list), "indirect-object, greater-than, brackets, got 'sums'"),
        "tokenizer": (lambda: task_prompts("brackets", lambda text: [1, 2]), "got 0 usable pairs of 100"),
        "head": (lambda: measure_faithfulness(GPT(TINY), PROMPTS, [(0, 2)], [1]), r"2 layers with 2 each, got .*2\)"),
        "counts": (lambda: measure_faithfulness(GPT(TINY), PROMPTS, [(0, 0)], [2]), "counts from 0 to 1"),
    }
)


def test_command_prints_and_draws(tmp_path) -> None:
    pytest.importorskip("jinja2")
    words = ("circuit", write_folder(tmp_path / "a"), "--task", "brackets", "--prompts", "4", "--out", "a.png")
    out = good(run_here(main, "tricycle inspect", words, tmp_path))
    rows = out.split("\n\n")[1].splitlines()[1:-1]
    assert [int(row.split()[0]) for row in rows] == [0, 1, 2, 4, 8]
    assert float(rows[-1].split()[1]) == pytest.approx(1, abs=1e-3)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    exact = good(run_here(main, "tricycle inspect", (*words[:-2], "--exact"), tmp_path))
    assert exact.splitlines()[0] == out.splitlines()[0] and exact.splitlines()[1] != out.splitlines()[1]
