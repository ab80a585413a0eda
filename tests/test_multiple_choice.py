"""Tests of `tricycle evaluate MODEL --task FILE`: accuracy, standard error, log, and invalid files."""

import json
import math
import re

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from programs import run_here
from tiny_models import write_folder

from tricycle.pretrained import load
from tricycle_cli.main import main

ITEMS = [
    {"prompt": "the quick brown", "choices": ["fox", "dogs", "rain"], "answer": 0},
    {"prompt": "seven small ", "choices": ["birds", "lazy dogs sing"], "answer": "birds"},
    {"prompt": "", "choices": ["the", "of"], "answer": 1},
] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", context_window=64)


def evaluate(folder, *words):
    return run_here(main, "tricycle", ("evaluate", str(folder), *map(str, words)))


def write(path, items):
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in items), encoding="utf-8")
    return path


def test_accuracy_and_log(folder, tmp_path):
    task, log = write(tmp_path / "task.jsonl", ITEMS), tmp_path / "log.jsonl"
    done = evaluate(folder, "--task", task, "--log", log, "--batch-size", 2, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == [item["prompt"] for item in ITEMS]
    loaded = load(folder)
    for row in rows[:3]:
        for choice, logprob in zip(row["choices"], row["logprobs"]):
            prompt = loaded.tokeniser.encode(row["prompt"].rstrip()) or [loaded.tokeniser.new_text]
            whole = [*prompt, *loaded.tokeniser.encode(f" {choice}" if row["prompt"] else choice)]
            logits = loaded.model(np.array([whole[:-1]])).array[0].astype(float)
            logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[range(len(whole) - 1), whole[1:]]
            assert logprob == pytest.approx(logprobs[len(prompt) - 1 :].sum(), abs=1e-3)
        assert row["chosen"] == int(np.argmax(row["logprobs"]))
        lengths = list(map(len, row["choices"]))
        assert row["chosen_per_character"] == int(np.argmax(np.array(row["logprobs"]) / lengths))
    p = sum(row["chosen"] == row["answer"] for row in rows) / len(rows)
    assert (summary["items"], summary["accuracy"]) == (9, p)
    assert summary["standard_error"] == pytest.approx(math.sqrt(p * (1 - p) / 8))
    assert re.search(rf"accuracy {100 * p:.1f}% ± .*; 9 items", evaluate(folder, "--task", task).stdout)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: expected an object with"),
        ({"prompt": "x", "choices": ["a", ""], "answer": 0}, "none of which is empty"),
        ({"prompt": "x", "choices": ["a"], "answer": 0}, "2 to 100 choices, got 1"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": 2}, "0 to 1, or a choice, got 2"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": True}, "or a choice, got True"),
        ({"prompt": "x", "choices": ["a", "the quick " * 80], "answer": 0}, "a continuation of 1 to 64 tokens"),
    ],
)
def test_invalid_tasks(line, message, folder, tmp_path):
    done = evaluate(folder, "--task", write(tmp_path / "task.jsonl", [ITEMS[0], line]))
    assert done.returncode and re.search(message, done.stderr) and done.stderr.count("\n") == 1, done.stderr


def test_invalid_flags(folder, tmp_path):
    task = write(tmp_path / "task.jsonl", ITEMS)
    empty = write(tmp_path / "empty.jsonl", [""])
    for words, message in (
        ((), "or --task, got none"),
        ((task, "--task", task), "or --task, got both"),
        ((task, "--log", "x"), "--log with --task only"),
        (("--task", empty), "at least one item"),
    ):
        done = evaluate(folder, *words)
        assert done.returncode and message in done.stderr
