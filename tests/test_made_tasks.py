"""Tests of the tasks that Tricycle makes: right answers, the same items each time, and detection of what they test."""

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from tiny_models import tiny_tokeniser

from tricycle.tokeniser import BPETokeniser
from tricycle_cli.made_tasks import DEPTHS, NAMES, NUMBERS, make_task

WINDOW = 1024


@pytest.fixture(scope="module")
def tokeniser():
    return tiny_tokeniser()


@pytest.mark.parametrize("name", NAMES)
def test_items_are_reproducible_and_have_different_choices(name, tokeniser):
    items, pairs = make_task(name, tokeniser, WINDOW, 40)
    assert (items, pairs) == make_task(name, tokeniser, WINDOW, 40)
    assert items != make_task(name, tokeniser, WINDOW, 40, seed=1)[0]
    assert len(items) == len(pairs) == 40
    for item, own in zip(items, pairs):
        assert len(item.choices) == len({tuple(pair.continuation) for pair in own}) == 4
        assert all(len(pair.context) + len(pair.continuation) <= WINDOW + 1 for pair in own)
    if name != "induction":  # there the first one is always right, because choices have the same form
        assert {item.answer for item in items} == {0, 1, 2, 3}


def test_arithmetic(tokeniser):
    items, pairs = make_task("arithmetic", tokeniser, WINDOW, 50)
    for item, own in zip(items, pairs):
        for line in f"{item.prompt} {item.choices[item.answer]}.".split("\n"):
            a, operation, b, equals, result = line.removesuffix(".").split()
            a, b, result = map(NUMBERS.index, (a, b, result))
            assert result == (a + b if operation == "plus" else a - b) and equals == "equals"
        assert operation == item.group
        assert tokeniser.decode(own[1].context + own[1].continuation) == f"{item.prompt} {item.choices[1]}"


def test_retrieval(tokeniser):
    items, pairs = make_task("retrieval", tokeniser, WINDOW, 10)
    for i, (item, own) in enumerate(zip(items, pairs)):
        facts = [line.removesuffix(".").split(" holds a ") for line in item.prompt.split("\n")[:-1]]
        keys = [key for key, _ in facts]
        asked = item.prompt.split("\n")[-1].removesuffix(" holds a")
        assert len(set(keys)) == len(keys) and keys.count(asked) == 1
        assert dict(facts)[asked] == item.choices[item.answer]
        assert set(item.choices) <= set(dict(facts).values())
        depth = keys.index(asked) / (len(keys) - 1)
        assert (
            depth == pytest.approx(DEPTHS[i % 5], abs=0.51 / (len(keys) - 1))
            and f"{100 * DEPTHS[i % 5]:.0f}%" in item.group
        )
        assert 0.6 * WINDOW < len(own[0].context) < WINDOW


def test_induction(tokeniser):
    _, pairs = make_task("induction", tokeniser, 64, 50)
    for own in pairs:
        context = np.array(own[0].context[1:])
        period = next(i for i in range(1, len(context)) if context[i] == context[0])
        assert period == 24 and (context[:-period] == context[period:]).all()
        assert own[0].continuation == [context[len(context) - period]]
        assert not {*context} & tokeniser.special_ids


def test_windows_that_are_too_short(tokeniser):
    own = BPETokeniser(300).train("a b c 0 1 2 true false " * 20, progress=False)
    assert make_task("induction", own, 49, 2)
    for name in NAMES:
        with pytest.raises(ValueError, match=rf"{name}: expected a window"):
            make_task(name, tokeniser, 40, 10)
