"""The picture of a sweep: how its best trial grew better, and what each field had to do with it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tricycle_lab.plot import COLOURS, new_figure, save_figure


@dataclass(frozen=True)
class Shown:
    """A trial that has ended.

    Attributes:
        bits: a byte; None where the trial did not come to its end.
        last: its last estimate, if it has one.
    """

    number: int
    bits: float | None
    last: float | None
    params: Mapping[str, Any]


def plot_sweep(trials: Sequence[Shown], path: Path, logs: Collection[str] = (), title: str = "") -> None:
    """Draw all trials and the best so far, and a panel for each field, as a PNG.

    Args:
        logs: the fields with logarithmic axes.
    """
    names = list(trials[0].params) if trials else []
    n_columns = min(3, 1 + len(names))
    n_rows = math.ceil((1 + len(names)) / n_columns)
    figure = new_figure(4.2 * n_columns, 3.2 * n_rows)
    panels = list(figure.subplots(n_rows, n_columns, squeeze=False, sharey=True).flat)
    done = [trial for trial in trials if trial.bits is not None]
    early = [trial for trial in trials if trial.bits is None and trial.last is not None]
    first = panels[0]
    _dots(first, [trial.number for trial in done], done, [trial.number for trial in early], early)
    if done:
        best = np.minimum.accumulate([trial.bits or 0.0 for trial in done])
        first.step([trial.number for trial in done], best, where="post", color=COLOURS[1], label="best so far")
        first.legend(frameon=False, fontsize=8)
        first.set_ylim(*_limits(done, early))
    first.xaxis.get_major_locator().set_params(integer=True)
    first.set_xlabel("trial")
    for axes, name in zip(panels[1:], names):
        _field(axes, name, done, early, name in logs)
    for axes in panels[1 + len(names) :]:
        axes.set_axis_off()
    for axes in panels[: 1 + len(names)]:
        axes.grid(alpha=0.25)
    for axes in panels[::n_columns]:
        axes.set_ylabel("held-out text, bits a byte")
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _field(axes: Any, name: str, done: Sequence[Shown], early: Sequence[Shown], log: bool) -> None:
    """One field against what came of it; what is no number stands in the order of its names."""
    values = [trial.params[name] for trial in [*done, *early]]
    numbers = all(type(value) in (int, float) for value in values)
    kinds = sorted({str(value) for value in values})
    places = [value if numbers else kinds.index(str(value)) for value in values]
    _dots(axes, places[: len(done)], done, places[len(done) :], early)
    if log and numbers:
        logarithmic(axes)
    if not numbers:
        axes.set_xticks(range(len(kinds)), kinds)
    elif len(set(values)) <= 6 and not log:
        axes.set_xticks(sorted(set(values)))
    axes.set_xlabel(name)


def logarithmic(axes: Any) -> None:
    """A logarithmic axis of x, whose numbers are plain text."""
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _dots(axes: Any, xs: Sequence[Any], done: Sequence[Shown], early_xs: Sequence[Any], early: Sequence[Shown]) -> None:
    axes.plot(xs, [trial.bits for trial in done], "o", color=COLOURS[0], markersize=5, label="trial")
    if early:
        ys = [trial.last for trial in early]
        axes.plot(early_xs, ys, "o", color=COLOURS[0], markersize=5, fillstyle="none", label="ended early or failed")
    if done:
        best = min(range(len(done)), key=lambda i: done[i].bits or 0.0)
        axes.plot(xs[best], done[best].bits, "o", color=COLOURS[1], markersize=8)


def _limits(done: Sequence[Shown], early: Sequence[Shown]) -> tuple[float, float]:
    """Of bits a byte: what is far above the others may leave the picture."""
    bits = [trial.bits for trial in done if trial.bits is not None]
    low, usual = min(bits), float(np.quantile(bits, 0.8))
    high = max(usual + 2 * (usual - low), low * 1.02)
    every = [*bits, *(trial.last for trial in early if trial.last is not None)]
    high = min(high, max(every))
    margin = 0.06 * (high - low) or 0.01 * low
    return low - margin, high + margin
