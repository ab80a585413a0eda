"""The benchmark of recurrent layers runs, prints its table, and lets both sides do the same work."""

import importlib.util

import numpy as np
import pytest
from test_programs import call, good

from benchmarks.recurrent import CELLS, SIDES

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
SMALL = [
    "--batch",
    "2",
    "--length",
    "5",
    "--width",
    "4",
    "--turns",
    "1",
    "--seconds",
    "0",
    "--settling",
    "0",
    "--threads",
    "1",
]


@pytest.mark.nightly
@pytest.mark.parametrize("peer", ["none", pytest.param("torch", marks=[NEEDS_TORCH, pytest.mark.slow])])
def test_it_prints_its_table(peer):
    out = good(call("-m", "benchmarks.recurrent", *SMALL, "--peer", peer, "--cells", "LSTM", "GRU"))
    assert "batch 2 x 5 steps, width 4: medians of 1 turns of 0 seconds" in out
    assert out.count("GFLOP/s") == 1 + (peer == "torch")
    title, *rows = out.splitlines()[-3:]
    assert ("PyTorch / ours" in title) == (peer == "torch")
    assert [row.split()[0] for row in rows] == ["LSTM", "GRU"]
    for row in rows:
        numbers = [float(number) for number in row.split()[1:]]
        assert len(numbers) == (3 if peer == "torch" else 1) and min(numbers) >= 0


def test_wrong_words_are_refused():
    done = call("-m", "benchmarks.recurrent", "--cells", "Elman")
    assert done.returncode == 2
    assert "Elman" in done.stderr


@NEEDS_TORCH
@pytest.mark.parametrize("cell", CELLS)
def test_both_sides_do_the_same_work(cell, monkeypatch):
    """The same outputs and gradients, twice."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    ours, theirs = (SIDES[side](cell, 3, 7, 5) for side in ("tricycle", "torch"))
    for _ in range(2):
        for mine, their in zip(ours(), theirs(), strict=True):
            np.testing.assert_allclose(mine, their, 1e-4, 1e-4)
