"""What came out, as Markdown tables, pictures and a page."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.classification import MODELS, Outcome, Problem, Runs, names_of, of
from experiments.looked_at import new_items, paint, write_page
from experiments.pictures import plot_folds, plot_training
from experiments.sentiment.data import gaps
from experiments.sentiment.study import Settings
from experiments.tables import cell, markdown

KIM = "CNN of Kim 2014, own vectors", 76.1  # his table 2, CNN-rand on MR: ten-fold, no pretrained vectors
NOTE = (
    "Sentences from film reviews, each read by models that did not learn from it. Recurrent, Transformer: the weights "
    "of the attention pooling; what is weighed are vectors that know of the words around. Convolution: the share of "
    "filters whose largest value comes from the three to five words around this one. As many sentences as there are, "
    "up to a third each, were drawn from those that all models have right, where they differ, that all have wrong."
)


# -------------------------------------------------------------------- tables
def main_table(runs: Runs) -> str:
    """Accuracy in percent: mean and standard deviation of the folds."""
    rows = []
    for name in names_of(runs):
        mine = of(runs, name)
        row = [name, "", "", "", cell([run["test"] for run in mine], 1, 100)]
        if name in MODELS:
            row[1] = f"{np.mean([run['parameters'] for run in mine]):,.0f}"
            row[2] = cell([run["seconds"] for run in mine], 0)
            row[3] = cell([run["validation"] for run in mine], 1, 100)
        rows.append(row)
    rows.append([KIM[0], "", "", "", f"{KIM[1]}"])
    return markdown(["", "parameters", "seconds", "validation, %", "test, %"], rows)


def hidden_table(runs: Runs) -> str:
    """Answers that change when one word is made unknown, in percent."""
    kinds = {"most": "most looked at", "random": "at random", "least": "least looked at"}
    rows = [
        [name, *(cell([run[kind] for run in of(runs, name)], 1, 100) for kind in kinds)]
        for name in names_of(runs)
        if name in MODELS
    ]
    return markdown(["", *kinds.values()], rows)


def favourites_table(words: dict[str, list[tuple[str, float, int]]], n: int = 12) -> str:
    """The words with the largest mean weight, in even shares."""
    rows = []
    for i in range(min(n, min(map(len, words.values())))):
        rows.append([f"{i + 1}", *(f"`{word}` {share:.1f}" for word, share, _ in (own[i] for own in words.values()))])
    return markdown(["", *words], rows)


def tables(runs: Runs, words: dict[str, list[tuple[str, float, int]]]) -> dict[str, str]:
    return {
        "Accuracy": main_table(runs),
        "Answers that change when one word is made unknown, in %": hidden_table(runs),
        "Words most looked at, and how many times an even share they get": favourites_table(words),
    }


# -------------------------------------------------------------------- pictures
def plot_accuracy(runs: Runs, path: Path) -> None:
    values = {name: [100 * run["test"] for run in of(runs, name)] for name in names_of(runs)}
    n_folds = len(next(iter(values.values())))
    plot_folds(values, path, "accuracy on the test fold, %", f"Film reviews, folds: {n_folds}", KIM)


# -------------------------------------------------------------------- the page
def write(texts: list[str], problem: Problem, outcome: Outcome, runs: Runs, settings: Settings) -> list[str]:
    """Everything but results.json; returns the files' names."""
    folder = settings.output
    shown = new_items(problem, outcome, lambda number: gaps(texts[number]), settings.shown, settings.seed)
    plot_accuracy(runs, folder / "accuracy.png")
    plot_training(runs, folder / "training.png")
    paint(folder / "words.png", problem.classes, [shown[i * (len(shown) - 1) // 3] for i in range(4)])
    write_page(folder / "looked_at.html", "Film reviews: what the models looked at", NOTE, problem.classes, shown)
    return ["accuracy.png", "training.png", "words.png", "looked_at.html"]
