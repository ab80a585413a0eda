"""Damaged and hostile files of all kinds: each is loaded, or rejected with a one-line error.

`PYTHONPATH=tests python -m hostile` runs thousands of cases and prints a table.
"""

import json
import os
import random

import pytest

pytest.importorskip("tokenizers")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"),
]

from hostile import corpus  # noqa: E402
from hostile.kinds import KINDS  # noqa: E402
from hostile.mutations import MUTATIONS_BY_FORMAT, mutate  # noqa: E402

HTTP = "HTTP/1.1 200 OK"
# Earlier failures: the kind of file, the file, and its replacement.
REGRESSIONS = {
    "a line of 100,000 characters": ("config of a run", "data.json", '{"data": "' + "x" * 100_000 + '", "files": []}'),
    "thousands of unknown fields": ("config of a run", "config.json", json.dumps(dict(enumerate(range(20_000))))),
    "a terabyte as a config": ("config of a run", "data.json", lambda path: path.open("wb").truncate(2**40)),
    "a terabyte as a tokeniser": ("tokeniser", "tokeniser.json", lambda path: path.open("wb").truncate(2**40)),
    "samples that are elsewhere": ("metrics", "samples.txt", lambda path: path.symlink_to("../victim")),
    "samples that are a pipe": ("metrics", "samples.txt", os.mkfifo),
    "a lock that is elsewhere": ("metrics", ".lock", lambda path: path.symlink_to("../victim")),
    "a lock that is a pipe": ("metrics", ".lock", os.mkfifo),
    "a metric that is a text": ("metrics", "metrics.jsonl", '{"step": 1, "loss": "low"}\n'),
    "a metric that nests deeply": ("metrics", "metrics.jsonl", '{"step": ' + "[" * 100_000),
    "a number among files": ("config of a run", "data.json", '{"data": "text", "files": [1]}'),
    "a list as the name of the data": ("config of a run", "data.json", '{"data": [], "files": []}'),
    "a config that nests deeply": ("config of a run", "config.json", "[" * 100_000),
    "millions of lists": ("config of others", "config.json", "[" + "[]," * 2_000_000 + "[]]"),
    "millions of lists in a header": (
        "safetensors",
        "model.safetensors",
        lambda path: path.write_bytes((8_000_003).to_bytes(8, "little") + b"[" + b"[]," * 2_666_667 + b"]]"),
    ),
    "characters that a terminal obeys": ("config of a run", "config.json", '{"\\u001b[2J\\u0007": 1}'),
    "a text that is a pipe": ("texts to evaluate", "texts/a.txt", os.mkfifo),
    "a text without end": ("texts to evaluate", "texts/a.txt", lambda path: path.symlink_to("/dev/zero")),
    "cached tokens without end": ("cache of texts", "validation.npy", lambda path: path.symlink_to("/dev/zero")),
    "a terabyte of cached text": ("cache of texts", "validation.bin", lambda path: path.open("wb").truncate(2**40)),
    "cached hashes that are a pipe": ("cache of texts", "hashes.json", os.mkfifo),
    "an answer without end": ("downloads", "response.http", "HTTP/1.1 200 Fine\r\n\r\n"),
    "a length of 5,000 digits": ("downloads", "response.http", f"{HTTP}\r\nContent-Length: {'9' * 5000}\r\n\r\n"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    corpus.write_valid_files(folder / "good")
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TRICYCLE_CACHE", "TOKENIZERS_PARALLELISM", "COLUMNS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("TRICYCLE_DATA", raising=False)


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_valid_files_load(root, kind):
    outcome = corpus.run_with_damage(root, kind)
    assert outcome.kind == "model", outcome


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_damaged_files_give_a_model_or_a_one_line_error(root, kind):
    for case, outcome in corpus.run_cases(root, seed=1, n_cases=3, only=kind):
        assert outcome.is_acceptable, (str(case), outcome)


@pytest.mark.parametrize("title", REGRESSIONS)
def test_previously_mishandled_files_give_an_acceptable_outcome(root, title):
    name, target, content = REGRESSIONS[title]
    victim = root / "victim"
    victim.write_text("mine\n", encoding="utf-8")

    def damage(path):
        path.unlink()
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="")
        else:
            content(path)

    outcome = corpus.run_with_damage(root, name, lambda folder: damage(folder / target))
    assert outcome.is_acceptable, outcome
    assert outcome.message.isprintable()
    assert victim.read_text(encoding="utf-8") == "mine\n"
    assert sorted(path.name for path in root.iterdir()) == ["good", "victim"]


@pytest.mark.slow
def test_many_damaged_files_give_a_model_or_a_one_line_error(root):
    results = list(corpus.run_cases(root, seed=2, n_cases=15))
    assert [(str(case), outcome) for case, outcome in results if not outcome.is_acceptable] == []
    assert sum(outcome.kind == "refused" for _, outcome in results) > len(results) / 3


def test_mutations_are_determined_by_the_seed():
    content = b'{"a": [1, 2, {"b": "c"}], "d": null}'
    for name in ("x.json", "x.jsonl", "x.bin", "x.http"):
        results = [mutate(content, name, random.Random(seed)) for seed in [*range(90), *range(90)]]
        assert results[:90] == results[90:]
        assert len({result for _, result in results}) > 30
        assert {damage for damage, _ in results} >= {
            damage.__name__ for damage in MUTATIONS_BY_FORMAT[name.split(".")[1].replace("bin", "bytes")]
        }
