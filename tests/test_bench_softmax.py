"""`tricycle bench --softmax`: a softmax of one's softmax_file beside the built-in ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tricycle.softmaxes import SOFTMAXES
from tricycle_cli import bench

GOOD = """
from tricycle import kernels
from tricycle.functions import RowSoftmax


class Sigmoid(RowSoftmax):
    name = "sigmoid"

    def row_softmax(self, scores):
        return kernels.sigmoid(scores)

    def row_softmax_backward(self, grad, scores, weights):
        return grad * weights * (1 - weights)
"""


@pytest.fixture
def softmax_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def test_page_lists_each_softmax_with_losses_of_two_seeds(
    softmax_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "N_BYTES", 30_000)
    out = tmp_path / "softmax.html"
    words = ["--softmax", str(softmax_file), "--steps", "3", "--against", "softmax", "softmax1", "--out", str(out)]
    before = dict(SOFTMAXES)
    bench.main(words)
    assert before == SOFTMAXES
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == f"page: {out}"
    assert captured.err.count("held-out loss") == 6
    content = out.read_text(encoding="utf-8")
    (packed,) = re.findall(r'id="data">(.*?)</script>', content, re.DOTALL)
    result = json.loads(packed)
    assert [row["name"] for row in result["softmaxes"]] == ["Sigmoid", "softmax", "softmax1"]
    assert result["steps"] == [1, 2, 3]
    for row in result["softmaxes"]:
        assert np.shape(row["losses"]) == (2, 3)
        assert row["mean"] == pytest.approx(np.mean(row["losses"], axis=0)[-1], abs=1e-4)
        assert row["losses"][0] != row["losses"][1]
    assert "class Sigmoid" in result["source"]


def test_a_copy_of_a_built_in_softmax_gives_equal_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and batches depend on the seed, not on the softmax."""
    monkeypatch.setattr(bench, "N_BYTES", 30_000)
    (tmp_path / "again.py").write_text(GOOD.split("    def row_softmax_backward")[0].replace("sigmoid(", "softmax("))
    text, held_out = bench.load_tokens()
    with bench.register_softmax(tmp_path / "again.py") as name:
        losses = [bench.train(one, 0, [2, 4], text, held_out).losses for one in (name, "softmax")]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_name_registered_by_the_file_is_used_and_removed(softmax_file: Path) -> None:
    softmax_file.write_text(GOOD + '\n\nfrom tricycle.softmaxes import SOFTMAXES\n\nSOFTMAXES["s"] = Sigmoid\n')
    with bench.register_softmax(softmax_file) as name:
        assert name == "s"
    assert "s" not in SOFTMAXES


SEEN = GOOD.replace("(scores)\n", "(scores + 1) * 0 + 1\n").replace("grad *", "0 * grad *")
WRONG = {
    "no softmax": ("x = 1", "subclass.*RowSoftmax.*none"),
    "a wrong gradient": (GOOD.replace("(1 - weights)", "weights"), "Sigmoid: ValueError: gradcheck"),
    "an error": (GOOD.replace("kernels.sigmoid(scores)", "scores.nothing"), "Sigmoid: AttributeError"),
    "hidden keys seen": (SEEN, "of 0 for"),
    "no Python": ("def", "SyntaxError"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_softmax_is_rejected_before_training(tmp_path: Path, case: str) -> None:
    text, message = WRONG[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    before = dict(SOFTMAXES)
    with pytest.raises(ValueError, match=message) as caught:
        bench.main(["--softmax", str(path)])
    assert str(path) in str(caught.value)
    assert before == SOFTMAXES


def test_bad_flags_are_rejected(softmax_file: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        bench.main(["--softmax", str(tmp_path / "none.py")])
    for words, message in ((["--against", "hard"], r"--against.*softmax1.*'hard'"), (["--steps", "0"], "steps.*got 0")):
        with pytest.raises(ValueError, match=message):
            bench.main(["--softmax", str(softmax_file), *words])


def test_evaluation_steps_are_spread_evenly() -> None:
    steps = {n: bench.evaluation_steps(n) for n in (300, 3, 1)}
    assert steps == {300: [*range(30, 301, 30)], 3: [1, 2, 3], 1: [1]}
