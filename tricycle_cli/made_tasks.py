"""Multiple-choice tasks that need no download: arithmetic in words, induction, and retrieval of facts.

They measure what a small model has learned besides its loss. The items depend on the seed alone, except that induction
uses tokens of the model, and that retrieval fills the context window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

import numpy as np

from tricycle.tokeniser import Tokeniser
from tricycle_cli.likelihoods import Pair
from tricycle_cli.multiple_choice import Item, encode_items

TaskName = Literal["arithmetic", "induction", "retrieval"]
NAMES: tuple[str, ...] = get_args(TaskName)
N_CHOICES = 4
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
OPERATIONS = {"plus": np.add, "minus": np.subtract}
N_EXAMPLES = 4  # before each question of arithmetic
REPEATED_TOKENS = 24  # of an induction item
SIZES = "small big old".split()
COLORS = "red green blue white black brown yellow grey pink golden".split()
CONTAINERS = "box bag cup jar house drawer chest basket bottle room case bowl".split()
THINGS = "key book shoe hat coin lamp ring stone bell knife apple egg flower letter stick ball brush card".split()
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a fact in the context; 0 for its beginning


def make_task(
    name: TaskName, tokeniser: Tokeniser, window: int, n_items: int = 200, seed: int = 0
) -> tuple[list[Item], list[list[Pair]]]:
    """Return a task's items, and per item the ids of its prompt with each choice; ValueError if `window` is too short.

    Args:
        window: the maximum number of tokens of a prompt and a choice.

    Raises:
        ValueError: the window is too short for the task.
    """
    generator = np.random.default_rng([seed, NAMES.index(name)])
    if name == "induction":
        if window <= 2 * REPEATED_TOKENS:
            raise ValueError(f"induction: expected a window above {2 * REPEATED_TOKENS} tokens, got {window}")
        pairs = list(_induction_pairs(tokeniser, n_items, generator))
        choices = [[tokeniser.decode(pair.continuation) for pair in own] for own in pairs]
        return [Item(tokeniser.decode(own[0].context), texts, 0) for own, texts in zip(pairs, choices)], pairs
    if name == "arithmetic":
        items = list(_arithmetic_items(n_items, generator))
    else:
        items = list(_retrieval_items(tokeniser, window, n_items, generator))
    pairs = encode_items(tokeniser, items)
    longest = max(len(pair.context) + len(pair.continuation) for own in pairs for pair in own)
    if longest > window + 1:  # the last token is only predicted
        raise ValueError(f"{name}: expected a window of at least {longest - 1} tokens, got {window}")
    return items, pairs


def _arithmetic_items(n_items: int, generator: np.random.Generator) -> Iterator[Item]:
    """Yield questions such as "two plus three equals", each after N_EXAMPLES solved ones; results are 0 to 20."""
    for i in range(n_items):
        operation = list(OPERATIONS)[i % len(OPERATIONS)]
        facts = [_sum(operation, generator) for _ in range(N_EXAMPLES + 1)]
        *examples, (question, result) = facts
        prompt = "".join(f"{text} {NUMBERS[value]}.\n" for text, value in examples) + question
        near = [value for value in range(len(NUMBERS)) if value != result and abs(value - result) <= N_CHOICES]
        values = [result, *generator.choice(near, N_CHOICES - 1, replace=False)]
        yield _shuffled(Item(prompt, [NUMBERS[value] for value in values], 0, operation), generator)


def _sum(operation: str, generator: np.random.Generator) -> tuple[str, int]:
    """Return a question on two numbers from 0 to 10, such as "two plus one equals", larger first, and its result."""
    a, b = sorted(generator.integers(0, 11, 2), reverse=True)
    return f"{NUMBERS[a]} {operation} {NUMBERS[b]} equals", int(OPERATIONS[operation](a, b))


def _induction_pairs(tokeniser: Tokeniser, n_items: int, generator: np.random.Generator) -> Iterator[list[Pair]]:
    """Yield a sequence of random tokens and its beginning once more; the first choice is the token that follows.

    Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
    """
    special = {tokeniser.end_of_text, *getattr(tokeniser, "special_ids", ())}
    ordinary = np.array([token for token in range(tokeniser.n_vocab) if token not in special])
    for _ in range(n_items):
        ids = generator.choice(ordinary, REPEATED_TOKENS, replace=False).tolist()
        n_seen = int(generator.integers(REPEATED_TOKENS // 2, REPEATED_TOKENS))
        wrong = generator.choice([i for i in range(REPEATED_TOKENS) if i != n_seen], N_CHOICES - 1, replace=False)
        context = [tokeniser.new_text, *ids, *ids[:n_seen]]
        yield [Pair(context, [ids[i]]) for i in (n_seen, *wrong)]


def _retrieval_items(tokeniser: Tokeniser, window: int, n_items: int, generator: np.random.Generator) -> Iterator[Item]:
    """Yield items: facts such as "The big red box holds a key.", then one's beginning; the choices are things."""
    keys = [" ".join(words) for words in product(SIZES, COLORS, CONTAINERS)]
    sample = "".join(f"The {key} holds a {thing}.\n" for key, thing in zip(keys[::7], THINGS))
    n_facts = int(0.8 * window / (len(tokeniser.encode_plain(sample)) / len(THINGS))) - 1
    n_facts = min(len(keys), max(N_CHOICES, n_facts))
    for i in range(n_items):
        chosen = generator.permutation(len(keys))[:n_facts]
        things = [THINGS[j % len(THINGS)] for j in range(n_facts)]
        generator.shuffle(things)
        place = round(DEPTHS[i % len(DEPTHS)] * (n_facts - 1))
        facts = [f"The {keys[key]} holds a" for key in chosen]
        prompt = "".join(f"{fact} {thing}.\n" for fact, thing in zip(facts, things)) + facts[place]
        others = sorted(set(things) - {things[place]})
        wrong = generator.choice(others, N_CHOICES - 1, replace=False).tolist()
        depth = f"depth {100 * DEPTHS[i % len(DEPTHS)]:.0f}%"
        yield _shuffled(Item(prompt, [things[place], *wrong], 0, depth), generator)


def _shuffled(item: Item, generator: np.random.Generator) -> Item:
    """Return an item whose first choice is right with its choices in random order."""
    order = generator.permutation(len(item.choices)).tolist()
    return replace(item, choices=[item.choices[i] for i in order], answer=order.index(0))
