"""Circuits of small tasks: which heads are enough for an answer, and how faithful a smaller number of them is.

Sources: Wang et al. 2022, "Interpretability in the Wild" (indirect objects, faithfulness); Hanna et al. 2023, "How does
GPT-2 compute greater-than?".

Shapes: B batch, T tokens, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tricycle.devices import array_module
from tricycle.models import GPT
from tricycle.tensor import Tensor
from tricycle_lab.patching import PromptRuns, Prompts, estimate_patches, patch_activations
from tricycle_lab.recorded_run import run_block

NAMES = "Mary John Tom Anna James Lisa Alice Robert Sarah Paul Peter Emma".split()
PLACES = ("store", "park", "school", "office")
TaskTexts = tuple[str, str, str, str]  # the clean and the corrupted prompt, and the answer of each


def _indirect_object(generator: np.random.Generator) -> TaskTexts:
    """Return (clean prompt, corrupted prompt, answer, other answer): which of two named people gets a drink."""
    first, second = (str(name) for name in generator.choice(NAMES, 2, replace=False))
    text = f"When {first} and {second} went to the {generator.choice(PLACES)}, {{}} gave a drink to"
    return text.format(second), text.format(first), f" {first}", f" {second}"


def _greater_than(generator: np.random.Generator) -> TaskTexts:
    """Return (clean, corrupted, answer, other): prompts that end before a later decade; needs one-digit tokens."""
    century, late, early = generator.integers(11, 20), generator.integers(6, 9), generator.integers(1, 4)
    text = f"The war lasted from the year {century}{{}}5 to the year {century}"
    return text.format(late), text.format(early), "9", str(early + 1)


def _brackets(generator: np.random.Generator) -> TaskTexts:
    """Return (clean, corrupted, answer, other): lists to close with a bracket of the kind that opened them."""
    items = ", ".join(str(item) for item in generator.integers(1, 10, 4))
    name = generator.choice(list("abxyz"))
    return f"{name} = [{items}", f"{name} = ({items}", "]", ")"


TASKS: dict[str, Callable[[np.random.Generator], TaskTexts]] = {
    "indirect-object": _indirect_object,
    "greater-than": _greater_than,
    "brackets": _brackets,
}


def task_prompts(
    task: str, encode: Callable[[str], list[int]], n: int = 10, seed: int = 0, start: int | None = None
) -> list[Prompts]:
    """Return n pairs of prompts of a task in TASKS as tokens; ValueError if unknown, or the tokenizer splits answers.

    Args:
        encode: a function from a text to tokens, without special tokens.
        n: the number of pairs.
        seed: of the names and numbers in the prompts.
        start: the id of a token in front of each prompt, such as the start-of-text token.

    Raises:
        ValueError: an unknown task, or a tokenizer that splits most answers, or both prompts, differently.
    """
    if task not in TASKS:
        raise ValueError(f"task_prompts: expected a task, one of {', '.join(TASKS)}, got {task!r}")
    generator = np.random.default_rng(seed)
    pairs: list[Prompts] = []
    for _ in range(10 * n):
        clean, corrupted, *answers = TASKS[task](generator)
        ids = [encode(answer) for answer in answers]
        first, second = ([*([] if start is None else [start]), *encode(text)] for text in (clean, corrupted))
        if len(first) == len(second) and all(len(tokens) == 1 for tokens in ids) and ids[0] != ids[1]:
            pairs.append(Prompts(first, second, (ids[0][0], ids[1][0])))
        if len(pairs) == n:
            return pairs
    expected = "a tokenizer with one token for each answer, and as many for both prompts"
    raise ValueError(f"task_prompts: {task}: expected {expected}, got {len(pairs)} usable pairs of {10 * n}")


def measure_faithfulness(
    model: GPT, prompts: Prompts, heads: Sequence[tuple[int, int]], counts: Sequence[int]
) -> np.ndarray:
    """Return for each count n the metric, scaled (0 corrupted, 1 clean), with all heads but the first n corrupted.

    All other heads keep their results of the corrupted prompt; MLPs follow. The metric is 0 for the corrupted and 1 for
    the clean prompt, as in `patch_activations`. It is not 0 without heads if MLPs alone can tell the prompts apart.

    Args:
        heads: (layer, head), the most important first.
        counts: of heads that work.

    Raises:
        ValueError: counts or heads out of range, or as of `patch_activations`.
    """
    runs = PromptRuns("measure_faithfulness", model, prompts)
    sizes = len(model.blocks), model.config.n_heads
    if not all(0 <= layer < sizes[0] and 0 <= head < sizes[1] for layer, head in heads):
        raise ValueError(f"measure_faithfulness: expected heads of {sizes[0]} layers with {sizes[1]} each, got {heads}")
    if not all(0 <= count <= len(heads) for count in counts):
        raise ValueError(f"measure_faithfulness: expected counts from 0 to {len(heads)}, got {counts}")
    works = np.zeros((len(model.blocks), len(counts), 1, model.config.n_heads, 1), bool)
    for run, count in enumerate(counts):
        for layer, head in heads[:count]:
            works[layer, run, 0, head] = True
    x = runs.clean.stream[0][:, runs.start :].repeat(len(counts), axis=0)
    with model.evaluating():
        for layer, block in enumerate(model.blocks):
            corrupted = runs.corrupted.heads[layer][:, runs.start :]
            mask = array_module(x).asarray(works[layer])
            change = lambda out, mask=mask, other=corrupted: Tensor(out.xp.where(mask, out.array, other), False)
            x = run_block(model, layer, x, runs.clean, [(block.attention.attention, change)])
    return runs.effects(x)


def mean_head_effects(model: GPT, pairs: Sequence[Prompts], exact: bool = False) -> np.ndarray:
    """Return the mean effect (L, H) of each head over pairs of prompts, by gradients, or by exact activation patching.

    Raises:
        ValueError: as of `patch_activations`.
    """
    if exact:
        return np.mean([patch_activations(model, pair, "heads") for pair in pairs], axis=0)
    return np.mean([estimate_patches(model, pair)["heads"] for pair in pairs], axis=0)


def rank_heads(effects: np.ndarray) -> list[tuple[int, int]]:
    """Return all (layer, head) of effects (L, H), the largest absolute value first."""
    order = np.argsort(-np.abs(effects), axis=None, kind="stable")
    return [(int(i) // effects.shape[1], int(i) % effects.shape[1]) for i in order]
