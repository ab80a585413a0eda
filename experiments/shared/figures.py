"""Plots shared by several studies."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.classification import MODELS
from experiments.shared.results import Runs, distinct, of, select
from tricycle_lab.plot import COLOURS, plot_curves, save_figure


@contextmanager
def drawing(
    path: Path, size: tuple[float, float], title: str = "", dpi: int = 110, layout: Any = "constrained"
) -> Iterator[Any]:
    """Yield a Matplotlib figure; write it as PNG when the block ends without an error.

    Args:
        size: in inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout=layout)
    yield figure
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, path, dpi)


def plot_folds(
    values: Mapping[str, Sequence[float]],
    path: Path,
    xlabel: str,
    title: str,
    reference: tuple[str, float] | None = None,
) -> None:
    """Write a PNG with a row for each name: a point for each fold, and a line at the mean.

    Args:
        reference: a label and a value to draw a line at.
    """
    with drawing(path, (8, 0.45 * len(values) + 1.4)) as figure:
        axes = figure.subplots()
        for y, points in enumerate(values.values()):
            style = {"color": COLOURS[0], "alpha": 0.4, "markersize": 6, "markeredgewidth": 0}
            axes.plot(points, np.full(len(points), y), "o", **style)
            axes.plot([np.mean(points)] * 2, [y - 0.3, y + 0.3], color="black", linewidth=2)
        if reference:
            label, value = reference
            axes.axvline(value, color=COLOURS[1], linestyle="--", label=f"{label}: {value}")
            figure.legend(frameon=False, fontsize=9, loc="outside lower center")
        axes.set_yticks(range(len(values)), list(values))
        axes.set(xlabel=xlabel, title=title, ylim=(len(values) - 0.5, -0.5))
        axes.grid(alpha=0.25, axis="x")


def plot_training(runs: Runs, path: Path) -> None:
    """Write a PNG of losses in nats and validation accuracies in % against the epoch, with bands over folds."""
    curves: dict[str, dict[str, tuple[Any, Any]]] = {}
    titles = "training loss, nats", "validation loss, nats", "validation accuracy, %"
    for i, (title, scale) in enumerate(zip(titles, (1, 1, 100))):
        for name in [name for name in distinct(runs) if name in MODELS]:
            values = scale * np.array(of(select(runs, model=name), "epochs"))[:, :, i]
            curves.setdefault(title, {})[name] = np.arange(1, values.shape[1] + 1), values
    plot_curves(curves, path, "epoch", "", share_y=False)
