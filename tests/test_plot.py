"""The loss curve: a PNG that opens, with the curves that the metrics hold."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from tricycle.plot import plot_losses

BOTH = [{"step": step, "loss": 5 / step, "learning_rate": 1e-3} for step in range(1, 201)] + [
    {"step": 100, "held_out_loss": 1.5, "bits_per_byte": 1.0},
    {"step": 200, "held_out_loss": 1.0, "bits_per_byte": 0.7},
    {"step": 200, "final_loss": 1.0},
]


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The axes of every figure that is drawn."""
    found, subplots = [], Figure.subplots
    monkeypatch.setattr(Figure, "subplots", lambda self: found.append(subplots(self)) or found[-1])
    return found


@pytest.mark.parametrize(
    "metrics",
    [BOTH, BOTH[:1], BOTH[:200], BOTH[200:], [], [{"step": 3, "loss": 2.0}] * 2],
    ids=["both", "one step", "training only", "held out only", "nothing", "constant"],
)
def test_a_png_that_opens(tmp_path, metrics):
    path = tmp_path / "loss.png"
    plot_losses(metrics, path, 0.5, {"gzip -9": 2.0, "bz2 -9": 1.5, "xz -9": 1.4}, "a title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = imread(path).shape
    assert height > 300 < width
    assert [found.name for found in tmp_path.iterdir()] == ["loss.png"]


def test_the_curves_are_in_bits_a_byte(tmp_path, drawn):
    plot_losses(BOTH, tmp_path / "loss.png", 0.5, {"gzip -9": 2.0}, "a title")
    (axes,) = drawn
    lines = [np.array(line.get_xydata()) for line in axes.lines]
    training = np.array([(step, 2.5 / step) for step in range(1, 201)])
    assert any(line.shape == training.shape and np.allclose(line, training) for line in lines)
    assert any(line.shape == (2, 2) and np.allclose(line, [(100, 0.75), (200, 0.5)]) for line in lines)
    assert any(np.allclose(line[:, 1], 2.0) for line in lines)
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("a title", "step", "bits a byte")
    shown = axes.get_ylim()
    assert shown[0] <= 0.5
    assert shown[1] >= 2.0
    smooth = next(line for line in axes.lines if line.get_label().startswith("training"))
    steps, values = smooth.get_data()
    assert steps[-1] == 200
    assert values[-1] == pytest.approx(training[-4:, 1].mean())


def test_the_legend_names_curves_and_references(tmp_path, drawn):
    plot_losses(BOTH, tmp_path / "loss.png", 0.5, {"gzip -9": 2.0, "xz -9": 1.4}, "a title")
    labels = " ".join(text.get_text() for text in drawn[0].get_legend().get_texts())
    for name in ("training", "held out", "gzip -9 2.00", "xz -9 1.40"):
        assert name in labels
