"""Fit linear probes to the activations of each layer, to find those that separate labels (needs scikit-learn)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tricycle_cli.flags import parse
from tricycle_cli.inspect_flags import InspectFlags
from tricycle_lab.linear_probe import collect_activations, probe_accuracy, read_labeled_texts
from tricycle_lab.plot import plot_curves


@dataclass(frozen=True, kw_only=True)
class Arguments(InspectFlags):
    """The flags of `tricycle inspect probe`."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """a text file with a label, a tab and a text in each line"""
    sites: tuple[str, ...] = ()
    """names or patterns of layers, such as "blocks.*.mlp"; by default the residual stream after each layer"""
    folds: int = 5
    """the parts of the texts, each of which is held out once"""
    penalty: float = 1.0
    """the L2 penalty of the logistic regression"""


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect probe`: print and draw held-out accuracy by layer; ValueError for an invalid file."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    if not 0 < arguments.penalty < math.inf:
        raise ValueError(f"--penalty: expected a number above 0, got {arguments.penalty}")
    lines = read_labeled_texts(arguments.file)
    loaded, inspectable = arguments.load()
    labels = [label for label, _ in lines]
    texts = [inspectable.encode_input(text) for _, text in lines]
    activations = collect_activations(loaded.model, texts, *arguments.sites)
    accuracies = {
        name: probe_accuracy(rows, labels, arguments.folds, arguments.penalty) for name, rows in activations.items()
    }
    largest = max(Counter(labels).values()) / len(labels)
    print(f"accuracy on held-out texts; the most frequent label has {largest:.4f}\n")
    for name, accuracy in accuracies.items():
        print(f"{accuracy:8.4f}  {name}")
    if arguments.out is not None:
        last = len(loaded.model.blocks) - 1
        curves = site_curves(accuracies, last) | {"most frequent label": ([0, last], [largest, largest])}
        drawn = {"linear probes": curves}
        plot_curves(drawn, arguments.out, "layer", "accuracy on held-out texts", title=inspectable.title)
        print(arguments.out)


def site_curves(accuracies: Mapping[str, float], last: int) -> dict[str, tuple[list[int], list[float]]]:
    """Return (layers, accuracies) of each kind of site, such as "blocks.*.mlp"; outside of blocks a horizontal line.

    Args:
        accuracies: by the name of the site.
        last: the index of the last layer.
    """
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for name, accuracy in accuracies.items():
        number = re.search(r"\d+", name)
        layers, values = curves.setdefault(re.sub(r"\d+", "*", name, count=1), ([], []))
        layers += [0, last] if number is None else [int(number[0])]
        values += [accuracy, accuracy] if number is None else [accuracy]
    return curves
