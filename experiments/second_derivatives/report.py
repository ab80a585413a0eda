"""Tables in Markdown and plots of the study of second derivatives."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.autoencoder.data import load
from experiments.second_derivatives.penalty import SIZES
from experiments.shared.figures import drawing
from experiments.shared.results import Runs
from experiments.shared.tables import cell, markdown
from tricycle_lab.plot import COLOURS

STEPS = {"maml": (0, 1, 5, 10), "newton": (1, 5, 10, 20, 100, 1000)}  # whose errors and losses are in tables


# -------------------------------------------------------------------- tables
def heat_table(runs: Runs) -> str:
    """Return a Markdown table by network width: parameters, residual and errors of the heat equation."""
    rows = [
        [str(run["width"]), f"{run['parameters']:,}", *(f"{run[key]:.1e}" for key in ("residual", "error", "rms"))]
        for run in runs
    ]
    return markdown(["hidden width", "parameters", "residual, RMS", "largest error", "error, RMS"], rows)


def sharpness_table(runs: Runs) -> str:
    """Return a Markdown table by learning rate: last loss, mean largest eigenvalue of the second half, last three."""
    rows = []
    for run in runs:
        half = [values[0] for _, _, values in run["history"][len(run["history"]) // 2 :]]
        _, loss, last = run["history"][-1]
        values = [2 / run["rate"], np.mean(half), *last]
        rows.append([f"{run['rate']:g}", f"{loss:.3f}", *(f"{value:.2f}" for value in values)])
    titles = [
        "learning rate",
        "last loss",
        "2 / learning rate",
        "largest eigenvalue, second half",
        "last",
        "2nd",
        "3rd",
    ]
    return markdown(titles, rows)


def correlation(run: Mapping[str, Any]) -> float:
    """Return the correlation of the estimated and the true changes of the loss."""
    return float(np.corrcoef(run["estimates"][: len(run["changes"])], run["changes"])[0, 1])


def classifier(run: Mapping[str, Any]) -> str:
    """Return the title of a run's classifier, such as "hidden width 16, decay 0.01"."""
    model = f"hidden width {run['hidden']}" if run["hidden"] else "softmax regression"
    return f"{model}, decay {run['decay']:g}"


def influence_table(runs: Runs) -> str:
    """Return a Markdown table by classifier: correlation, lowest eigenvalue, RMS change and error, ratio of times."""
    rows = []
    for run in runs:
        difference = np.array(run["estimates"][: len(run["changes"])]) - run["changes"]
        changes = [np.sqrt(np.mean(np.square(values))) for values in (run["changes"], difference)]
        numbers = [f"{run['lowest']:.4f}", *(f"{value:.5f}" for value in changes)]
        estimates, training = run["seconds"]
        rows.append([classifier(run), f"{correlation(run):.4f}", *numbers, f"{training / estimates:,.0f}"])
    titles = ["classifier", "correlation", "lowest eigenvalue", "change, RMS", "error of the estimate, RMS"]
    return markdown([*titles, "time of training again / of the estimates"], rows)


def penalty_table(runs: Runs) -> str:
    """Return a Markdown table by penalty strength: gradient norm, and accuracies in % at each of SIZES."""
    rows = []
    for run in runs:
        accuracies = [cell(values, 1, 100) for values in zip(*run["accuracies"])]
        rows.append([f"{run['strength']:g}", cell(run["norm"]), *accuracies])
    return markdown(["strength", "gradient norm", *(f"accuracy, pixels ± {size:g}" for size in SIZES)], rows)


def relative_times(runs: Runs) -> list[str]:
    """Return the seconds of each run divided by the fewest of all runs, as text with one decimal."""
    return [f"{run['seconds'] / min(run['seconds'] for run in runs):.1f}" for run in runs]


def maml_table(runs: Runs) -> str:
    """Return a Markdown table by method: errors on new sinusoids at some steps, and the relative time of an update."""
    rows = []
    for run, relative in zip(runs, relative_times(runs)):
        rows.append([run["method"], *(f"{run['errors'][i]:.3f}" for i in STEPS["maml"]), relative])
    return markdown(["method", *(f"step {i}" for i in STEPS["maml"]), "time of an update, relative"], rows)


def newton_table(runs: Runs) -> str:
    """Return a Markdown table by method: the losses at some steps, and the relative time of a step."""
    rows = []
    for run, relative in zip(runs, relative_times(runs)):
        losses = [f"{run['losses'][i]:.4f}" if i < len(run["losses"]) else "" for i in STEPS["newton"]]
        rows.append([run["method"], *losses, relative])
    return markdown(["method", *(f"step {i}" for i in STEPS["newton"]), "time of a step, relative"], rows)


TABLES: dict[str, tuple[str, Callable[[Runs], str]]] = {
    "heat": ("Heat equation", heat_table),
    "sharpness": ("Sharpness", sharpness_table),
    "influence": ("Influence of training images", influence_table),
    "penalty": ("Gradient penalty", penalty_table),
    "maml": ("MAML on sinusoids", maml_table),
    "newton": ("Newton's method", newton_table),
}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the Markdown tables of the parts that the results contain, by title."""
    return {title: table(results[part]) for part, (title, table) in TABLES.items() if part in results}


# -------------------------------------------------------------------- plots
def draw_heat(axes: Any, runs: Runs) -> None:
    """Draw on `axes` each run's residual (RMS, log scale) against the fraction of training."""
    for run in runs:
        axes.semilogy(np.linspace(0, 1, len(run["losses"])), np.sqrt(run["losses"]), label=f"width {run['width']}")
    axes.set(xlabel="fraction of training", ylabel="residual, RMS", title="heat equation")


def draw_sharpness(axes: Any, runs: Runs) -> None:
    """Draw on `axes` the largest eigenvalue against the step by learning rate, with a dashed line at 2 / rate."""
    for run in runs:
        steps, _, values = zip(*run["history"])
        (line,) = axes.plot(steps, [largest for largest, *_ in values], label=f"learning rate {run['rate']:g}")
        axes.axhline(2 / run["rate"], color=line.get_color(), linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel="largest eigenvalue", title="GPT; dashed: 2 / learning rate")


def draw_influence(axes: Any, runs: Runs) -> None:
    """Draw on `axes` estimated changes of the loss against those after training again, by classifier, a diagonal."""
    for run, marker in zip(runs, "ox+"):
        axes.plot(run["changes"], run["estimates"][: len(run["changes"])], marker, label=classifier(run), alpha=0.7)
    ends = [end for run in runs for end in (min(run["changes"]), max(run["changes"]))]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], "k--", linewidth=1)
    axes.set(xlabel="change after training again, nats", ylabel="estimate, nats", title="loss without a training image")


def draw_penalty(axes: Any, runs: Runs) -> None:
    """Draw on `axes` mean accuracies in % against the change of each pixel, a line for each strength."""
    for run in runs:
        means = 100 * np.mean(run["accuracies"], axis=0)
        axes.plot(SIZES, means, "o-", markersize=4, label=f"strength {run['strength']:g}")
    axes.set(xlabel="change of each pixel (range 0 to 1)", ylabel="accuracy, %", title="gradient penalty")


def draw_maml(axes: Any, runs: Runs) -> None:
    """Draw on `axes` the mean squared error on new sinusoids (log scale) against the gradient steps, by method."""
    for run in runs:
        axes.semilogy(run["errors"], "o-", markersize=4, label=run["method"])
    axes.set(xlabel="gradient steps on 10 points", ylabel="mean squared error", title="MAML: new sinusoids")


def draw_newton(axes: Any, runs: Runs) -> None:
    """Draw on `axes` the loss of each method against the step, counted from 1, both on log scales."""
    for run in runs:
        axes.loglog(np.arange(1, len(run["losses"]) + 1), run["losses"], label=run["method"])
    axes.set(xlabel="step, from 1", ylabel="loss, nats", title="Newton: tutorial's network")


DRAW: dict[str, Callable[[Any, Runs], None]] = {
    **{"heat": draw_heat, "sharpness": draw_sharpness, "influence": draw_influence},
    **{"penalty": draw_penalty, "maml": draw_maml, "newton": draw_newton},
}


def plot(results: Mapping[str, Any], folder: Path) -> list[str]:
    """Write curves.png, a panel for each part, and with "influence" images.png into a folder; return the file names."""
    parts = [part for part in DRAW if part in results]
    n_rows = (len(parts) + 1) // 2
    with drawing(folder / "curves.png", (9, 3.4 * n_rows)) as figure:
        for i, part in enumerate(parts):
            axes = figure.add_subplot(n_rows, min(2, len(parts)), i + 1)
            axes.set_prop_cycle(color=COLOURS)
            DRAW[part](axes, results[part])
            axes.grid(alpha=0.25)
            axes.legend(frameon=False, fontsize=9)
    if "influence" not in results:
        return ["curves.png"]
    plot_images(results["influence"][0], folder / "images.png")
    return ["curves.png", "images.png"]


def plot_images(run: Mapping[str, Any], path: Path, n: int = 4) -> None:
    """Write a PNG of the test image, and of n training images each whose removal lowers or raises its loss most."""
    data, order = load("digits"), np.argsort(run["estimates"])
    with drawing(path, (9, 1.5), "change of its loss without a training image, 1/1000 nats") as figure:
        panels = figure.subplots(1, 2 * n + 1)
        shown = [(data.test, run["image"], f"test: {data.test.labels[run['image']]}")]
        for i in (*order[:n], *order[: -n - 1 : -1]):
            shown.append((data.train, i, f"{data.train.labels[i]}: {1e3 * run['estimates'][i]:+.1f}"))
        for axes, (part, i, title) in zip(panels, shown):
            axes.imshow(1 - part.images[i, :, :, 0], cmap="gray")
            axes.set_title(title, fontsize=9)
            axes.set_axis_off()
