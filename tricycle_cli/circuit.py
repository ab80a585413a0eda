"""Find the heads of a model that solve a small task, and how faithful the strongest of them are to the whole model.

The heads are ordered by attribution patching, or with --exact by activation patching, on prompts of the task. Then
only the first n heads see the prompt, and all others keep their results of the corrupted prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tricycle.configs.validated import OneOf
from tricycle_cli.flags import parse
from tricycle_cli.inspect_flags import InspectFlags
from tricycle_lab.circuits import TASKS, rank_heads
from tricycle_lab.measures import circuit_tables
from tricycle_lab.plot import plot_curves

Task = OneOf[str, TASKS]


@dataclass(frozen=True, kw_only=True)
class Arguments(InspectFlags):
    """The flags of `tricycle inspect circuit`."""

    task: Task = "indirect-object"
    """names of receivers, years after a year, or closing brackets"""
    prompts: int = 10
    """pairs of prompts; the first half orders the heads, and the second half measures them"""
    exact: bool = False
    """order the heads by exact patching, which takes a run for each head"""
    top: int = 10
    """the number of heads of the table"""


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect circuit`: print the strongest heads and the faithfulness of the first n; --out plots it."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    if arguments.prompts < 2:
        raise ValueError(f"--prompts: expected at least 2, got {arguments.prompts}")
    if arguments.top < 1:
        raise ValueError(f"--top: expected a number above 0, got {arguments.top}")
    _, inspectable = arguments.load()
    ranked, *_, measured = circuit_tables(inspectable, arguments.task, arguments.prompts, arguments.exact)
    print("   effect  layer  head")
    for layer, head in rank_heads(ranked.values)[: arguments.top]:
        print(f"{ranked.values[layer, head]:9.4f}  {layer:5}  {head:4}")
    print("\nheads  faithfulness")
    for count, value in zip(measured.columns, measured.values.mean(axis=0)):
        print(f"{count:>5}  {value:12.4f}")
    if arguments.out is not None:
        x = np.array([*map(int, measured.columns)]) + 1
        drawn = {arguments.task: {"faithfulness of prompts, mean and range": (x, measured.values)}}
        plot_curves(drawn, arguments.out, "heads + 1", "faithfulness", title=inspectable.title, log="x")
        print(arguments.out)
