"""The benchmark of attention runs and prints its tables; how fast is no test's business."""

import warnings

import numpy as np
import pytest
from test_benchmarks import NEEDS_TORCH, PEERS
from test_programs import call, good

from benchmarks.attention import ATTENTION, N_TOKENS, WIDTH

pytestmark = pytest.mark.nightly

QUICK = ["--turns", "1", "--seconds", "0", "--settling", "0", "--threads", "1"]


@pytest.mark.parametrize(("peer", "sides"), PEERS)
def test_the_table_of_lengths(peer, sides):
    out = good(call("-m", "benchmarks.attention", "--lengths", "128", "--peer", peer, *QUICK))
    assert [line.split(":")[0].strip() for line in out.splitlines() if line.startswith("  ") and ":" in line] == sides
    title, row = out.splitlines()[-2:]
    columns = "T batch ms ours".split() + ["ms", "PyTorch", "PyTorch", "/", "ours"] * (len(sides) - 1)
    assert title.split()[: len(columns)] == columns
    values = [float(value.replace(",", "")) for value in row.split()]
    assert values[:2] == [128, N_TOKENS // 128]
    assert len(values) == (4 if len(sides) == 1 else 7)
    assert values[2] > 0


@NEEDS_TORCH
def test_bfloat16_on_both_sides(monkeypatch):
    """16-bit operands, and gradients that come back in 32; far apart only as far as 8 bits of a number are."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    exact = ATTENTION["torch"](2, 40)()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without oneDNN products are made in float32, and it says so
        sides = [ATTENTION[side](2, 40, "bfloat16")() for side in ("tricycle", "torch")]
    for side in sides:
        for a, b in zip(side, exact, strict=True):
            assert a.dtype == np.float32
            np.testing.assert_allclose(a, b, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(("peer", "sides"), PEERS)
def test_training_with_a_long_context(peer, sides):
    out = good(call("-m", "benchmarks.attention", "--train", "32", "--peer", peer, *QUICK))
    assert "batch 1 x 32 tokens" in out
    rows = [line.split() for line in out.splitlines()[-len(sides) :]]
    assert [row[0] for row in rows] == sides
    assert all(len(row) == 5 and float(row[1]) > 0 for row in rows)


@NEEDS_TORCH
def test_both_sides_compute_the_same(monkeypatch):
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    ours, theirs = (ATTENTION[side](2, 40)() for side in ("tricycle", "torch"))
    assert ours[0].shape == (2, 40, WIDTH)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
