"""Tables in Markdown and plots of the comparison."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.comparison.recall import N_CLASSES
from experiments.shared.results import Runs, distinct, of, select
from experiments.shared.tables import cell, grid, markdown
from tricycle_lab.plot import plot_curves

Measures = dict[str, dict[str, Any]]  # by kind of layer

# Table 1 of Vaswani et al. 2017: work of a layer, sequential operations, maximum path length. d: width, k: kernel.
THEIRS = {
    "CNN": ("O(k n d²)", "O(1)", "O(n / k)"),
    "RNN": ("O(n d²)", "O(n)", "O(n)"),
    "self-attention": ("O(n² d)", "O(1)", "O(1)"),
}
KIN = {"GRU": "RNN", "LSTM": "RNN"}

LEAST_NORM = 1e-20  # of a gradient that is drawn


def lecture_complexity(kind: str) -> tuple[str, str, str]:
    """Return the lecture's (work, sequential operations, path length) of a kind of layer in O notation."""
    family = kind.split(",")[0]
    return THEIRS[KIN.get(family, family)]


def measured(runs: Runs, kind: str, key: str) -> np.ndarray:
    """Return one measurement of a kind of model as a float array (seeds, distances), NaN for None."""
    return np.array(of(select(runs, kind=kind), key), float)


# -------------------------------------------------------------------- tables
def lecture_table(sizes: list[int], distances: list[int], costs: Measures, paths: Measures) -> str:
    """Return the Markdown table of the lecture's three complexities and the measurements at the most tokens."""
    n, far = sizes[-1], distances[-1]
    titles = ["", "work", f"multiplications, n = {n:,}", "sequential", f"sequential products, n = {n:,}", "path"]
    titles += [f"layers between tokens {far} apart", f"products on the path, {far} apart"]
    rows = []
    for kind, of_kind in costs.items():
        work, sequential, path = lecture_complexity(kind)
        row = [kind, work, f"{of_kind['multiplications'][-1] / 1e6:,.0f} M", sequential]
        row += [f"{of_kind['sequential'][-1]:,}", path]
        rows.append([*row, *(f"{paths[kind][key][-1]:,}" for key in ("layers", "products"))])
    return markdown(titles, rows)


def exponent_table(costs: Measures) -> str:
    """Return the Markdown table of measured exponents p of n^p by layer."""
    keys = {"time": "cpu", "memory": "memory", "multiplications": "multiplications"}
    keys["sequential products"] = "sequential"
    return grid(list(costs), keys, lambda kind, key: costs[kind]["exponents"][key], corner="exponent of")


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return all Markdown tables of the comparison, by title; `results` is the content of results.json."""
    sizes, distances, runs = results["sizes"], results["distances"], results["runs"]
    costs = results["costs"]
    seeds = f"{results['settings']['seeds']} seed(s)"
    return {
        "The lecture's complexities and operation counts": lecture_table(sizes, distances, costs, results["paths"]),
        "Exponents p of n^p over the upper half": exponent_table(costs),
        "CPU milliseconds, forward and backward": cost_table(sizes, costs, "cpu"),
        "Peak memory in MiB": cost_table(sizes, costs, "memory"),
        f"Accuracy in %, {seeds}; chance is {100 / N_CLASSES:.0f}": recall_table(distances, runs),
        "Updates until learned": updates_table(distances, runs),
        "Norm of the gradient at the distant token": gradient_table(distances, runs),
    }


def cost_table(sizes: list[int], costs: Measures, key: str) -> str:
    """Return a Markdown table of milliseconds ("cpu" or "wall") or MiB ("memory") at every number of tokens."""
    columns = {f"{n:,}": i for i, n in enumerate(sizes)}
    return grid(list(costs), columns, lambda kind, i: np.atleast_2d(costs[kind][key])[:, i], 1, corner="n")


def recall_table(distances: list[int], runs: Runs) -> str:
    """Return the Markdown table of test accuracies in percent by kind of model and distance."""
    rows = []
    for kind in distinct(runs, "kind"):
        size = select(runs, kind=kind)[0]["parameters"]
        rows.append([kind, f"{size:,}", *(cell(column, 1, 100) for column in measured(runs, kind, "accuracy").T)])
    return markdown(["distance", "parameters", *map(str, distances)], rows)


def updates_table(distances: list[int], runs: Runs) -> str:
    """Return the Markdown table of mean updates until the task was learned, and of the successful runs."""
    rows = []
    for kind in distinct(runs, "kind"):
        cells = []
        for column in measured(runs, kind, "learned").T:
            did = column[~np.isnan(column)]
            few = f" ({len(did)} of {len(column)})" if len(did) < len(column) else ""
            cells.append(f"{did.mean():.0f}{few}" if len(did) else "-")
        rows.append([kind, *cells])
    return markdown(["distance", *map(str, distances)], rows)


def gradient_table(distances: list[int], runs: Runs) -> str:
    """Return the Markdown table of median gradient norms by distance, before and after training."""
    rows = []
    for kind in distinct(runs, "kind"):
        medians = [np.median(measured(runs, kind, key)[:, d]) for key in ("before", "after") for d in distances]
        rows.append([kind, *(f"{value:.0e}" if value else "0" for value in medians)])
    return markdown(["distance", *(f"{d}{end}" for end in ("", ", trained") for d in distances)], rows)


# -------------------------------------------------------------------- pictures
def plot_costs(sizes: list[int], costs: Measures, path: Path) -> None:
    """Write an image of time, memory and multiplications against n; times are medians over rounds."""
    panels: dict[str, Callable[[dict[str, Any]], Any]] = {
        "time of forward and backward, ms": lambda of_kind: np.median(of_kind["cpu"], axis=0),
        "peak memory, MiB": lambda of_kind: of_kind["memory"],
        "multiplications of the forward pass, millions": lambda of_kind: np.array(of_kind["multiplications"]) / 1e6,
    }
    curves = {
        title: {kind: (sizes, pick(of_kind)) for kind, of_kind in costs.items()} for title, pick in panels.items()
    }
    plot_curves(curves, path, "n", "", "One layer, one sequence of n tokens", log="xy", share_y=False)


def panels(lines: dict[str, Any], reference: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {panel title: lines}: parallel layers, recurrent layers, each with `reference`; no empty panel."""
    groups: dict[str, dict[str, Any]] = {"convolutions, self-attention": {}, "recurrent": {}}
    for kind, line in lines.items():
        at_once = lecture_complexity(kind)[1] == "O(1)"
        groups["convolutions, self-attention" if at_once else "recurrent"][kind] = line
    return {title: {**part, **reference} for title, part in groups.items() if part}


def plot_recall(distances: list[int], runs: Runs, path: Path) -> None:
    """Write an image of accuracies in % against the distance, with chance, parallel and recurrent layers."""
    lines: dict[str, Any] = {
        kind: (distances, 100 * measured(runs, kind, "accuracy")) for kind in distinct(runs, "kind")
    }
    curves = panels(lines, {"chance": (distances, np.full(len(distances), 100 / N_CLASSES))})
    plot_curves(curves, path, "distance, tokens", "accuracy, %", "Accuracy of recall against the distance", log="x")


def plot_gradients(distances: list[int], runs: Runs, path: Path) -> None:
    """Write an image of the median gradient norms; a line ends where the gradient vanishes."""
    last = distances[-1]
    curves: dict[str, dict[str, Any]] = {}
    for key, title in {"before": "before training", "after": f"after training at {last}"}.items():
        lines: dict[str, Any] = {}
        for kind in distinct(runs, "kind"):
            values = np.median(measured(runs, kind, key), axis=0)
            n = int((values > LEAST_NORM).cumprod().sum())
            lines[kind] = np.arange(n), np.log10(values[:n])
        parts = panels(lines, {"identity": (np.arange(last + 1), np.zeros(last + 1))})
        curves |= {f"{group}, {title}": part for group, part in parts.items()}
    ylabel = "log₁₀ of the gradient's norm"
    plot_curves(curves, path, "distance, tokens", ylabel, "Gradient norm at the distant token", n_columns=2)
