"""The overhead benchmark runs, prints its table, and lets every side do the same work."""

import importlib.util

import numpy as np
import pytest
from test_programs import call, good

from benchmarks.overhead import SIDES, VALUES, measure


@pytest.mark.nightly
@pytest.mark.parametrize(("words", "collector"), [([], "on"), (["--no-collector"], "off")])
def test_it_prints_its_table(words, collector):
    out = good(call("-m", "benchmarks.overhead", "--length", "10", "--repeats", "2", *words, "--peers"))
    assert "20 nodes, medians of 2 runs in turns, garbage collector " + collector in out
    assert "Tricycle " in out and "NumPy " in out
    title, *rows = out.splitlines()[-2:]
    assert title.split() == ["forward", "backward", "both", "it", "/", "ours"]
    (row,) = (row.split() for row in rows)
    assert (row[0], row[-1]) == ("tricycle", "1.00")
    assert all(float(number) > 0 for number in row[1:])


@pytest.mark.parametrize("words", [["--peers", "nobody"], ["--length", "long"]], ids=str)
def test_wrong_words_are_refused(words):
    done = call("-m", "benchmarks.overhead", *words)
    assert done.returncode == 2
    assert words[1] in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("side", SIDES)
def test_every_side_does_the_same_work(side):
    """The gradients of x, b and c as by hand."""
    if importlib.util.find_spec(side) is None:
        pytest.skip(f"needs {side}")
    x, b, c = VALUES
    expected = [1.0, 0.0, 0.0]  # of x, b and c
    for _ in range(20):
        expected = [expected[0] * b, x + b * expected[1], 1 + b * expected[2]]
        x = x * b + c
    forward, backward, gradients = measure(side, 20, True)
    assert forward > 0 and backward > 0
    np.testing.assert_allclose(gradients, expected, 1e-5)
