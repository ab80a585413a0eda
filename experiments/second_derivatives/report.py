"""Tables in Markdown and plots of the study of second derivatives."""

from pathlib import Path

import numpy as np

from experiments.shared.figures import drawing
from experiments.shared.results import Runs
from experiments.shared.tables import markdown


def tables(solved: Runs, descended: Runs) -> dict[str, str]:
    """Return the Markdown tables of the heat equation and of the sharpness, by title."""
    heat = [
        [str(run["width"]), f"{run['parameters']:,}", *(f"{run[key]:.1e}" for key in ("residual", "error", "rms"))]
        for run in solved
    ]
    titles = ["hidden width", "parameters", "residual, RMS", "largest error", "error, RMS"]
    sharp = []
    for run in descended:
        half = [value for _, _, value in run["history"][len(run["history"]) // 2 :]]
        values = [2 / run["rate"], np.mean(half), run["lanczos"], run["exact"]]
        sharp.append([f"{run['rate']:g}", *(f"{value:.2f}" for value in values)])
    columns = ["learning rate", "2 / learning rate", "sharpness, second half", "last, Lanczos", "last, whole Hessian"]
    return {"Heat equation": markdown(titles, heat), "Sharpness": markdown(columns, sharp)}


def plot(solved: Runs, descended: Runs, path: Path) -> None:
    """Write an image of the residuals during training, and of the sharpness during gradient descent."""
    with drawing(path, (9, 3.6)) as figure:
        left, right = figure.subplots(1, 2)
        for run in solved:
            left.semilogy(np.linspace(0, 1, len(run["losses"])), np.sqrt(run["losses"]), label=f"width {run['width']}")
        left.set(xlabel="fraction of training", ylabel="residual, RMS", title="heat equation")
        for run in descended:
            steps, _, values = zip(*run["history"])
            (line,) = right.plot(steps, values, label=f"learning rate {run['rate']:g}")
            right.axhline(2 / run["rate"], color=line.get_color(), linestyle="--", linewidth=1)
        right.set(xlabel="step", ylabel="sharpness", title="gradient descent; dashed: 2 / learning rate")
        for axes in (left, right):
            axes.grid(alpha=0.25)
            axes.legend(frameon=False, fontsize=9)
