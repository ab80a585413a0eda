"""The plot of a hyper-parameter sweep: the results of its trials in order, and against each parameter.

`tricycle sweep` writes it as sweep.png.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tricycle_lab.plot import COLOURS, new_panels, save_figure


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        number: of the trial.
        bits_per_byte: on held-out text; None if the trial was pruned or failed.
        last_estimate: the last estimate of bits per byte during training, or None.
        params: the values of the searched fields.
    """

    number: int
    bits_per_byte: float | None
    last_estimate: float | None
    params: Mapping[str, Any]


def plot_sweep(trials: Sequence[TrialResult], path: Path, log_fields: Collection[str] = (), title: str = "") -> None:
    """Plot the bits per byte of trials by number, with the best so far, and by each searched field, as a PNG.

    Args:
        log_fields: the fields with a logarithmic axis.
    """
    names = list(trials[0].params) if trials else []
    values = [value for value in map(_result, trials) if value is not None]
    low, high = _y_limits(values) if values else (0.0, 1.0)
    trials = [_clipped(trial, high) for trial in trials]
    figure, panels = new_panels(1 + len(names), 3, (4.2, 3.2), (0, 0), sharey=True)
    done = [trial for trial in trials if trial.bits_per_byte is not None]
    early = [trial for trial in trials if trial.bits_per_byte is None and trial.last_estimate is not None]
    first = panels[0]
    _plot_trials(first, lambda trial: trial.number, done, early)
    if done:
        best = np.minimum.accumulate([trial.bits_per_byte or 0.0 for trial in done])
        first.step([trial.number for trial in done], best, where="post", color=COLOURS[1], label="best so far")
        first.legend(frameon=False, fontsize=8)
        first.set_ylim(low, high)
    first.xaxis.get_major_locator().set_params(integer=True)
    first.set_xlabel("trial")
    for axes, name in zip(panels[1:], names):
        _plot_field(axes, name, done, early, name in log_fields)
    for axes in panels:
        axes.grid(alpha=0.25)
    for axes in panels[::3]:
        axes.set_ylabel("held-out loss (bits per byte)")
    figure.suptitle(title, fontsize=11)
    save_figure(figure, path)


def _plot_field(axes: Any, name: str, done: Sequence[TrialResult], early: Sequence[TrialResult], log: bool) -> None:
    """Plot the results on `axes` against one field; values that are not numbers are in alphabetical order."""
    values = [trial.params[name] for trial in [*done, *early]]
    is_numeric = all(type(value) in (int, float) for value in values)
    categories = sorted({str(value) for value in values})
    x_of = lambda trial: trial.params[name] if is_numeric else categories.index(str(trial.params[name]))
    _plot_trials(axes, x_of, done, early)
    if log and is_numeric:
        use_log_x_axis(axes)
    if not is_numeric:
        axes.set_xticks(range(len(categories)), categories)
    elif len(set(values)) <= 6 and not log:
        axes.set_xticks(sorted(set(values)))
    axes.set_xlabel(name)


def use_log_x_axis(axes: Any) -> None:
    """Make the x axis of matplotlib axes logarithmic, in place, with tick labels in plain notation."""
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plot_trials(
    axes: Any, x_of: Callable[[TrialResult], Any], done: Sequence[TrialResult], early: Sequence[TrialResult]
) -> None:
    """Plot on `axes` results of finished trials, last estimates of early ones as open circles, the best in color."""
    style = {"color": COLOURS[0], "markersize": 5}
    axes.plot(list(map(x_of, done)), [trial.bits_per_byte for trial in done], "o", label="trial", **style)
    if early:
        ys = [trial.last_estimate for trial in early]
        axes.plot(list(map(x_of, early)), ys, "o", fillstyle="none", label="pruned or failed", **style)
    if done:
        best = min(done, key=lambda trial: trial.bits_per_byte or 0.0)
        axes.plot(x_of(best), best.bits_per_byte, "o", color=COLOURS[1], markersize=8)


def _result(trial: TrialResult) -> float | None:
    """Return a trial's final bits per byte, else its last estimate, else None."""
    return trial.last_estimate if trial.bits_per_byte is None else trial.bits_per_byte


def _y_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return limits of the y axis, which exclude outliers far above the other values."""
    low, usual = min(values), float(np.quantile(values, 0.8))
    high = min(max(usual + 2 * (usual - low), low * 1.02), max(values))
    margin = 0.06 * (high - low) or 0.01 * low
    return low - margin, high + margin


def _clipped(trial: TrialResult, high: float) -> TrialResult:
    """Return the trial with results of at most `high`, so that outliers are drawn at the upper edge."""
    done, early = trial.bits_per_byte, trial.last_estimate
    return replace(trial, bits_per_byte=done and min(done, high), last_estimate=early and min(early, high))
