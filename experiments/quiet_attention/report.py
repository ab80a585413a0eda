"""Tables, plots and a page of the quiet_attention runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.results import of, read, rounded, write_json
from experiments.shared.tables import cell, grid, markdown
from tricycle.checkpoint import load_checkpoint
from tricycle.tokeniser import Tokeniser
from tricycle_lab.plot import plot_curves, plot_distributions, write_attention_page
from tricycle_lab.probe import Probe

Row = dict[str, Any]
Runs = dict[str, list[list[Row]]]  # by variant: for each seed the measurements along the run
SHOWN_TOKENS = 96


def mean_of(key: str, *endings: str) -> Callable[[Row], float]:
    """Return a function of a Row: the mean of row[key] over all names that end with one of `endings`."""
    return lambda row: float(np.mean([value for name, value in row[key].items() if name.endswith(endings)]))


def streams(row: Row, key: str) -> list[float]:
    """Return the values of row[key] for the residual stream after each block, in order."""
    return [value for name, value in row[key].items() if name.rpartition(".")[2].isdigit()]


# What is said of a run in one number.
FIGURES: dict[str, tuple[Callable[[Row], float], int]] = {
    "perplexity per byte": (lambda row: row["perplexity"], 3),
    "bits per byte": (lambda row: row["bits_per_byte"], 3),
    "kurtosis of weights, all matrices": (mean_of("weight_kurtosis", ".weights"), 2),
    "kurtosis of weights, q k v": (mean_of("weight_kurtosis", "qkv.weights"), 2),
    "kurtosis of weights, attention's projection": (mean_of("weight_kurtosis", "attention.projection.weights"), 2),
    "kurtosis of the stream after each block": (lambda row: float(np.mean(streams(row, "activation_kurtosis"))), 2),
    "kurtosis of the attention output": (mean_of("activation_kurtosis", ".attention"), 2),
    "kurtosis of the MLP output": (mean_of("activation_kurtosis", ".mlp"), 2),
    "largest activation in the stream": (lambda row: max(streams(row, "largest_activation")), 1),
    "1 - sum of attention weights": (mean_of("nothing", ".attention"), 3),
}


def report(folder: Path, variants: tuple[str, ...], seeds: int, tokeniser: Tokeniser, tokens: Any) -> None:
    """Read all runs in a folder, print tables, and write results.json, two PNGs and attention.html there."""
    runs = {
        variant: [read(folder / f"{variant}-{seed}" / "measurements.json") for seed in range(seeds)]
        for variant in variants
    }
    write_json(folder / "results.json", rounded(runs))
    last = runs[variants[0]][0][-1]["step"]
    print(f"\nAfter {last:,} steps, mean ± standard deviation of {seeds} seeds:\n\n{summary(runs)}")
    for key in ("weight_kurtosis", "activation_kurtosis"):
        print(f"\n{key.replace('_', ' of ').replace('of kurtosis', 'kurtosis')}:\n\n{by_layer(runs, key)}")
    draw(folder / "curves.png", runs)
    arrays: dict[str, np.ndarray] = {}
    weights = {}
    shown = np.asarray(tokens[:SHOWN_TOKENS], np.int64)
    for variant in variants:
        model = load_checkpoint(folder / f"{variant}-0" / "last.safetensors").model()
        with model.evaluating(), Probe(model) as probe:
            model(shown)
        streams_of = {name: x for name, x in probe.activations.items() if name.rpartition(".")[2].isdigit()}
        arrays |= {f"{variant}, {name}": x for name, x in streams_of.items()}
        weights[variant] = {name: x[0] for name, x in probe.weights.items()}
    title = "The residual stream after each block"
    plot_distributions(arrays, folder / "activations.png", title, n_columns=len(arrays) // len(variants))
    texts = [tokeniser.decode([token]) if token != tokeniser.end_of_text else "⏹" for token in shown.tolist()]
    write_attention_page(folder / "attention.html", weights, texts, "Attention with softmax and with softmax1")
    names = ("results.json", "curves.png", "activations.png", "attention.html")
    print(f"\n{', '.join(names)} are in {folder}")


def summary(runs: Runs) -> str:
    """Return a Markdown table of the last measurements: a row per figure, a column per variant, mean ± SD."""
    rows = [
        [name, *(cell([figure(run[-1]) for run in found], digits) for found in runs.values())]
        for name, (figure, digits) in FIGURES.items()
    ]
    return markdown(["", *runs], rows)


def by_layer(runs: Runs, key: str) -> str:
    """Return a Markdown table of the last `key`: a row per matrix or layer, a column per variant."""
    names = list(next(iter(runs.values()))[0][-1][key])
    if key.startswith("activation"):
        names = [name for name in names if not name.endswith(("dropout", "projection"))]
    return grid(names, runs, lambda name, found: of(found, -1, key, name))


def draw(path: Path, runs: Runs) -> None:
    """Write a PNG of each figure against the training step, with the mean and range over seeds."""
    curves: dict[str, dict[str, Any]] = {}
    for name, (figure, _) in FIGURES.items():
        if name != "bits per byte":
            for variant, found in runs.items():
                start = 1 if name.startswith("perplexity") else 0  # untrained, it is off any scale
                steps = [row["step"] for row in found[0][start:]]
                values = [[figure(row) for row in run[start:]] for run in found]
                curves.setdefault(name, {})[variant] = (steps, values)
    plot_curves(curves, path, "step", "", "softmax and softmax1: mean and range over seeds", share_y=False)
