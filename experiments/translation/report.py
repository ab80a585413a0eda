"""What the runs in a folder came to, as a Markdown table and three pictures.

Each run left one JSON file, so that runs of different times stand in one table.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.tables import cell, markdown
from experiments.translation.models import RECIPES
from tricycle.system.files import atomic_write
from tricycle_datasets.multi30k import LANGUAGES
from tricycle_lab.plot import plot_curves

Run = dict[str, Any]
TITLES = ["model", "parameters", "minutes", "passes", "validation loss", "validation BLEU", "greedy", "beam"]
PAINTED = ("bahdanau", "luong", "transformer")


def load_runs(folder: Path) -> dict[tuple[str, str], list[Run]]:
    """By target language and model, in the order of the recipes, a run a seed.

    Raises:
        ValueError: no run in the folder.
    """
    runs: dict[tuple[str, str], list[Run]] = {}
    for target in LANGUAGES:
        for name in RECIPES:
            for path in sorted(folder.glob(f"{name}-{target}-*.json")):
                runs.setdefault((target, name), []).append(json.loads(path.read_text(encoding="utf-8")))
    if not runs:
        raise ValueError(f"{folder}: expected results of runs such as transformer-de-0.json, found none")
    return runs


def table(runs: dict[tuple[str, str], list[Run]], target: str) -> str:
    """Means over seeds, with standard deviations where there are several."""
    rows = []
    for (language, name), of_model in runs.items():
        if language == target:
            of = lambda *keys: [_dig(run, keys) for run in of_model]  # noqa: B023 (called in this round)
            rows.append(
                [
                    RECIPES[name].title,
                    f"{of_model[0]['parameters'] / 1e6:.1f} M",
                    cell(of("seconds"), 1, 1 / 60),
                    cell(of("passes"), 0),
                    cell(of("validation", "loss"), 3),
                    cell(of("validation", "greedy"), 1),
                    cell(of("test", "greedy"), 1),
                    cell(of("test", "beam"), 1),
                ]
            )
    return markdown(TITLES, rows)


def length_table(runs: dict[tuple[str, str], list[Run]], target: str) -> str:
    """BLEU of the beam's translations by how many words the source has."""
    chosen = {name: of_model for (language, name), of_model in runs.items() if language == target}
    ranges = next(iter(chosen.values()))[0]["by_length"]
    titles = ["words of the source", "sentences", *chosen]
    rows = []
    for i, part in enumerate(ranges):
        scores = [cell([run["by_length"][i]["bleu"] for run in of_model], 1) for of_model in chosen.values()]
        rows.append([part["words"], str(part["sentences"]), *scores])
    return markdown(titles, rows)


def _dig(value: Any, keys: tuple[str, ...]) -> float:
    for key in keys:
        value = value[key]
    return float(value)


# -------------------------------------------------------------------- pictures
def draw(runs: dict[tuple[str, str], list[Run]], folder: Path) -> list[str]:
    """curves.png, lengths.png and alignment.png for each target; returns their names."""
    names = []
    for target in dict.fromkeys(language for language, _ in runs):
        chosen = {name: of_model for (language, name), of_model in runs.items() if language == target}
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
    panels = {"validation_loss": "validation loss, nats a token", "bleu": "BLEU of part of the validation data, greedy"}
    curves: dict[str, Any] = {title: {} for title in panels.values()}
    for name, of_model in chosen.items():
        n = min(len(run["curve"]) for run in of_model)
        minutes = [point["seconds"] / 60 for point in of_model[0]["curve"][:n]]
        for key, title in panels.items():
            if n:
                curves[title][name] = (minutes, [[point[key] for point in run["curve"][:n]] for run in of_model])
    return curves


def _by_length(runs: list[Run]) -> tuple[list[float], list[list[float]]]:
    words = [part["mean_words"] for part in runs[0]["by_length"]]
    return words, [[part["bleu"] for part in run["by_length"]] for run in runs]


def plot_alignments(runs: dict[str, Run], path: Path) -> None:
    """Heat maps of real sentences, a row a sentence and a column a model.

    Of the Transformer, the mean of the heads of the layer in which rows have the least entropy over all sentences.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    n_rows = len(next(iter(runs.values()))["alignments"])
    figure = Figure(figsize=(5.2 * len(runs) + 0.6, 5 * n_rows), layout="constrained")
    grid = figure.subplots(n_rows, len(runs), squeeze=False)
    for column, (name, run) in zip(grid.T, runs.items()):
        layer = sharpest(run["alignments"])
        for axes, shown in zip(column, run["alignments"]):
            weights = np.array(shown["weights"][layer])
            image = axes.imshow(weights, norm=PowerNorm(0.5, 0, 1), cmap="gist_heat_r", aspect="auto")
            axes.set_xticks(range(len(shown["source"])), _labels(shown["source"]), rotation=90, fontsize=8)
            axes.set_yticks(range(len(shown["target"])), _labels(shown["target"]), fontsize=8)
            axes.set_title(name if layer == "attention" else f"{name}, {layer}, mean of heads", fontsize=10)
    figure.supxlabel("English: what is attended to", fontsize=10)
    figure.supylabel("translation: what is being said", fontsize=10)
    figure.colorbar(image, ax=grid, label="attention weight", shrink=0.5, aspect=40)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=80)
    with atomic_write(path) as file:
        file.write(picture.getvalue())


def sharpest(alignments: list[dict[str, Any]]) -> str:
    """The layer whose rows have the least entropy, mean over all rows of all sentences."""

    def entropy(layer: str) -> float:
        rows = np.concatenate([np.ravel(shown["weights"][layer]) for shown in alignments])
        n_rows = sum(len(shown["weights"][layer]) for shown in alignments)
        return float(-(rows * np.log(np.maximum(rows, 1e-9))).sum() / n_rows)

    return min(alignments[0]["weights"], key=entropy)


def _labels(tokens: list[str]) -> list[str]:
    """Tokens without the spaces in them; what goes on a word has a hyphen in front."""
    labels = []
    for before, token in zip([" ", *tokens], tokens):
        text = "".join(c if c.isprintable() else "·" for c in token.strip()).replace("$", r"\$")
        goes_on = text[:1].isalpha() and not token.startswith(" ") and not before.endswith(" ")
        labels.append(f"-{text}" if goes_on else text)
    return labels
