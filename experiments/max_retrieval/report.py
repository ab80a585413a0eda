"""A table in Markdown and two plots of max retrieval."""

from pathlib import Path

import numpy as np

from experiments.shared.figures import drawing
from experiments.shared.results import Runs, of
from experiments.shared.tables import cell, grid, markdown

# Accuracy in percent at 2, 4, 8, ... items in seed 001's notebook, 352 examples each; its output breaks off at 256.
NOTEBOOK = {
    "plain": [100, 98.86, 96.59, 95.74, 90.34, 78.98, 72.73],
    "adaptive": [100, 98.86, 96.59, 95.74, 90.62, 80.11, 76.14, 59.94],
}
NOTEBOOK_EXAMPLES = 352
COLORS = {
    "plain": "#3182bd",
    "adaptive": "#e6550d",
    "fit to loss": "#756bb1",
    "fit to errors": "#31a354",
    "constant": "#969696",
}


def gather(runs: Runs, *keys: str) -> np.ndarray:
    """Return the values at the path `keys` of all runs as one array, (runs, sizes, ...)."""
    return np.array(of(runs, *keys))


def accuracy_table(sizes: list[int], runs: Runs) -> str:
    """Return a Markdown table of accuracies in percent: a row per number of items, a column per softmax."""
    names = list(runs[0]["accuracy"])
    titles = ["items", "notebook, plain", "notebook, adaptive", *names, "highest score", "entropy"]
    rows = []
    for i, n in enumerate(sizes):
        notebook = [f"{column[i]:.1f}" if i < len(column) else "" for column in NOTEBOOK.values()]
        measured = [cell(gather(runs, "accuracy", name)[:, i], 1, 100) for name in names]
        entropy = f"{gather(runs, 'entropy')[:, i, 1].mean():.2f}"
        rows.append([f"{n:,}", *notebook, *measured, cell(gather(runs, "found")[:, i], 1, 100), entropy])
    return markdown(titles, rows)


def loss_table(sizes: list[int], runs: Runs) -> str:
    """Return a Markdown table of cross-entropies in nats: a row per number of items, a column per softmax."""
    rows = {f"{n:,}": i for i, n in enumerate(sizes)}
    return grid(rows, list(runs[0]["loss"]), lambda i, name: gather(runs, "loss", name)[:, i], corner="items")


def plot_accuracy(sizes: list[int], runs: Runs, path: Path) -> None:
    """Write a PNG of the accuracy and of each softmax's gain over the plain one, against the number of items.

    Lines are the mean of the training seeds, bands go from the lowest to the highest.
    """
    with drawing(path, (13, 5.4)) as figure:
        left, right = figure.subplots(1, 2)
        plain = 100 * gather(runs, "accuracy", "plain")
        for name in runs[0]["accuracy"]:
            values = 100 * gather(runs, "accuracy", name)
            style = {"color": COLORS[name], "linestyle": "--" if name == "constant" else "-", "label": name}
            for axes, found in ((left, values), (right, values - plain)):
                axes.plot(sizes, found.mean(axis=0), "o", markersize=3.5, **style)
                if name in ("plain", "fit to errors") or (axes is right and name != "constant"):
                    low, high = found.min(axis=0), found.max(axis=0)
                    axes.fill_between(sizes, low, high, color=COLORS[name], alpha=0.15, linewidth=0)
        found = 100 * gather(runs, "found")
        for axes, values in ((left, found), (right, found - plain)):
            axes.plot(sizes, values.mean(axis=0), ":", color="black", label="class of the highest score")
            axes.axvspan(5, 16, color="#f0f0f0", zorder=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(n) for n in sizes])
            axes.set_xlabel("items (grey: in training)")
            axes.grid(alpha=0.25)
        for name, shift in {"plain": 0.94, "adaptive": 1.06}.items():
            notebook = np.array(NOTEBOOK[name])[: len(sizes)]
            noise = np.sqrt(notebook * (100 - notebook) / NOTEBOOK_EXAMPLES)
            places = np.array(sizes[: len(notebook)]) * shift
            left.errorbar(places, notebook, noise, fmt="x", color=COLORS[name], capsize=2, label=f"notebook, {name}")
        left.axhline(10, color="#636363", linewidth=0.8)
        left.text(2, 10.8, "chance", color="#636363")
        left.set(ylabel="accuracy, %", ylim=(0, 102), title=f"Max retrieval, training seeds: {len(runs)}")
        left.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.12))
        right.set(ylabel="percentage points", title="Accuracy gain over the plain softmax")


def plot_weights(sizes: list[int], weights: dict[str, np.ndarray], path: Path) -> None:
    """Write a PNG of heat maps of `top_weights` by softmax: one example above, the mean of all below."""
    with drawing(path, (4.2 * len(weights), 6.6)) as figure:
        grid = figure.subplots(2, len(weights), squeeze=False, sharex=True, sharey=True)
        for column, (name, found) in zip(grid.T, weights.items()):
            for axes, values, what in zip(column, (found[:, 0], found.mean(axis=1)), ("one example", "mean of 32")):
                n_top = values.shape[1]
                image = axes.imshow(values, cmap="magma", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
                axes.set_facecolor("#d9d9d9")  # where there is no item
                axes.set_title(f"{name}, {what}")
                axes.set_yticks(range(len(sizes)), [str(n) for n in sizes])
                axes.set_xticks(range(n_top), range(n_top, 0, -1))
        for axes in grid[:, 0]:
            axes.set_ylabel("items")
        figure.supxlabel("rank of the item: 1 has the highest priority")
        figure.colorbar(image, ax=grid, label="weight", shrink=0.7)
