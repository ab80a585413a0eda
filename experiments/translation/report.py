"""A table in Markdown and three plots of the runs in a folder.

Each run left one JSON file, so that runs of different times stand in one table.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.figures import drawing
from experiments.shared.results import of, read
from experiments.shared.tables import cell, markdown
from experiments.translation.study import RECIPES
from tricycle_datasets.multi30k import LANGUAGES
from tricycle_lab.plot import plot_curves

Run = dict[str, Any]
TEST = "test_2016_flickr"
PAINTED = ("bahdanau", "luong", "transformer")


def load_runs(folder: Path) -> dict[tuple[str, str], list[Run]]:
    """Return {(target language, model): runs of its seeds} of a folder, in the order of RECIPES; ValueError if none.

    Raises:
        ValueError: no run in the folder.
    """
    runs: dict[tuple[str, str], list[Run]] = {}
    for target in LANGUAGES:
        for name in RECIPES:
            for path in sorted(folder.glob(f"{name}-{target}-*.json")):
                runs.setdefault((target, name), []).append(read(path))
    if not runs:
        raise ValueError(f"{folder}: expected results of runs such as transformer-de-0.json, found none")
    return runs


def tables(runs: dict[tuple[str, str], list[Run]]) -> dict[str, str]:
    """Return the Markdown tables of all target languages by title."""
    titled = {}
    for target in dict.fromkeys(language for language, _ in runs):
        titled[f"English to {LANGUAGES[target]}, {TEST}"] = table(runs, target)
        titled[f"BLEU by length, {LANGUAGES[target]}"] = length_table(runs, target)
    return titled


def table(runs: dict[tuple[str, str], list[Run]], target: str) -> str:
    """Return a Markdown table by model: minutes, losses and BLEU, mean ± SD over seeds."""
    columns: dict[str, tuple[tuple[str, ...], int, float]] = {
        "minutes": (("seconds",), 1, 1 / 60),
        "passes": (("passes",), 0, 1),
        "validation loss": (("validation", "loss"), 3, 1),
        "validation BLEU": (("validation", "greedy"), 1, 1),
        "greedy": (("test", "greedy"), 1, 1),
        "beam": (("test", "beam"), 1, 1),
    }
    rows = []
    for name, model_runs in of_target(runs, target).items():
        cells = [cell(of(model_runs, *keys), digits, scale) for keys, digits, scale in columns.values()]
        rows.append([RECIPES[name].title, f"{model_runs[0]['parameters'] / 1e6:.1f} M", *cells])
    return markdown(["model", "parameters", *columns], rows)


def length_table(runs: dict[tuple[str, str], list[Run]], target: str) -> str:
    """Return a Markdown table of beam-search BLEU: a row per range of source lengths, a column per model."""
    chosen = of_target(runs, target)
    rows = []
    for i, part in enumerate(next(iter(chosen.values()))[0]["by_length"]):
        scores = [cell(of(model_runs, "by_length", i, "bleu"), 1) for model_runs in chosen.values()]
        rows.append([part["words"], str(part["sentences"]), *scores])
    return markdown(["words of the source", "sentences", *chosen], rows)


def of_target(runs: dict[tuple[str, str], list[Run]], target: str) -> dict[str, list[Run]]:
    """Return {model: runs} of one target language; empty if there are none."""
    return {name: model_runs for (language, name), model_runs in runs.items() if language == target}


# -------------------------------------------------------------------- pictures
def draw(runs: dict[tuple[str, str], list[Run]], folder: Path) -> list[str]:
    """Write curves-, lengths-, alignment-<target>.png (if a drawn model ran) for each target; return the file names."""
    names = []
    for target in dict.fromkeys(language for language, _ in runs):
        chosen = of_target(runs, target)
        plot_curves(_curves(chosen), folder / f"curves-{target}.png", "minutes of training", "", share_y=False)
        lines = {name: _by_length(of_model) for name, of_model in chosen.items()}
        title = f"English to {LANGUAGES[target]}, test_2016_flickr, beam"
        plot_curves({title: lines}, folder / f"lengths-{target}.png", "words of the source (mean)", "BLEU")
        names += [f"curves-{target}.png", f"lengths-{target}.png"]
        painted = {name: chosen[name][0] for name in PAINTED if name in chosen}
        if painted:
            plot_alignments(painted, folder / f"alignment-{target}.png")
            names.append(f"alignment-{target}.png")
    return names


def _curves(chosen: dict[str, list[Run]]) -> dict[str, Any]:
    """Return the panels of `plot_curves`: validation loss and BLEU by minutes, up to the end of the shortest run."""
    panels = {
        "validation_loss": "validation loss, nats per token",
        "bleu": "BLEU of part of the validation data, greedy",
    }
    curves: dict[str, Any] = {title: {} for title in panels.values()}
    for name, of_model in chosen.items():
        n = min(len(run["curve"]) for run in of_model)
        minutes = [point["seconds"] / 60 for point in of_model[0]["curve"][:n]]
        for key, title in panels.items():
            if n:
                curves[title][name] = (minutes, [[point[key] for point in run["curve"][:n]] for run in of_model])
    return curves


def _by_length(runs: list[Run]) -> tuple[list[float], list[list[float]]]:
    """Return (mean words of each range of lengths, BLEU of each run by range)."""
    words = [part["mean_words"] for part in runs[0]["by_length"]]
    return words, [[part["bleu"] for part in run["by_length"]] for run in runs]


def plot_alignments(runs: dict[str, Run], path: Path) -> None:
    """Write a PNG of attention heat maps, one row per sentence and one column per model.

    Of the Transformer, the mean of the heads of the layer in which rows have the least entropy over all sentences.
    """
    from matplotlib.colors import PowerNorm

    n_rows = len(next(iter(runs.values()))["alignments"])
    with drawing(path, (5.2 * len(runs) + 0.6, 5 * n_rows), dpi=80) as figure:
        grid = figure.subplots(n_rows, len(runs), squeeze=False)
        for column, (name, run) in zip(grid.T, runs.items()):
            layer = sharpest_layer(run["alignments"])
            for axes, shown in zip(column, run["alignments"]):
                weights = np.array(shown["weights"][layer])
                image = axes.imshow(weights, norm=PowerNorm(0.5, 0, 1), cmap="gist_heat_r", aspect="auto")
                axes.set_xticks(range(len(shown["source"])), _labels(shown["source"]), rotation=90, fontsize=8)
                axes.set_yticks(range(len(shown["target"])), _labels(shown["target"]), fontsize=8)
                axes.set_title(name if layer == "attention" else f"{name}, {layer}, mean of heads", fontsize=10)
        figure.supxlabel("source (English)", fontsize=10)
        figure.supylabel("translation", fontsize=10)
        figure.colorbar(image, ax=grid, label="attention weight", shrink=0.5, aspect=40)


def sharpest_layer(alignments: list[dict[str, Any]]) -> str:
    """Return the name of the layer whose attention rows have the lowest mean entropy over all sentences."""

    def entropy(layer: str) -> float:
        rows = np.concatenate([np.ravel(shown["weights"][layer]) for shown in alignments])
        n_rows = sum(len(shown["weights"][layer]) for shown in alignments)
        return float(-(rows * np.log(np.maximum(rows, 1e-9))).sum() / n_rows)

    return min(alignments[0]["weights"], key=entropy)


def _labels(tokens: list[str]) -> list[str]:
    """Return the tokens without spaces; a token that continues a word begins with a hyphen."""
    labels = []
    for before, token in zip([" ", *tokens], tokens):
        text = "".join(c if c.isprintable() else "·" for c in token.strip())
        goes_on = text[:1].isalpha() and not token.startswith(" ") and not before.endswith(" ")
        labels.append(f"-{text}" if goes_on else text)
    return labels
