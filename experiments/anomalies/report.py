"""What came out, as Markdown tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments.anomalies.data import BEAT, KINDS, SLOT
from experiments.anomalies.methods import Expect
from experiments.anomalies.study import RATES, Windows, scores
from experiments.tables import cell, markdown
from tricycle_lab.plot import COLOURS, plot_curves, save_figure

Runs = list[dict[str, Any]]
COLUMNS = (*KINDS, "all")
DRAWN = ("linear prediction", "PCA", "nearest window", "dense autoencoder", "recurrent autoencoder")
SHOWN = 6  # events in the picture of the series


def tables(runs: Runs) -> dict[str, str]:
    """By title."""
    return {
        "Area under the ROC curve of windows, %": area_table(runs),
        "Events found at the threshold, %": found_table(runs),
    }


def of(runs: Runs, method: str, *keys: str) -> list:
    values = [run["methods"][method] for run in runs]
    for key in keys:
        values = [inner[key] for inner in values]
    return values


def area_table(runs: Runs) -> str:
    rows = [[name, *(cell(of(runs, name, "area", kind), 1, 100) for kind in COLUMNS)] for name in runs[0]["methods"]]
    return markdown(["", *COLUMNS], rows)


def found_table(runs: Runs) -> str:
    """And what it costs: false alarms, the error on normal windows, seconds to fit."""
    rows = []
    for name in runs[0]["methods"]:
        row = [name, *(cell(of(runs, name, "found", kind), 0, 100) for kind in COLUMNS)]
        row += [cell(of(runs, name, "false_alarms"), 1, 100), cell(of(runs, name, "error"), 3)]
        rows.append([*row, cell(of(runs, name, "seconds"), 0)])
    return markdown(["", *COLUMNS, "false alarms", "error, normal", "seconds"], rows)


def plot_roc(runs: Runs, path: Path) -> None:
    """A panel for each kind of event: the share found against that of false alarms, where these are few."""
    curves = {
        kind: {name: (100 * RATES, 100 * np.array(of(runs, name, "curve", kind))) for name in DRAWN} for kind in COLUMNS
    }
    plot_curves(curves, path, "false alarms, %", "windows found, %", "ROC curves of windows with an event", n_columns=4)


def plot_series(windows: Windows, expect: Expect, threshold: float, path: Path) -> None:
    """The first events: the series and what was expected of it, below the score of each window and the threshold."""
    from matplotlib.figure import Figure

    size, stride = windows.test.shape[1], windows.test.shape[1] // 4
    n_lines = 2
    length = SHOWN * SLOT // n_lines
    errors = scores(expect, windows.test)
    made = overlaid(expect(windows.test), stride)
    middles = stride * np.arange(len(errors)) + size / 2
    figure = Figure(figsize=(14, 4.2 * n_lines), layout="constrained")
    shown = errors[middles < n_lines * length]
    rows = figure.subplots(2 * n_lines, 1, height_ratios=[2, 1] * n_lines)
    for line in range(n_lines):
        above, below = rows[2 * line : 2 * line + 2]
        first, last = line * length, (line + 1) * length
        samples = np.arange(first, last)
        above.plot(samples, windows.series.values[first:last], color="black", linewidth=1, label="series")
        above.plot(samples, made[first:last], color=COLOURS[1], linewidth=1, label="what is expected")
        seen = (middles >= first) & (middles < last)
        over = seen & (errors > threshold)
        below.plot(middles[seen], errors[seen], ".-", linewidth=1, markersize=4, label="error of a window")
        below.plot(middles[over], errors[over], "o", color=COLOURS[1], markersize=5, label="found")
        below.axhline(threshold, color="black", linestyle="--", linewidth=1, label="threshold")
        for kind, begin, end in windows.series.events:
            if first <= begin < last:
                for axes in (above, below):
                    axes.axvspan(begin - 1, end, color=COLOURS[4], alpha=0.35, linewidth=0)
                above.text(begin, above.get_ylim()[1], kind, va="bottom", fontsize=9)
        below.set(yscale="log", xlim=(first, last), ylim=(shown.min() / 1.4, shown.max() * 1.4), ylabel="squared error")
        below.set_xlabel(f"sample (about {BEAT} a beat)")
        above.set(xlim=(first, last), ylabel="standard deviations")
        above.tick_params(labelbottom=False)
    above, below = rows[:2]
    above.legend(loc="upper right", fontsize=8, ncols=2)
    below.legend(loc="upper right", fontsize=8, ncols=3)
    save_figure(figure, path, 90)


def overlaid(made: np.ndarray, stride: int) -> np.ndarray:
    """Windows (N, T) back in a row: the mean of all that are made of a sample."""
    n, size = made.shape
    total, counts = np.zeros((2, stride * (n - 1) + size))
    for i, window in enumerate(made):
        total[stride * i : stride * i + size] += window
        counts[stride * i : stride * i + size] += 1
    return total / counts
