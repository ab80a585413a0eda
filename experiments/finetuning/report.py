"""Tables in Markdown and a plot of the fine-tuning study."""

from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from experiments.finetuning.study import OWN_ANSWERS
from experiments.finetuning.tasks import TASKS
from experiments.shared.figures import drawing
from experiments.shared.results import of, select
from experiments.shared.tables import cell, grid, markdown
from tricycle.system.files import atomic_write
from tricycle_lab.plot import COLOURS

Results = dict[str, Any]
METHOD_LABELS = {"before": "before", "lora": "LoRA", "qlora": "QLoRA", "all": "all weights"}
SCORES = {  # what the table shows of a task, in percent
    "sums": ("right", "to the letter", "new steps", "other wording"),
    "docstrings": ("overlap", "the same"),
    "voice": ("copied",),
}
TEXTS = (*TASKS, "captions", "reviews", OWN_ANSWERS)


def results_of(results: Results, task: str, method: str) -> list[Results]:
    """Return the result of "before" as a list of one, or those of a task and method by seed; [] if none."""
    return [results["before"]] if method == "before" else select(results["runs"], task=task, method=method)


def pairs(results: Results) -> list[tuple[str, str]]:
    """Return the pairs of task and method that have results, before fine-tuning first."""
    return [
        (task, method)
        for task in TASKS
        for method in METHOD_LABELS
        if results_of(results, task, method) and any(run["task"] == task for run in results["runs"])
    ]


# -------------------------------------------------------------------- tables
def main_table(results: Results) -> str:
    """Return the Markdown table of held-out scores before and after fine-tuning, and of costs, by task."""
    rows = []
    for task, method in pairs(results):
        method_runs = results_of(results, task, method)
        row = [f"{TASKS[task].title}, {METHOD_LABELS[method]}", cell(of(method_runs, "bits", task), 3)]
        scores = [score(method_runs, task, name) for name in SCORES[task][:2]]
        row += [*scores, ""][:2]
        row += ["", "", ""] if method == "before" else times(method_runs)
        rows.append(row)
    return markdown(["", "held-out bits per byte", "answers, %", "", "updates", "minutes", "CPU minutes"], rows)


def score(runs: list[Results], task: str, name: str) -> str:
    """Return the table cell "NAME MEAN" of one score of the runs in percent."""
    return f"{name} {cell(of(runs, 'scores', task, name), 1, 100)}"


def sums_table(results: Results) -> str:
    """Return the Markdown table of correct sums in percent by method and group of questions."""
    methods = {
        METHOD_LABELS[method]: results_of(results, "sums", method) for task, method in pairs(results) if task == "sums"
    }
    return grid(methods, SCORES["sums"], lambda method_runs, name: of(method_runs, "scores", "sums", name), 1, 100)


def times(runs: list[Results]) -> list[str]:
    """Return the table cells [updates, training minutes, CPU minutes of the entire command] of some runs."""
    updates = sorted({run["updates"] for run in runs})
    minutes = [cell([run[name] / 60 for run in runs], 1) for name in ("training_seconds", "cpu_seconds")]
    return ["-".join(map(str, updates)), *minutes]


def forgetting_table(results: Results) -> str:
    """Return the Markdown table of bits per byte of all texts before and after each training."""
    rows = []
    rows.append(["before", *(cell(results["before"]["bits"][text], 3) for text in TEXTS)])
    for task, method in pairs(results):
        if method != "before":
            cells = [cell(of(results_of(results, task, method), "bits", text), 3) for text in TEXTS]
            cells = [f"*{value}*" if text == task else value for text, value in zip(TEXTS, cells)]
            rows.append([f"{TASKS[task].title}, {METHOD_LABELS[method]}", *cells])
    return markdown(["", *map(title_of, TEXTS)], rows)


def title_of(text: str) -> str:
    """Return the title of a text for tables and plots: that of a task, else the text's name itself."""
    return TASKS[text].title if text in TASKS else text


def tables(results: Results) -> dict[str, str]:
    """Return the study's Markdown tables by title; that of sums only if sums were trained."""
    titled = {"Held-out scores before and after fine-tuning": main_table(results)}
    if any(task == "sums" for task, _ in pairs(results)):
        titled["Correct sums, %"] = sums_table(results)
    return titled | {"Bits per byte of other texts (training tasks in italics)": forgetting_table(results)}


# -------------------------------------------------------------------- the picture
def plot(results: Results, path: Path) -> None:
    """Write an image: held-out bits per byte of each task, % of correct sums, and the increase on other texts."""
    with drawing(path, (12, 4.6)) as figure:
        left, middle, right = figure.subplots(1, 3, width_ratios=(3, 2, 5))
        tasks = [task for task in TASKS if any(run["task"] == task for run in results["runs"])]
        for number, (method, label) in enumerate(METHOD_LABELS.items()):
            there = [(place, task) for place, task in enumerate(tasks) if results_of(results, task, method)]
            values = [[run["bits"][task] for run in results_of(results, task, method)] for _, task in there]
            bars(left, [place for place, _ in there], values, number, label)
        left.set_xticks(range(len(tasks)), [TASKS[task].title.replace(" ", "\n", 1) for task in tasks])
        left.set(ylabel="bits per byte", title="held-out texts")
        if "sums" in tasks:
            names = SCORES["sums"][:1] + SCORES["sums"][2:]
            for number, method in enumerate(METHOD_LABELS):
                method_runs = results_of(results, "sums", method)
                values = [[100 * run["scores"]["sums"][name] for run in method_runs] for name in names]
                bars(middle, list(range(len(names))), values if method_runs else [], number)
            middle.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
        middle.set(ylabel="%", title="correct sums", ylim=(0, 100))
        plot_forgetting(right, results)
        for axes in (left, middle, right):
            axes.grid(alpha=0.25, axis="y")
            axes.set_axisbelow(True)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc="outside lower left", ncols=4)
        figure.legend(*right.get_legend_handles_labels(), frameon=False, loc="outside lower right", ncols=3)


def bars(axes: Any, places: list[int], groups: list[list[float]], number: int, label: str | None = None) -> None:
    """Draw on `axes` a bar of the mean of each group, with a point per seed; `number` sets offset and color."""
    for place, values in zip(places, groups):
        x = place + 0.21 * (number - 1.5)
        axes.bar(x, np.mean(values), 0.2, color=COLOURS[number], label=label)
        label = None
        if len(values) > 1:
            axes.plot(np.full(len(values), x), values, "o", color="black", markersize=3)


def plot_forgetting(axes: Any, results: Results) -> None:
    """Plot on `axes` the increase of bits per byte on other texts, in percent."""
    methods = [(task, method) for task, method in pairs(results) if method != "before"]
    markers = dict(zip(TASKS, "os^"))
    for number, (task, method) in enumerate(methods):
        texts = [(place, text) for place, text in enumerate(TEXTS) if text != task]
        before = results["before"]["bits"]
        method_runs = results_of(results, task, method)
        after = {text: np.mean([run["bits"][text] for run in method_runs]) for _, text in texts}
        changes = [100 * (after[text] / before[text] - 1) for _, text in texts]
        x = [place + 0.1 * (number - (len(methods) - 1) / 2) for place, _ in texts]
        color = COLOURS[list(METHOD_LABELS).index(method)]
        axes.plot(x, changes, markers[task], color=color, markersize=7)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(TEXTS)), [title_of(text).replace(" ", "\n", 1) for text in TEXTS])
    axes.set(ylabel="increase of bits per byte, %", title="forgetting")
    for task in dict.fromkeys(task for task, _ in methods):
        axes.plot([], [], markers[task], color="grey", markersize=7, label=f"after {TASKS[task].title}")


# -------------------------------------------------------------------- the page
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; margin-bottom: 2.5em; }
th, td { border-top: 1px solid #ccc; padding: .5em .7em; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace; }
td:first-child { background: #f6f6f6; }
th:first-child { width: 30%; }
td.reference { color: #006b4e; }
"""


def write_page(results: Results, path: Path) -> None:
    """Write the HTML page of answers before and after fine-tuning; an existing file is replaced."""
    there = pairs(results)
    parts = []
    for task in dict.fromkeys(name for name, _ in there):
        methods = [method for name, method in there if name == task]
        parts.append(f"<h2>{escape(TASKS[task].title)}</h2>")
        parts.append(page_table(results, task, task, methods))
        parts.append("<p>Answers of the same models to other questions:</p>")
        parts.append(page_table(results, task, "general", methods))
    title = "Answers of a small model before and after fine-tuning"
    with atomic_write(path, text=True) as file:
        file.write(f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n')
        file.write(f"<style>{STYLE}</style>\n<h1>{title}</h1>\n")
        file.write("\n".join(parts))
        file.write("\n</html>\n")


def page_table(results: Results, task: str, kind: str, methods: list[str]) -> str:
    """Return an HTML table of questions, references if there are any, and the answers of each method.

    Args:
        kind: the task, or "general".
    """
    every = [results_of(results, task, method)[0]["samples"][kind] for method in methods]
    judged = any(reference for _, reference, _ in every[0])
    heads = ["question", *(["reference"] if judged else []), *(METHOD_LABELS[method] for method in methods)]
    rows = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for samples in zip(*every):
        question, reference, _ = samples[0]
        cells = [f"<td>{escape(question)}</td>"]
        cells += [f'<td class="reference">{escape(reference)}</td>'] if judged else []
        cells += [f"<td>{escape(answer.strip())}</td>" for _, _, answer in samples]
        rows.append("".join(cells))
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
