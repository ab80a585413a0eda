"""Pictures that several experiments draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.classification import MODELS, Runs, names_of, of
from tricycle_lab.plot import COLOURS, plot_curves, save_figure


def plot_folds(
    values: Mapping[str, Sequence[float]],
    path: Path,
    xlabel: str,
    title: str,
    reference: tuple[str, float] | None = None,
) -> None:
    """A line for each name, with a point for each fold and the mean as a stroke.

    Args:
        reference: a label and a value to draw a line at.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.45 * len(values) + 1.4), layout="constrained")
    axes = figure.subplots()
    for y, points in enumerate(values.values()):
        axes.plot(points, np.full(len(points), y), "o", color=COLOURS[0], alpha=0.4, markersize=6, markeredgewidth=0)
        axes.plot([np.mean(points)] * 2, [y - 0.3, y + 0.3], color="black", linewidth=2)
    if reference:
        label, value = reference
        axes.axvline(value, color=COLOURS[1], linestyle="--", label=f"{label}: {value}")
        figure.legend(frameon=False, fontsize=9, loc="outside lower center")
    axes.set_yticks(range(len(values)), list(values))
    axes.set(xlabel=xlabel, title=title, ylim=(len(values) - 0.5, -0.5))
    axes.grid(alpha=0.25, axis="x")
    save_figure(figure, path, 110)


def plot_training(runs: Runs, path: Path) -> None:
    """Losses and validation accuracy of classifiers against the epoch, bands over folds."""
    curves: dict[str, dict[str, tuple[Any, Any]]] = {}
    titles = "training loss, nats", "validation loss, nats", "validation accuracy, %"
    for i, (title, scale) in enumerate(zip(titles, (1, 1, 100))):
        for name in (name for name in names_of(runs) if name in MODELS):
            values = scale * np.array([run["epochs"] for run in of(runs, name)])[:, :, i]
            curves.setdefault(title, {})[name] = np.arange(1, values.shape[1] + 1), values
    plot_curves(curves, path, "epoch", "", share_y=False)
