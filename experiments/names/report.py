"""Tables in Markdown, plots and a page of the surname study."""

from pathlib import Path

import numpy as np

from experiments.names.study import Settings
from experiments.shared.classification import MODELS, Outcome, Problem, model_cells
from experiments.shared.figures import drawing, plot_folds, plot_training
from experiments.shared.pooling_weights import evenly_spaced, new_items, plot_texts, write_page
from experiments.shared.results import Runs, distinct, of, select
from experiments.shared.tables import cell, markdown

KINDS = {"plain": "frequencies of the data", "even": "uniform prior over languages"}
NOTE = (
    "Surnames, each read by models that did not learn from it, between marks for the beginning and the end. Recurrent, "
    "Transformer: the weights of the attention pooling; what is weighed are vectors that know of the letters around. "
    "Convolution: the share of filters whose largest value comes from the two to four letters around this one. As many "
    "names as there are, up to a few of each language, were drawn from those that all models have right, where they "
    "differ, that all have wrong."
)
Matrices = dict[str, dict[str, list[list[int]]]]


# -------------------------------------------------------------------- tables
def main_table(runs: Runs) -> str:
    """Return a Markdown table of measures in %, mean ± SD over folds, a row per model; "even": a uniform prior."""
    titles = ["", "parameters", "seconds", "validation"]
    titles += [f"{measure}{end}" for end in ("", ", even") for measure in ("accuracy", "balanced", "F1")]
    rows = []
    for name in distinct(runs):
        model_runs = select(runs, model=name)
        found = [cell(of(model_runs, kind, key), 1, 100) for kind in KINDS for key in model_runs[0][kind]]
        rows.append([name, *model_cells(model_runs), *found])
    return markdown(titles, rows)


def language_table(classes: tuple[str, ...] | list[str], matrices: Matrices) -> str:
    """Return a Markdown table by language, most frequent first: names, recall in % by model, plain and even."""
    counts = np.array(next(iter(matrices.values()))["plain"]).sum(axis=1)
    titles = ["", "names", *(f"{name}{end}" for end in ("", ", even") for name in matrices)]
    rows = []
    for label in np.argsort(-counts, kind="stable"):
        of_label = [matrices[name][kind][label] for kind in KINDS for name in matrices]
        recall = [f"{100 * row[label] / sum(row):.1f}" if sum(row) else "" for row in of_label]
        rows.append([classes[label], f"{counts[label]:,}", *recall])
    return markdown(titles, rows)


def tables(runs: Runs, classes: tuple[str, ...] | list[str], matrices: Matrices) -> dict[str, str]:
    """Return the Markdown tables of measures and of recall by title; some run must have a "ceiling"."""
    ceiling = 100 * np.mean([run["ceiling"] for run in runs if "ceiling" in run])
    return {
        f"Measures in %; of the accuracy at most {ceiling:.1f} can be reached": main_table(runs),
        "Recall in %": language_table(classes, matrices),
    }


# -------------------------------------------------------------------- pictures
def best_model(runs: Runs) -> str:
    """Return the name in MODELS with the highest mean validation accuracy over folds."""
    names = [name for name in distinct(runs) if name in MODELS]
    return max(names, key=lambda name: np.mean(of(select(runs, model=name), "validation")))


def plot_confusion(classes: tuple[str, ...], matrices: dict[str, list[list[int]]], title: str, path: Path) -> None:
    """Write a PNG of the "plain" and "even" confusion matrices: % of each language's names (rows) by answer."""
    with drawing(path, (16, 7.4)) as figure:
        grid = figure.subplots(1, 2)
        for axes, (kind, counts) in zip(grid, matrices.items()):
            there = np.array(counts).sum(axis=1)
            shares = 100 * np.array(counts) / np.maximum(there, 1)[:, None]
            image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
            for i, j in np.argwhere(shares >= 1):
                color = "white" if shares[i, j] > 55 else "black"
                axes.text(j, i, f"{shares[i, j]:.0f}", ha="center", va="center", fontsize=8, color=color)
            axes.set_xticks(range(len(classes)), classes, rotation=90)
            axes.set_yticks(range(len(classes)), [f"{name} ({n:,})" for name, n in zip(classes, there)])
            axes.set(title=KINDS[kind], xlabel="answer", ylabel="truth")
        figure.colorbar(image, ax=grid, label="%", shrink=0.7, aspect=30)
        figure.suptitle(f"{title}: answers in % of each language's names")


# -------------------------------------------------------------------- all of it
def draw(problem: Problem, outcome: Outcome, runs: Runs, matrices: Matrices, settings: Settings) -> list[str]:
    """Write four plots and a page into `settings.output`; return the five file names."""
    folder, best = settings.output, best_model(runs)
    values = {
        f"{name}{end}": [100 * recall for recall in of(select(runs, model=name), kind, "balanced")]
        for kind, end in (("plain", ""), ("even", ", even"))
        for name in distinct(runs)
    }
    plot_folds(values, folder / "balanced.png", "mean recall over languages, %", "Surnames: one point per fold")
    plot_confusion(problem.classes, matrices[best], best, folder / "confusion.png")
    plot_training(runs, folder / "training.png")
    gaps = lambda number: [""] * len(problem.tokens[number])
    shown = new_items(problem, outcome, gaps, settings.shown, settings.seed)
    plot_texts(folder / "letters.png", problem.classes, evenly_spaced(shown, 12), n_columns=24, n_blocks=3)
    write_page(
        folder / "pooling_weights.html", "Surnames: attention weights of the models", NOTE, problem.classes, shown
    )
    return ["balanced.png", "confusion.png", "training.png", "letters.png", "pooling_weights.html"]
