"""The benchmark of fine-tuning prints its tables, and both sides do the same work."""

import importlib.util
import re

import pytest
from test_programs import call, good

from benchmarks.finetuning import write_folder
from benchmarks.finetuning_workers import STEPS

pytestmark = pytest.mark.nightly

NEEDS_THEM = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "peft")), reason="needs peft"
)
WORDS = (
    "-m benchmarks.finetuning --model tiny --batch 2 --tokens 8 --turns 1 --seconds 0 --settling 0 --threads 1".split()
)


@pytest.mark.parametrize("flags", [[], ["--recompute"]])
def test_its_table(flags):
    out = good(call(*WORDS, "--peer", "none", "--precision", "float32", *flags))
    assert "batch 2 x 8" in out
    assert ("blocks computed again" in out) == bool(flags)
    rows = re.findall(r"^tricycle float32 +[\d,]+ +1\.00 +[\d,]+ +100% +(\d\.\d+)$", out, re.MULTILINE)
    assert len(rows) == 2
    assert re.findall(r"^learning: (\w+)$", out, re.MULTILINE) == ["lora", "all"]


@pytest.mark.slow
@NEEDS_THEM
def test_its_table_beside_others():
    out = good(call(*WORDS, "--precision", "float32"))
    assert len(re.findall(r"^torch float32 ", out, re.MULTILINE)) == 2


@NEEDS_THEM
@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("learn", ["lora", "all"])
def test_both_sides_lose_alike(learn, tmp_path, monkeypatch):
    """From the same weights; with adapters only the first loss is the same, for A is drawn by each side."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_folder("tiny", tmp_path / "hf")
    losses = {}
    for side in ("tricycle", "torch"):
        step = STEPS[side](tmp_path / "hf", learn, "float32", (2, 8), False)
        losses[side] = [float(step()) for _ in range(3)]
    n_alike = 1 if learn == "lora" else 3
    assert losses["tricycle"][:n_alike] == pytest.approx(losses["torch"][:n_alike], rel=1e-4)
    assert len(set(losses["tricycle"])) == 3
