"""Show the pooling weights of text classifiers: an HTML page and a plot."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.shared import pages
from experiments.shared.classification import Outcome, Problem
from experiments.shared.figures import drawing
from tricycle import kernels

PAGE = Path(__file__).with_name("pooling_weights.html")
ACCENT, GOOD, BAD = "#f0962d", "#006b4e", "#a8320a"
RIGHT, WRONG = "✓", "✗"
LABEL = 28  # characters of the column that says which model
CHOSEN = 5  # a stream of random numbers, beside those of classification.py


Line = tuple[str, list[tuple[int, str, float]]]  # a label, and tokens with their column and shade


class Answer(NamedTuple):
    """A model's prediction for a text: pooling weights of the tokens, the predicted class and its probability."""

    weights: np.ndarray
    answer: int
    probability: float


class Item(NamedTuple):
    """A text with the answers of all models."""

    tokens: Sequence[str]
    gaps: Sequence[str]  # the text before each token
    unknown: Sequence[bool]  # a mask of unknown tokens
    label: int  # the true class
    answers: dict[str, Answer]  # the answer of each model, by name


def choose(right: np.ndarray, labels: np.ndarray, each: int, generator: np.random.Generator) -> list[int]:
    """Return random indices of texts that all models have right, then some, none; at most `each` per kind and class.

    Args:
        right: (M, N) whether each of M models is right.
        labels: (N,).
        each: the most of each class and kind.
    """
    kinds = np.where(right.all(axis=0), 0, np.where(right.any(axis=0), 1, 2))
    chosen: list[int] = []
    for kind in range(3):
        for label in np.unique(labels):
            there = np.flatnonzero((kinds == kind) & (labels == label))
            chosen += generator.permutation(there)[:each].tolist()
    return chosen


def new_items(
    problem: Problem, outcome: Outcome, gaps: Callable[[int], Sequence[str]], each: int, seed: int
) -> list[Item]:
    """Return Items of random test texts: all models right, some, then none; at most `each` of these kinds and class.

    Args:
        gaps: returns the text before each token of the text with this index in the problem.
        each: as of `choose`.
    """
    labels = problem.labels[outcome.where]
    predictions = {name: predicted.logits.argmax(axis=1) for name, predicted in outcome.predicted.items()}
    right = np.array([answer == labels for answer in predictions.values()])
    items = []
    for i in choose(right, labels, each, np.random.default_rng((CHOSEN, seed))):
        answers = {}
        for name, predicted in outcome.predicted.items():
            answer = int(predictions[name][i])
            probability = float(np.exp(kernels.log_softmax(predicted.logits[i])[answer]))
            answers[name] = Answer(predicted.weights[i], answer, probability)
        number = int(outcome.where[i])
        items.append(Item(problem.tokens[number], gaps(number), (~outcome.known[i]).tolist(), int(labels[i]), answers))
    return items


def write_page(path: Path, title: str, note: str, classes: Sequence[str], items: Sequence[Item]) -> None:
    """Write a self-contained HTML page of texts with colored words, a column per model; ValueError without texts.

    Raises:
        ValueError: no text, or weights that do not fit the tokens.
    """
    if not items:
        raise ValueError("write_page: expected at least one text")
    models, packed = list(items[0].answers), []
    for item in items:
        answers: list[dict[str, Any]] = []
        for name in models:
            weights, answer, probability = item.answers[name]
            if len(weights) != len(item.tokens):
                raise ValueError(f"write_page: expected {len(item.tokens)} weights of {name}, got {len(weights)}")
            rounded = [round(float(weight), 4) for weight in weights]
            answers.append({"weights": rounded, "answer": int(answer), "probability": round(float(probability), 4)})
        texts = {"tokens": list(item.tokens), "gaps": list(item.gaps)}
        unknown = [int(flag) for flag in item.unknown]
        packed.append({**texts, "unknown": unknown, "label": int(item.label), "seen": answers})
    page = {"title": title, "note": note, "classes": list(classes), "models": models, "items": packed}
    pages.write_page(PAGE, path, page)


# -------------------------------------------------------------------- the picture
def evenly_spaced(items: Sequence[Item], n: int) -> list[Item]:
    """Return n > 1 evenly spaced items, with the first and the last; items repeat if n > len(items)."""
    return [items[i * (len(items) - 1) // (n - 1)] for i in range(n)]


def plot_texts(
    path: Path, classes: Sequence[str], items: Sequence[Item], n_columns: int = 92, n_blocks: int = 1
) -> None:
    """Write a PNG of texts with tokens shaded by pooling weight, a line or more for each model.

    Args:
        n_columns: characters of a line.
        n_blocks: texts side by side.
    """
    from matplotlib.patches import Rectangle

    blocks: list[list[Line]] = [[] for _ in range(n_blocks)]
    per_block = -(-len(items) // n_blocks)
    for i, item in enumerate(items):
        blocks[i // per_block] += item_lines(item, classes, n_columns)
    width, height = LABEL + n_columns + 2, max(map(len, blocks)) + 0.2
    size = 11 * 0.99 * 72 / (width * n_blocks) / 0.602  # DejaVu Sans Mono is 0.602 as wide as high
    with drawing(path, (11, 11 * height * 2.1 / (width * n_blocks)), layout="none") as figure:
        axes = figure.add_axes((0.005, 0, 0.99, 1))
        axes.set(xlim=(0, width * n_blocks), ylim=(height - 0.2, -0.2))
        axes.set_axis_off()
        for block, lines in enumerate(blocks):
            for y, (label, row) in enumerate(lines):
                x, color = block * width, BAD if label.startswith(WRONG) else GOOD if row else "black"
                weight = "normal" if row else "bold"
                axes.text(x, y + 0.5, label, fontsize=0.88 * size, va="center", color=color, weight=weight)
                for column, token, shade in row:
                    corner = x + LABEL + column, y + 0.06
                    axes.add_patch(Rectangle(corner, len(token), 0.88, color=ACCENT, alpha=shade, linewidth=0))
                    axes.text(corner[0], y + 0.5, token, fontsize=size, va="center", family="DejaVu Sans Mono")


def item_lines(item: Item, classes: Sequence[str], n_columns: int) -> list[Line]:
    """Return an item's (label, tokens) lines: its class, each model's answer and weights, and an empty line."""
    lines: list[Line] = [(classes[item.label], [])]
    for name, (weights, answer, probability) in item.answers.items():
        mark = RIGHT if answer == item.label else WRONG
        verdict = f"{mark} {name}: {classes[answer]} ({probability:.0%})"
        for i, row in enumerate(wrap(item.tokens, item.gaps, weights, n_columns)):
            lines.append((verdict if i == 0 else "", row))
    return [*lines, ("", [])]


def wrap(
    tokens: Sequence[str], gaps: Sequence[str], weights: np.ndarray, n_columns: int
) -> list[list[tuple[int, str, float]]]:
    """Return lines of (column, token, square root of weight); a token past `n_columns` starts a new line."""
    rows: list[list[tuple[int, str, float]]] = [[]]
    column = 0
    for token, gap, weight in zip(tokens, gaps, weights):
        column += len(gap)
        if column + len(token) > n_columns and rows[-1]:
            rows.append([])
            column = 0
        rows[-1].append((column if rows[-1] or not gap else 0, token, float(np.sqrt(weight))))
        column = rows[-1][-1][0] + len(token)
    return rows
