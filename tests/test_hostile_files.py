"""Damaged and hostile files of every kind that is read: each gives a model, or one clear line.

Some hundred here; `PYTHONPATH=tests python -m hostile` tries thousands and prints a table.
"""

import os
import random

import pytest

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="processes are watched as Linux has it")

from hostile import corpus  # noqa: E402
from hostile.kinds import KINDS  # noqa: E402
from hostile.mutations import FORMS, damaged  # noqa: E402

# What was found: the kind, the seed and the number of a case that was answered badly once.
FOUND = [
    ("config of a run", 0, 6),  # a line of 60,000 characters
    ("config of a run", 0, 16),  # a file of a terabyte, read at once
    ("metrics", 0, 17),  # a link in a run folder that leads out of it
    ("tokeniser", 0, 89),  # a terabyte
    ("tokeniser of others", 0, 25),  # a line of 100,000 characters
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    corpus.good_files(folder / "good")
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TRICYCLE_CACHE", "TOKENIZERS_PARALLELISM", "COLUMNS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("TRICYCLE_DATA", raising=False)


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_good_files_are_read(root, kind):
    case = corpus.tried_good(root, kind)
    assert case.kind == "model", case


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_damaged_files_give_a_model_or_one_line(root, kind):
    for case, outcome in corpus.tried(root, seed=1, n_cases=4, only=kind):
        assert outcome.good, (str(case), outcome)


@pytest.mark.parametrize(("kind", "seed", "number"), FOUND)
def test_what_was_found(root, kind, seed, number):
    for case, outcome in corpus.tried(root, seed, 1, only=kind, one=number):
        assert outcome.good, (str(case), outcome)


@pytest.mark.slow
def test_many_damaged_files(root):
    results = list(corpus.tried(root, seed=2, n_cases=40))
    assert [(str(case), outcome) for case, outcome in results if not outcome.good] == []
    assert sum(outcome.kind == "refused" for _, outcome in results) > len(results) / 3


def test_the_same_seed_gives_the_same_damage():
    content = b'{"a": [1, 2, {"b": "c"}], "d": null}'
    for name in ("x.json", "x.jsonl", "x.bin", "x.http"):
        results = [damaged(content, name, random.Random(seed)) for seed in [*range(200), *range(200)]]
        assert results[:200] == results[200:]
        assert len({result for _, result in results}) > 100
        assert {damage for damage, _ in results} >= {
            damage.__name__ for damage in FORMS[name.split(".")[1].replace("bin", "bytes")]
        }
