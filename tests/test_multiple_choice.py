"""Tests of `tricycle evaluate MODEL --task FILE`: accuracy, standard error, log, and invalid files."""

import json
import math
import re

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from programs import one_line, run_here
from tiny_models import enliven_adapter, write_folder

from tricycle.pretrained import load
from tricycle.pretrained.adapters import new_adapter, save_adapter
from tricycle_cli.likelihoods import Pair, iter_likelihoods
from tricycle_cli.main import main
from tricycle_cli.multiple_choice import ItemScore, compare_accuracy

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
    """Write items to a file as some editors do, with a byte order mark."""
    lines = "\n".join(item if isinstance(item, str) else json.dumps(item) for item in items)
    path.write_text(lines, encoding="utf-8-sig")
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


def test_groups(folder, tmp_path):
    items = [{**item, "group": "ab"[i % 2]} for i, item in enumerate(ITEMS)]
    task = write(tmp_path / "task.jsonl", items)
    summary = json.loads(evaluate(folder, "--task", task, "--json").stdout)
    assert {name: group["items"] for name, group in summary["groups"].items()} == {"a": 5, "b": 4}
    total = sum(group["accuracy"] * group["items"] for group in summary["groups"].values())
    assert total == pytest.approx(9 * summary["accuracy"])
    assert re.search(r"\n  b +[\d.]+% ± [\d.]+ +4 items", evaluate(folder, "--task", task).stdout)


def result(answers):
    """Return the scores of items that a model answers correctly (1) or not (0)."""
    chosen = ({"chosen": 1 - right, "chosen_per_character": 1 - right} for right in answers)
    return [ItemScore("p", ["a", "b"], 0, logprobs=[0.0, 0.0], **indices) for indices in chosen]


def test_comparison():
    first, second = [1] * 8 + [0] * 2 + [1] * 10, [0] * 8 + [1] * 2 + [1] * 10
    found = compare_accuracy(result(first), result(second))
    d = np.array(first) - np.array(second)
    assert (found["only_first"], found["only_second"]) == (8, 2)
    assert found["difference"] == pytest.approx(d.mean()) and found["difference"] == pytest.approx(0.3)
    assert found["difference_error"] == pytest.approx(d.std(ddof=1) / math.sqrt(20))
    assert found["p_value"] == pytest.approx(2 * (1 + 10 + 45) / 1024)  # the binomial distribution of 10 items
    same = compare_accuracy(result(first), result(first))
    assert (same["difference"], same["difference_error"], same["p_value"]) == (0, 0, 1)
    assert compare_accuracy(result([1] * 4000), result([0] * 4000))["p_value"] < 1e-300


def test_compare_with(folder, tmp_path):
    other = write_folder(tmp_path / "other", context_window=32, n_layers=1)
    task, log = write(tmp_path / "task.jsonl", ITEMS), tmp_path / "log.jsonl"
    done = evaluate(folder, "--task", task, "--compare-with", other, "--log", log, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    alone = json.loads(evaluate(other, "--task", task, "--json").stdout)
    assert found["compare_with"]["accuracy"] == alone["accuracy"]
    right = np.array([[row["chosen"] == row["answer"], row["other"]["chosen"] == row["answer"]] for row in rows], int)
    assert found["compare_with"]["difference"] == pytest.approx((right[:, 0] - right[:, 1]).mean())
    text = evaluate(folder, "--task", task, "--compare-with", folder).stdout
    assert "difference 0.0% ± 0.0; right alone: 0 and 0 items; p = 1 (McNemar)" in text


def test_adapter_does_not_apply_to_the_other_model(folder, tmp_path):
    loaded = load(folder)
    save_adapter(enliven_adapter(new_adapter(loaded)), loaded, tmp_path / "adapter")
    task, log = write(tmp_path / "task.jsonl", ITEMS), tmp_path / "log.jsonl"
    logprobs = []
    for flags in (["--adapter", tmp_path / "adapter", "--compare-with", folder], []):
        assert evaluate(folder, "--task", task, "--log", log, *flags).returncode == 0
        logprobs.append([json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()])
    for row, plain in zip(*logprobs):
        assert row["other"]["logprobs"] == plain["logprobs"] != row["logprobs"]


def test_window_cuts_prompts(folder, tmp_path):
    prompts = ["seven small birds sing of rain the quick", "the lazy dogs jump the quick"]  # equal ends
    task, log = tmp_path / "task.jsonl", tmp_path / "log.jsonl"
    write(task, [{"prompt": prompt, "choices": [" fox", " rain"], "answer": 0} for prompt in prompts])
    for window, is_equal in ((0, False), (2, True)):
        done = evaluate(folder, "--task", task, "--window", window, "--log", log)
        assert done.returncode == 0, done.stderr
        first, second = (json.loads(line)["logprobs"] for line in log.read_text(encoding="utf-8").splitlines())
        assert (first == second) == is_equal
    one_line(evaluate(folder, "--task", task, "--window", 65), "expected --window from 1 to 64")


def test_made_task(folder):
    done = evaluate(folder, "--task", "induction", "--json")
    assert json.loads(done.stdout)["items"] == 200, done.stderr
    assert "expected a window of at least" in evaluate(folder, "--task", "retrieval", "--window", 20).stderr


def test_likelihoods_of_shared_prompts(folder, monkeypatch):
    """Choices of one token are scored with one row, and equal those that are scored separately."""
    model = load(folder).model
    pairs = [Pair([5, 6, 7], [token]) for token in range(9)] + [Pair([5, 6], [7, 3]), Pair([5, 6, 7], [4, 5])]
    expected = [next(likelihood for _, likelihood in iter_likelihoods(model, [pair])) for pair in pairs]
    calls = []

    def call(self, ids, **options):
        logits = self.forward(ids, **options)
        calls.append((ids.shape, logits.shape[:-1]))
        return logits

    monkeypatch.setattr(type(model), "__call__", call)
    found = dict(iter_likelihoods(model, pairs))
    assert calls == [((2, 4), (4,))]  # two rows, and logits of the continuations alone
    for i, likelihood in enumerate(expected):
        assert found[i].logprob == pytest.approx(likelihood.logprob, abs=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: expected an object with"),
        ({"prompt": "x", "choices": ["a", ""], "answer": 0}, "none of which is empty"),
        ({"prompt": "x", "choices": ["a"], "answer": 0}, "2 to 100 choices, got 1"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": 2}, "0 to 1, or a choice, got 2"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": True}, "or a choice, got True"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": 0, "group": 5}, "group to be a text"),
        ({"prompt": "x", "choices": ["a", "the quick " * 80], "answer": 0}, "a continuation of 1 to 64 tokens"),
    ],
)
def test_invalid_tasks(line, message, folder, tmp_path):
    done = evaluate(folder, "--task", write(tmp_path / "task.jsonl", [ITEMS[0], line]))
    one_line(done, message)


def test_invalid_flags(folder, tmp_path):
    task = write(tmp_path / "task.jsonl", ITEMS)
    empty = write(tmp_path / "empty.jsonl", [""])
    for words, message in (
        ((), "or --task, got none"),
        ((task, "--task", task), "or --task, got both"),
        ((task, "--log", "x"), "--log with --task only"),
        ((task, "--compare-with", "x"), "--compare-with with --task only"),
        (("--task", empty), "at least one item"),
        (("--task", task, "--stride", "3"), "--stride without --task"),
    ):
        one_line(evaluate(folder, *words), message)
