"""A table in Markdown and a chart of the ablations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.figures import drawing
from experiments.shared.results import Runs, of, read
from experiments.shared.tables import cell, markdown
from experiments.ten_minutes.ablations import RECIPE
from tricycle_lab.plot import COLOURS


def trials_in(folder: Path) -> Runs:
    """Return the trials in results.json with the minutes of its latest call; [] if there is no such file."""
    if not (folder / "results.json").is_file():
        return []
    results = read(folder / "results.json")
    minutes = results["settings"]["config"]["minutes"]
    return [trial for trial in results["trials"] if trial["config"]["minutes"] == minutes]


def by_variant(trials: Runs) -> dict[str, Runs]:
    """Return {variant: trials}, the recipe first, then by rising mean bits per byte."""
    by_name: dict[str, Runs] = {}
    for trial in trials:
        by_name.setdefault(trial["variant"], []).append(trial)
    mean = lambda name: float(np.mean([trial["bits"] for trial in by_name[name]]))
    return {name: by_name[name] for name in sorted(by_name, key=lambda name: (name != RECIPE, mean(name)))}


def loss_increases(variant: Runs, recipe: Runs) -> list[float]:
    """Return the increase in bits per byte over the recipe with the same seed, for each common seed."""
    bits = {trial["seed"]: trial["bits"] for trial in recipe}
    return [trial["bits"] - bits[trial["seed"]] for trial in variant if trial["seed"] in bits]


def losses(trials: Runs) -> dict[str, list[float]]:
    """Return {label: `loss_increases`} in bits per byte, best variant first, without variants with no common seed."""
    by_name = by_variant(trials)
    recipe = by_name.pop(RECIPE, [])
    values = {runs[0]["label"]: loss_increases(runs, recipe) for runs in by_name.values()}
    return {label: each for label, each in values.items() if each}


def format_signed(values: Sequence[float]) -> str:
    """Return the mean with its sign and 3 decimals, and "± SD" if there are several values."""
    text = cell(values, 3)
    return text if text.startswith("-") else f"+{text}"


def table(trials: Runs) -> str:
    """Return a Markdown table by variant: bits per byte, change from the recipe, and mean counts."""
    by_name = by_variant(trials)
    titles = ["", "bits per byte", "change from the recipe", "seeds", "parameters", "updates", "tokens per second"]
    rows = []
    for name, runs in by_name.items():
        bits = cell(of(runs, "bits"), 3)
        against = loss_increases(runs, by_name.get(RECIPE, []))
        n = len(runs)
        mean = lambda key, runs=runs: f"{np.mean(of(runs, key)):,.0f}"
        behind = "" if name == RECIPE or not against else format_signed(against)
        rows.append(
            [runs[0]["label"], bits, behind, str(n), mean("parameters"), mean("steps"), mean("tokens_per_second")]
        )
    return markdown(titles, rows)


def baseline_table(baselines: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of PyTorch baselines, a row for the content of each pytorch-*.json."""
    titles = ["PyTorch", "text", "bits per byte", "parameters", "updates", "tokens per second", "minutes"]
    rows = []
    for run in baselines:
        settings, result = run["settings"], run["result"]
        recipe = "the recipe" if settings["recipe"] == "laptop" else "GPT-2's model, AdamW"
        name = f"{recipe}, {settings['config']['precision']}{', compiled' if settings['compile'] else ''}"
        counts = [f"{result[key]:,}" for key in ("parameters", "steps", "tokens_per_second")]
        text = f"{settings['data']}, {settings['part']}"
        rows.append([name, text, f"{result['bits']:.3f}", *counts, f"{result['minutes']:.1f}"])
    return markdown(titles, rows)


def syntax_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of rows of `syntax_check.measure`: counts, and % that parse of complete and all."""
    titles = ["prompt", "temperature", "functions", "distinct", "ended", "parsed, % of complete", "of all, %"]
    lines = []
    for row in rows:
        share, of_all = (100 * row["parsed"] / max(1, row[key]) for key in ("finished", "samples"))
        counts = [str(row[key]) for key in ("samples", "distinct", "finished")]
        lines.append([row["prompt"], f"{row['temperature']:g}", *counts, f"{share:.0f}", f"{of_all:.0f}"])
    return markdown(titles, lines)


def tables(folder: Path) -> dict[str, str]:
    """Return the Markdown tables of all results in a folder by title; an empty dict if there are none."""
    titled: dict[str, str] = {}
    if trials := trials_in(folder):
        settings = read(folder / "results.json")["settings"]
        compressed = ", ".join(f"{name} {bits:.2f}" for name, bits in trials[0]["compressed"].items())  # bits per byte
        text = f"{settings['data']}, {settings['part']} text; {compressed}"
        titled[f"{settings['config']['minutes']:g} CPU minutes each ({text})"] = table(trials)
    if baselines := [read(path) for path in sorted(folder.glob("pytorch-*.json"))]:
        titled["PyTorch"] = baseline_table(baselines)
    for path in sorted(folder.glob("parses*.json")):
        parsed = read(path)
        sampling = ", ".join(f"{name} {parsed['settings'][name]}" for name in ("min_p", "no_repeat_ngram_size"))
        titled[f"Functions that parse ({path.stem}: {sampling})"] = syntax_table(parsed["rows"])
    return titled


def plot(trials: Runs, path: Path) -> None:
    """Write a PNG of each variant's mean change in bits per byte, a point per seed; ValueError without any to compare.

    Raises:
        ValueError: no variant beside the recipe, or no recipe with the same seed.
    """
    values, recipe = losses(trials), by_variant(trials).get(RECIPE, [])
    if not values:
        raise ValueError("expected the recipe and at least one variant of it with the same seed, got none")
    means = [float(np.mean(each)) for each in values.values()]
    with drawing(path, (9, 0.34 * len(values) + 1.5), dpi=130) as figure:
        axes = figure.subplots()
        places = np.arange(len(values))
        axes.barh(
            places, means, color=[COLOURS[1] if mean > 0 else COLOURS[2] for mean in means], alpha=0.75, height=0.7
        )
        ends = [max(0.0, mean, *each) for mean, each in zip(means, values.values())]
        for place, mean, each, end in zip(places, means, values.values(), ends):
            if len(each) > 1:
                axes.plot(each, np.full(len(each), place), "o", color="black", markersize=3)
            axes.annotate(f"{mean:+.3f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        if len(recipe) > 1:
            spread = float(np.std([run["bits"] for run in recipe], ddof=1))
            axes.axvspan(-spread, spread, color="grey", alpha=0.2, linewidth=0, label="recipe: ± 1 SD over seeds")
            figure.legend(frameon=False, fontsize=8, loc="outside lower center")
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(places, list(values), fontsize=8)
        axes.margins(x=0.12)
        mean = np.mean([run["bits"] for run in recipe])
        axes.set(xlabel="change of the loss, bits per byte", ylim=(len(values) - 0.4, -0.6))
        axes.set_title(f"Ablations of the recipe ({mean:.3f} bits per byte)", fontsize=11)
        axes.grid(alpha=0.25, axis="x")
