"""Show when heads appear during training: the best scores of heads at each evaluation of runs with --score-heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from tricycle_cli.flags import parse
from tricycle_cli.run import read_metrics
from tricycle_lab.head_scores import HeadScores
from tricycle_lab.look.runs import SCORES
from tricycle_lab.plot import plot_curves, require_matplotlib


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The flags of `tricycle inspect scores`."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """folders of runs that were started with `tricycle train --score-heads`, also while they train"""
    out: Path | None = None
    """a PNG file to draw (needs matplotlib)"""


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle inspect scores`: print and draw the scores and the held-out loss against training steps."""
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    if not arguments.folders:
        raise ValueError("expected one or more RUN, folders of runs with --score-heads, got none")
    if arguments.out is not None:
        require_matplotlib("--out")
    curves = {}
    for folder in arguments.folders:
        rows = read_scores(folder)
        print(f"{folder}\n   step  held-out loss  {'  '.join(name.replace('_', ' ') for name in HeadScores._fields)}")
        for step, loss, *scores in rows:
            cells = "  ".join(f"{value:{len(name)}.4f}" for name, value in zip(HeadScores._fields, scores))
            print(f"{step:7g}  {loss:13.4f}  {cells}")
        steps, _, *columns = zip(*rows)
        curves[str(folder)] = {
            name.replace("_", " "): (steps, column) for name, column in zip(HeadScores._fields, columns)
        }
    if arguments.out is not None:
        plot_curves(curves, arguments.out, "step", "score of the best head")
        print(arguments.out)


def read_scores(folder: Path) -> list[tuple[float, ...]]:
    """Return (step, held-out loss, best head scores) of each evaluation of a run; ValueError if there is none.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no evaluation with head scores.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a run folder, there is no such folder")
    names = ("step", "held_out_loss", *SCORES)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if all(name in line for name in names)]
    rows: list[tuple[float, ...]] = [tuple(line[name] for name in names) for line in lines]
    sound = [row for row in rows if all(type(value) in (int, float) and math.isfinite(value) for value in row)]
    if not sound:
        raise ValueError(
            f"{folder}: expected a run of `tricycle train --score-heads` with at least one evaluation "
            "(every --eval-interval updates), got no head scores in its metrics"
        )
    return sound
