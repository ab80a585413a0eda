"""The benchmarks run and print their tables; how fast is no test's business."""

import importlib.util
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from test_programs import call, good

from benchmarks.generation import same_tokens
from benchmarks.shapes import SHAPES
from benchmarks.workers import SIDES, batches
from tricycle.configs import GPTConfig
from tricycle.models import GPT
from tricycle_cli.speed import operations_a_token

NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
PEERS = [("none", ["tricycle"]), pytest.param("torch", ["tricycle", "torch"], marks=[NEEDS_TORCH, pytest.mark.slow])]


@pytest.mark.nightly
@pytest.mark.parametrize(("peer", "sides"), PEERS)
def test_training_prints_its_table(peer, sides):
    words = ["--shape", "tiny", "--peer", peer, "--turns", "1", "--seconds", "0", "--settling", "0", "--threads", "1"]
    out = good(call("-m", "benchmarks.train", *words))
    assert "shape tiny: batch 2 x 32 tokens" in out
    title = next(i for i, line in enumerate(out.splitlines()) if "tokens/s" in line)
    rows = [line.split() for line in out.splitlines()[title + 1 :]]
    assert [row[0] for row in rows] == sides
    assert all(len(row) == 5 and float(row[1].replace(",", "")) > 0 for row in rows)
    assert rows[0][2] == "1.00"
    for side in sides:
        assert re.search(rf"^  {side}: .*\d+\.\d+", out, re.MULTILINE)


@pytest.mark.nightly
def test_other_softmaxes_as_sides():
    words = [
        "--shape",
        "tiny",
        "--peer",
        "none",
        "--softmax",
        "softmax1",
        "blocks",
        "--turns",
        "1",
        "--seconds",
        "0",
        "--settling",
        "0",
    ]
    out = good(call("-m", "benchmarks.train", *words, "--threads", "1"))
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["tricycle", "softmax1", "blocks"]


def test_wrong_words_are_refused():
    done = call("-m", "benchmarks.train", "--shape", "enormous")
    assert done.returncode == 2
    assert "enormous" in done.stderr


@NEEDS_TORCH
def test_both_sides_do_the_same_work(monkeypatch):
    """As many parameters, one of them updated by a step as by the other."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    sizes = {}
    for side in ("tricycle", "torch"):
        step = SIDES[side](SHAPES["tiny"])
        model = dict(zip(step.__code__.co_freevars, step.__closure__))["model"].cell_contents
        sizes[side] = sum(math.prod(parameter.shape) for parameter in model.parameters())
        first, second = step(), step()
        assert first != second
        assert np.isfinite([first, second]).all()
    assert sizes["tricycle"] == sizes["torch"]


def test_batches_are_the_same_for_every_side():
    first, second = batches(SHAPES["tiny"]), batches(SHAPES["tiny"])
    for _ in range(3):
        np.testing.assert_array_equal(next(first), next(second))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_sound(name):
    config = SHAPES[name]
    assert config.embedding_dim % config.n_heads == 0
    if name == "tiny":
        assert GPT(config).n_parameters < 100_000


# -------------------------------------------------------------------- generation
def generation_table(*sides: str) -> dict[str, list[str]]:
    """The columns of each side."""
    words = ["--model", "tiny", "--threads", "1", "--turns", "1", "--prompts", "9", "4", "--new", "5"]
    out = good(call("-m", "benchmarks.generation", *words, "--sides", *sides))
    assert "model tiny, 5 new tokens, medians of 1 turns" in out
    assert re.search(r"^bandwidth \d+\.\d GB/s", out, re.MULTILINE)
    rows = out.splitlines()[-len(sides) :]
    return {side: row.removeprefix(side).replace(",", "").split() for side, row in zip(sides, rows)}


@pytest.mark.nightly
def test_generation_prints_its_table():
    (row,) = generation_table("tricycle float32").values()
    long_prompt, short_prompt, new, ratio, alike, limit, share, with_text, same, loaded, most = row
    assert min(float(long_prompt), float(short_prompt), float(new)) > 0
    assert float(limit) >= float(with_text) > 0
    assert (ratio, alike, same) == ("1.00", "1.00", "6")
    assert share.endswith("%")
    assert 0 <= float(loaded) <= float(most) < 1000


@pytest.mark.slow
@NEEDS_TORCH
def test_generation_beside_transformers_writes_the_same_tokens():
    pytest.importorskip("transformers")
    rows = generation_table("tricycle float32", "transformers float32")
    assert [row[8] for row in rows.values()] == ["6", "6"]


@pytest.mark.parametrize(
    ("left", "right", "n"), [([1, 2, 3], [1, 2, 3], 3), ([1, 2], [1, 3], 1), ([4], [5], 0), ([], [], 0)]
)
def test_same_tokens(left, right, n):
    assert same_tokens(left, right) == n


def test_operations_a_token():
    """GPT-2's: six for each weight of a product, and its attention."""
    config = GPTConfig()
    weights = 12 * 12 * 768**2 + 50_257 * 768
    assert operations_a_token(config) == 6 * weights + 12 * 12 * 1024 * 768
    gated = replace(config, gated=True, hidden_size=100)
    assert operations_a_token(gated) == 6 * (12 * (4 * 768**2 + 3 * 768 * 100) + 50_257 * 768) + 12 * 12 * 1024 * 768
