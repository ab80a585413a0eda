"""`tricycle inspect` prints tables and writes a PNG."""

from __future__ import annotations

import re

import numpy as np
import pytest
from programs import good, run_here
from tiny_models import write_folder

from tricycle_cli.inspect import TASKS, main
from tricycle_cli.models import load_model
from tricycle_lab.attribution import attribute_logit

ANSWERS = ("--answers", " the", " dogs")
PATCH = ("--patch", "the quick brown fox", "the seven brown fox", *ANSWERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("jinja2")
    return write_folder(tmp_path_factory.mktemp("inspect") / "tiny", context_window=100)


def inspect(folder, *words):
    return run_here(main, "tricycle inspect", (folder, *words), folder.parent)


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize(
    ("words", "titles"),
    [
        (("--heads",), ["induction", "previous token", "duplicate token"]),
        (PATCH, ["residual stream after each layer", "attention layers", "MLPs", "heads"]),
        ((*PATCH, "--paths"), ["direct paths from heads to the logits"]),
        ((*PATCH, "--paths", "--receiver", "1", "0"), [r"direct paths from heads to (1, 0)"]),
        ((*PATCH, "--estimate"), ["residual stream after each layer", "heads"]),
        (("--attribute", "the quick", *ANSWERS), ["heads", "MLPs and attention biases"]),
    ],
)
def test_tables_are_printed_and_drawn(folder, words, titles):
    out = good(inspect(folder, *words, "--top", "3", "--out", "grid.png"))
    assert re.findall(r"^(.+) \(2 layers x \d+\)$", out, re.MULTILINE) == titles
    values = [float(value) for value in re.findall(r"^ +(-?[\d.]+) +\d  ", out, re.MULTILINE)]
    assert len(values) == 3 * len(titles)
    for first in range(0, len(values), 3):
        assert sorted(map(abs, values[first : first + 3]), reverse=True) == list(map(abs, values[first : first + 3]))
    assert (folder.parent / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert out.endswith("grid.png\n")


def test_heads_are_patched_by_position(folder):
    out = good(inspect(folder, *PATCH, "--by-position", "--top", "1000", "--out", "grid.png"))
    *tables, table = re.split(r"\n\n", out)
    n_heads = len(re.findall(r"^ +-?[\d.]+ +\d ", tables[-1], re.MULTILINE)) // 2
    title, columns, *rows = table.splitlines()[:-1]
    assert title == f"heads by position (2 layers x {n_heads} x {len(rows) // 2 // n_heads})"
    assert columns.split() == ["value", "layer", "head", "position"]
    assert {tuple(row.split()[1:3]) for row in rows} == {(str(i), str(h)) for i in range(2) for h in range(n_heads)}


def test_logit_is_that_of_the_model(folder):
    loaded = load_model(str(folder))
    ids = [int(token) for token in loaded.tokeniser.encode_plain("the quick")]
    (token,) = loaded.tokeniser.encode_plain(" dogs")
    expected = attribute_logit(loaded.model, ids, int(token))
    out = good(inspect(folder, "--attribute", "the quick", "--answers", " dogs"))
    assert out.startswith(f"logit {expected.logit:.4f}, the sum of all parts {expected.total:.4f}\n")
    assert f"\nembedding {expected.embedding:.4f}, " in out
    strongest = np.abs(expected.heads).max()
    assert f"{strongest:.4f}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "one of --attribute, --patch and --heads, got none"),
        (("--heads", "--attribute", "a"), "got 2"),
        (("--attribute", "the"), "expected 1 or 2 answers with these flags, got 0"),
        (PATCH[:-1], "expected 2 answers"),
        (("--heads", "--estimate"), "--estimate with --patch only"),
        ((*PATCH, "--estimate", "--paths"), "got --estimate and --paths"),
        ((*PATCH, "--receiver", "1", "0"), "--paths with --receiver"),
        ((*PATCH, "--estimate", "--batch-size", "8"), "exact --patch with --batch-size"),
        (("--heads", "--top", "0"), "--top"),
        (("--attribute", "the", "--answers", "zqzq"), "answers of one token each"),
        (("--patch", "the quick", "the quick brown", *ANSWERS), "same number of tokens"),
        (("--patch", "the", "the", *ANSWERS), "logits of the answers differ"),
    ],
)
def test_wrong_flags_fail_with_one_line(folder, words, message):
    done = inspect(folder, *words)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("circuit MODEL --top -1", "--top: expected a number above 0, got -1"),
        ("features MODEL TEXT --top -1", "--top: expected a number above 0, got -1"),
        ("features MODEL TEXT --kind jumprelu --active 9", "--kind topk with --active"),
        ("features MODEL TEXT --kind jumprelu --sparsity nan", "--sparsity: expected a number of 0 or more, got nan"),
        ("probe MODEL FILE --penalty inf", "--penalty: expected a number above 0, got inf"),
    ],
)
def test_numbers_out_of_range_of_subcommands_are_rejected_before_loading(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        main(words.split())


def test_help_and_errors_of_a_subcommand_begin_with_its_name(tmp_path):
    for word in TASKS:
        assert good(run_here(main, "tricycle inspect", (word, "--help"), tmp_path)).startswith(
            f"usage: tricycle inspect {word} [-h]"
        )
        assert run_here(main, "tricycle inspect", (word,), tmp_path).stderr.startswith(f"tricycle inspect {word}: ")
