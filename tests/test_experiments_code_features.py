"""experiments/code_features: rules of tokens, selection of features, and a small run."""

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags

from experiments.code_features import report, study
from experiments.code_features.__main__ import main
from experiments.code_features.rules import RULES, label_tokens
from experiments.shared.results import read

SOURCE = '''"""A module."""

import os  # a comment


class Name(object):
    """A class."""

    def f(self, x=1):
        self.x = [x, "text"]
        return 2.5
'''
PIECES = {
    '"""A module.': {"docstring", "docstring or comment"},
    "import": {"keyword", "import statement"},
    " os": {"import statement"},
    "# a comment": {"comment", "docstring or comment"},
    "class": {"keyword"},
    " Name": {"name after def or class"},
    "object": {"inside brackets"},
    ":\n    ": {"indentation after a colon"},
    "self": {"self", "inside brackets"},
    " x=": {"inside brackets"},
    "1": {"number", "inside brackets"},
    "[": set(),
    '"text"': {"other string", "inside brackets"},
    " 2.5": {"number"},
}


def pieces_of(text: str, marked: list[str]) -> list[str]:
    """Cut a text before and after each of the marked pieces, which occur in this order."""
    pieces = []
    for piece in marked:
        before, text = text[: text.index(piece)], text[text.index(piece) + len(piece) :]
        pieces += [before, piece]
    return [*pieces, text]


@pytest.mark.parametrize("piece", PIECES)
def test_rules_of_tokens(piece):
    pieces = pieces_of(SOURCE, [piece])
    row = label_tokens(SOURCE, pieces)[1]
    assert {rule for rule, holds in zip(RULES, row) if holds} == PIECES[piece]


def test_rules_of_white_space_and_attributes():
    pieces = pieces_of(
        SOURCE, ["\n    ", '"""A class."""', "\n\n    ", "def", " f(self, x=1):", "\n        ", "self.", "x"]
    )
    labels = label_tokens(SOURCE, pieces)
    assert labels[1, RULES.index("indentation after a colon")] and labels[11, RULES.index("indentation after a colon")]
    assert labels[5, RULES.index("line break")] and not labels[5, RULES.index("indentation after a colon")]
    assert labels[15, RULES.index("attribute of self")] and not labels[13, RULES.index("attribute of self")]
    with pytest.raises(ValueError, match="pieces of a text"):
        label_tokens(SOURCE, pieces[1:])


def test_features_are_selected_and_their_precision_is_measured():
    generator = np.random.default_rng(0)
    labels = generator.random((500, 2)) < [0.2, 0.5]
    activations = generator.random((500, 4)) * 0.1
    activations[:, 1] += labels[:, 0]
    activations[:, 3] += 2 * labels[:, 1]
    (first, threshold), (second, _) = study.select_features(activations, labels)
    assert (first, second) == (1, 3) and 0.1 <= threshold < 1
    precision, recall = study.confusion(activations[:, [1]] > threshold, labels)
    assert precision[0, 0] == recall[0, 0] == 1 and recall[0, 1] < 0.5
    half = study.Tokens(activations, labels, [("a", str(i), "b") for i in range(500)], [])
    found = study.measure_features([activations, activations], [half, half])[0]
    assert found["precision"] == found["recall"] == 1 and found["share"] == pytest.approx(labels[:, 0].mean())
    assert found["contexts"][0][1] == str(activations[:, 1].argmax())


@pytest.mark.slow
def test_run_writes_results_plots_and_tables(tmp_path):
    sizes = "--steps 2 --width 16 --layers 2 --texts 3 --files 2 --features 32 --updates 3".split()
    out = run_study(main, *sizes, "--output", tmp_path / "run")
    check_files(tmp_path / "run", ["results.json", "features.png"])
    check_tables(report.tables(read(tmp_path / "run" / "results.json")["results"]), out)


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--layers", "1"], "--layers.*got 1"),
    (["--files", "1"], "--files.*got 1"),
    (["--sparsity", "0"], "--sparsity"),
    (["--features", "8"], "--active to be at most 8, the features, got 12"),
)
