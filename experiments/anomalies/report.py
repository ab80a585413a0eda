"""Tables in Markdown and plots of the anomaly study."""

from pathlib import Path

import numpy as np

from experiments.anomalies.data import BEAT, KINDS, SLOT
from experiments.anomalies.methods import Predictor
from experiments.anomalies.study import RATES, Windows, scores
from experiments.shared.figures import drawing
from experiments.shared.results import Runs, of
from experiments.shared.tables import cell, grid, markdown
from tricycle_lab.plot import COLOURS, plot_curves

COLUMNS = (*KINDS, "all")
DRAWN = ("linear prediction", "PCA", "nearest window", "dense autoencoder", "recurrent autoencoder")
SHOWN = 6  # events in the picture of the series


def tables(runs: Runs) -> dict[str, str]:
    """Return the Markdown tables of ROC areas and of detected events, by title."""
    roc_area = lambda name, kind: of(runs, "methods", name, "area", kind)
    return {
        "Area under the ROC curve of windows, %": grid(list(runs[0]["methods"]), COLUMNS, roc_area, 1, 100),
        "Detected events at the threshold, %": detection_table(runs),
    }


def detection_table(runs: Runs) -> str:
    """Return a Markdown table by method: events found and false alarms in %, error, and seconds to fit."""
    rows = []
    for name in runs[0]["methods"]:
        row = [name, *(cell(of(runs, "methods", name, "found", kind), 0, 100) for kind in COLUMNS)]
        for key, digits, scale in (("false_alarms", 1, 100), ("error", 3, 1), ("seconds", 0, 1)):
            row.append(cell(of(runs, "methods", name, key), digits, scale))
        rows.append(row)
    return markdown(["", *COLUMNS, "false alarms", "error, normal", "seconds"], rows)


def plot_roc(runs: Runs, path: Path) -> None:
    """Write an image of the ROC curves at low false-positive rates, one panel for each kind of anomaly."""
    found = lambda name, kind: 100 * np.array(of(runs, "methods", name, "curve", kind))
    curves = {kind: {name: (100 * RATES, found(name, kind)) for name in DRAWN} for kind in COLUMNS}
    plot_curves(
        curves,
        path,
        "false-positive rate, %",
        "true-positive rate, %",
        "ROC curves of windows with an event",
        n_columns=4,
    )


def plot_series(windows: Windows, predict: Predictor, threshold: float, path: Path) -> None:
    """Write an image of the first anomalies: series, prediction, and score of each window with the threshold."""
    size, stride = windows.test.shape[1], windows.test.shape[1] // 4
    n_lines = 2
    length = SHOWN * SLOT // n_lines
    errors = scores(predict, windows.test)
    made = overlap_add(predict(windows.test), stride)
    middles = stride * np.arange(len(errors)) + size / 2
    shown = errors[middles < n_lines * length]
    with drawing(path, (14, 4.2 * n_lines), dpi=90) as figure:
        rows = figure.subplots(2 * n_lines, 1, height_ratios=[2, 1] * n_lines)
        for line in range(n_lines):
            above, below = rows[2 * line : 2 * line + 2]
            first, last = line * length, (line + 1) * length
            samples = np.arange(first, last)
            above.plot(samples, windows.series.values[first:last], color="black", linewidth=1, label="series")
            above.plot(samples, made[first:last], color=COLOURS[1], linewidth=1, label="prediction")
            in_panel = (middles >= first) & (middles < last)
            over = in_panel & (errors > threshold)
            below.plot(middles[in_panel], errors[in_panel], ".-", linewidth=1, markersize=4, label="error of a window")
            below.plot(middles[over], errors[over], "o", color=COLOURS[1], markersize=5, label="found")
            below.axhline(threshold, color="black", linestyle="--", linewidth=1, label="threshold")
            for kind, begin, end in windows.series.events:
                if first <= begin < last:
                    for axes in (above, below):
                        axes.axvspan(begin - 1, end, color=COLOURS[4], alpha=0.35, linewidth=0)
                    above.text(begin, above.get_ylim()[1], kind, va="bottom", fontsize=9)
            below.set(
                yscale="log", xlim=(first, last), ylim=(shown.min() / 1.4, shown.max() * 1.4), ylabel="squared error"
            )
            below.set_xlabel(f"sample (about {BEAT} a beat)")
            above.set(xlim=(first, last), ylabel="standard deviations")
            above.tick_params(labelbottom=False)
        above, below = rows[:2]
        above.legend(loc="upper right", fontsize=8, ncols=2)
        below.legend(loc="upper right", fontsize=8, ncols=3)


def overlap_add(made: np.ndarray, stride: int) -> np.ndarray:
    """Return the series (stride (N - 1) + T,) of windows (N, T): the mean of all values of each sample."""
    n, size = made.shape
    total, counts = np.zeros((2, stride * (n - 1) + size))
    for i, window in enumerate(made):
        total[stride * i : stride * i + size] += window
        counts[stride * i : stride * i + size] += 1
    return total / counts
