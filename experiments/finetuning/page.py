"""A page for any browser: what the model answered before and after, side by side."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from experiments.finetuning.report import WAYS, of, pairs
from experiments.finetuning.tasks import TASKS
from tricycle.system.files import atomic_write

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; margin-bottom: 2.5em; }
th, td { border-top: 1px solid #ccc; padding: .5em .7em; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.4 ui-monospace, monospace; }
td:first-child { background: #f6f6f6; }
th:first-child { width: 30%; }
td.wanted { color: #006b4e; }
"""


def write(results: dict[str, Any], path: Path) -> None:
    """One HTML file that needs nothing else."""
    there = pairs(results)
    parts = []
    for task in dict.fromkeys(name for name, _ in there):
        ways = [way for name, way in there if name == task]
        parts.append(f"<h2>{escape(TASKS[task].title)}</h2>")
        parts.append(table(results, task, task, ways))
        parts.append("<p>The same models, asked something else:</p>")
        parts.append(table(results, task, "general", ways))
    title = "What a small model said before and after"
    with atomic_write(path, text=True) as file:
        file.write(f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n')
        file.write(f"<style>{STYLE}</style>\n<h1>{title}</h1>\n")
        file.write("\n".join(parts))
        file.write("\n</html>\n")


def table(results: dict[str, Any], task: str, kind: str, ways: list[str]) -> str:
    """A row for each question.

    Args:
        kind: the task, or "general".
    """
    every = [of(results, task, way)[0]["samples"][kind] for way in ways]
    judged = any(wanted for _, wanted, _ in every[0])
    heads = ["asked", *(["right"] if judged else []), *(WAYS[way] for way in ways)]
    rows = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for samples in zip(*every):
        question, wanted, _ = samples[0]
        cells = [f"<td>{escape(question)}</td>"]
        cells += [f'<td class="wanted">{escape(wanted)}</td>'] if judged else []
        cells += [f"<td>{escape(answer.strip())}</td>" for _, _, answer in samples]
        rows.append("".join(cells))
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
