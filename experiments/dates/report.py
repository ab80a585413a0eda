"""Tables in Markdown and plots of the study of dates."""

from pathlib import Path

import numpy as np

from experiments.dates.data import Example
from experiments.dates.multiple_dates import COUNTS
from experiments.dates.multiple_dates import TRAINED as TRAINED_DATES
from experiments.dates.study import LENGTHS, TRAINED
from experiments.shared.figures import drawing
from experiments.shared.results import Runs, distinct, of, select
from experiments.shared.tables import cell, grid, markdown
from tricycle_lab.plot import COLOURS, plot_curves

BEYOND = [i for i, (least, _) in enumerate(LENGTHS) if least > TRAINED]
FIELD_COLORS = dict(zip(("year", "month", "day"), (COLOURS[1], COLOURS[0], COLOURS[2])))


def title_of(lengths: tuple[int, int]) -> str:
    """Return the title of a range of text lengths: "alone" for (0, 0), else "LEAST-MOST"."""
    return "alone" if lengths[1] == 0 else f"{lengths[0]}-{lengths[1]}"


# -------------------------------------------------------------------- tables
def main_table(runs: Runs) -> str:
    """Return the Markdown table of models: size, cost, accuracy, and fraction of attention on the right field."""
    titles = "model;parameters;steps;seconds;exact, %;longer texts, %;on the field, %;maximum on the field, %".split(
        ";"
    )
    rows = []
    for name in distinct(runs):
        model_runs = select(runs, model=name)
        beyond = [np.mean([run["lengths"][i] for i in BEYOND]) for run in model_runs]
        row = [
            name,
            f"{model_runs[0]['parameters']:,}",
            f"{model_runs[0]['steps']:,}",
            cell(of(model_runs, "seconds"), 0),
        ]
        row += [cell(of(model_runs, "exact"), 2, 100), cell(beyond, 1, 100)]
        has_attention = "share" in model_runs[0]
        row += [
            cell([np.mean(run[key]) for run in model_runs], 1, 100) if has_attention else "" for key in ("share", "top")
        ]
        rows.append(row)
        if "of_best" in model_runs[0]:
            best = [cell([np.mean(run["of_best"][key]) for run in model_runs], 1, 100) for key in ("share", "top")]
            rows.append([f"{name}, best head", "", "", "", "", "", *best])
    even = cell(np.mean(runs[0]["even"]), 1, 100)
    return markdown(titles, [*rows, ["uniform weights", "", "", "", "", "", even, ""]])


def length_table(runs: Runs) -> str:
    """Return the Markdown table of exact answers in percent by model and text length."""
    columns = {title_of(lengths): i for i, lengths in enumerate(LENGTHS)}
    found = lambda name, i: of(select(runs, model=name), "lengths", i)
    return grid(distinct(runs), columns, found, 1, 100, "characters")


def field_table(runs: Runs) -> str:
    """Return the Markdown table of attention in % on year, month and day, and how often it has its maximum there."""
    rows: dict[str, Runs] = {}
    for name in distinct(runs):
        model_runs = select(runs, model=name)
        rows |= {name: model_runs, f"{name}, best head": [run.get("of_best", {}) for run in model_runs]}
    rows = {name: model_runs for name, model_runs in rows.items() if "share" in model_runs[0]}
    rows["uniform weights"] = [{"share": runs[0]["even"]}]
    keys = (("share", ""), ("top", ", most"))
    columns = {f"{field}{end}": (key, i) for key, end in keys for i, field in enumerate(FIELD_COLORS)}
    return grid(
        rows, columns, lambda model_runs, column: of(model_runs, *column) if column[0] in model_runs[0] else [], 1, 100
    )


def language_table(runs: Runs) -> str:
    """Return the Markdown table of exact answers in percent by language, on texts as in training."""
    right = lambda name, language: of(select(runs, model=name), "languages", language)
    return grid(distinct(runs), list(runs[0]["languages"]), right, 2, 100)


def tables(runs: Runs) -> dict[str, str]:
    """Return all Markdown tables of the study of single dates, by title."""
    return {
        "Accuracy on unseen dates, and attention on the right field": main_table(runs),
        "Exact answers in %, by characters of the text": length_table(runs),
        "Weight on the characters of the right field, in %": field_table(runs),
        "Exact answers in %, by language": language_table(runs),
    }


def multiple_dates_table(runs: Runs) -> str:
    """Return the Markdown table of exact answers and right dates in percent by number of dates."""
    kinds = {"whole": "whole", "each date": "each"}
    rows = {f"{name}, {title}": (name, key) for name in distinct(runs) for title, key in kinds.items()}
    right = lambda row, i: of(select(runs, model=row[0]), row[1], i)
    return grid(rows, {str(count): i for i, count in enumerate(COUNTS)}, right, 1, 100, "dates")


# -------------------------------------------------------------------- pictures
def plot_training(runs: Runs, path: Path) -> None:
    """Write an image of training losses and of exact validation answers in %, against the step."""
    losses, checks = {}, {}
    for name in distinct(runs):
        model_runs = select(runs, model=name)
        losses[name] = model_runs[0]["loss_steps"], of(model_runs, "losses")
        steps = [step for step, _ in model_runs[0]["checks"]]
        checks[name] = steps, [[100 * value for _, value in run["checks"]] for run in model_runs]
    curves = {"cross entropy in training, nats": losses, "exact matches on validation dates, %": checks}
    plot_curves(curves, path, "step", "", share_y=False, n_columns=2)


def plot_lengths(runs: Runs, path: Path) -> None:
    """Write an image of accuracy against text length, and of the fraction of attention on the right field."""
    with drawing(path, (12, 5), "Test dates: mean and range over seeds") as figure:
        panels = figure.subplots(1, 2)
        places = range(len(LENGTHS))
        for number, name in enumerate(distinct(runs)):
            model_runs = select(runs, model=name)
            color, marker = COLOURS[number % len(COLOURS)], "os^vDPX*"[number % 8]
            style = {"color": color, "marker": marker, "markersize": 5, "label": name}
            for axes, key in zip(panels, ("lengths", "share_at_lengths")):
                if key in model_runs[0]:
                    values = 100 * np.array([run[key] for run in model_runs])
                    axes.plot(places, values.mean(axis=0), **style)
                    low, high = values.min(axis=0), values.max(axis=0)
                    axes.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
            if "of_best" in model_runs[0]:
                values = 100 * np.array([run["of_best"]["share_at_lengths"] for run in model_runs]).mean(axis=0)
                panels[1].plot(places, values, "--", color=style["color"], label=f"{name}, best head")
        for axes, label in zip(panels, ("exact matches, %", "weight on the characters of the correct field, %")):
            axes.axvspan(-0.4, BEYOND[0] - 0.5, color="#f0f0f0", zorder=0)
            axes.set_xticks(places, map(title_of, LENGTHS), rotation=30)
            axes.set(xlabel="characters of the text (grey: in training)", ylabel=label, ylim=(-2, 102))
            axes.grid(alpha=0.25)
        panels[0].legend(frameon=False)
        panels[1].legend(frameon=False, fontsize=8)


def plot_multiple_dates(runs: Runs, path: Path) -> None:
    """Write an image of two panels against the number of dates: exact answers, and correct dates, in %."""
    titles = {f"exact answers, % (1 to {TRAINED_DATES} dates in training)": "whole", "correct dates, %": "each"}
    right = lambda name, key: 100 * np.array(of(select(runs, model=name), key))
    curves = {title: {name: (COUNTS, right(name, key)) for name in distinct(runs)} for title, key in titles.items()}
    plot_curves(curves, path, "dates in the text", "", share_y=False, n_columns=2)


def plot_alignments(examples: list[Example], maps: dict[str, list[np.ndarray]], path: Path, n_columns: int = 1) -> None:
    """Write an image of attention heat maps: text characters as columns, ISO characters as rows.

    Letters, and frames of where the weight should be, have the color of their field.

    Args:
        maps: by model, for each example weights (T, S).
    """
    from matplotlib.patches import Rectangle

    pairs = [(name, one, values) for name, arrays in maps.items() for one, values in zip(examples, arrays)]
    panels = [(f"{name}: {one.language}" if len(examples) > 1 else name, one, values) for name, one, values in pairs]
    n_rows = -(-len(panels) // n_columns)
    width = max(len(one.source) for one in examples)
    with drawing(path, (0.19 * width * n_columns + 1.6, 2.5 * n_rows + 0.5)) as figure:
        grid = figure.subplots(n_rows, n_columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        colors = ["black", *(FIELD_COLORS[field] for field in ("day", "month", "year"))]
        for axes, (title, one, values) in zip(grid.flat, panels):
            image = axes.imshow(values[: len(one.iso)], cmap="Greys", vmin=0, vmax=1, aspect="auto")
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_xticks(range(len(one.source)), one.source.replace(" ", "·"), family="monospace", fontsize=9)
            axes.set_yticks(range(len(one.iso)), one.iso, family="monospace", fontsize=9)
            axes.tick_params(length=0)
            for label, field in zip(axes.get_xticklabels(), one.fields):
                label.set_color(colors[field])
            for field, (first, last) in {3: (0, 3), 2: (5, 6), 1: (8, 9)}.items():
                for row in range(first, last + 1):
                    axes.get_yticklabels()[row].set_color(colors[field])
                columns = np.flatnonzero(np.array(one.fields) == field)
                corner = columns[0] - 0.5, first - 0.5
                size = columns[-1] - columns[0] + 1, last - first + 1
                axes.add_patch(
                    Rectangle(corner, *size, fill=False, edgecolor=colors[field], linewidth=1.2, clip_on=False)
                )
        figure.colorbar(image, ax=grid, label="attention weight", shrink=0.6 if n_rows > 1 else 1, aspect=30)
