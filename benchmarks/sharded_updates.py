"""Balance of the sharded optimizer over ranks (`python -m benchmarks.sharded_updates --shape S M`).

The benchmark makes the part of an update of each rank in this process, one after another, and measures its time and the
size of its optimizer state.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.heading import date_and_processor
from benchmarks.shapes import SHAPES
from tricycle.distributed.processes import ProcessGroup
from tricycle.distributed.shards import ShardedOptimiser, Shards, n_state_bytes, update_cost
from tricycle.models import GPT
from tricycle.optimisers import Optimiser
from tricycle.tensor import Tensor
from tricycle.training_state import new_optimiser


class FakeRank(ProcessGroup):
    """A rank of a process group whose other ranks do not exist; it receives nothing from them."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


class LocalShards(Shards):
    """Shards that do not send updated parameters."""

    def broadcast(self, arrays: object, owners: object) -> None:
        """Do nothing, because the other ranks do not exist."""


def update_seconds(model: GPT, optimiser: Optimiser, n_times: int) -> float:
    """Set random gradients, update the model n_times + 1 times, and return the median seconds without the first."""
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.grad = Tensor(rng.standard_normal(parameter.shape, np.float32))
    times = []
    for _ in range(n_times + 1):
        start = time.perf_counter()
        optimiser.update(model.named_parameters())
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    """Parse sys.argv, and print a Markdown table of update ms and optimizer state MB, of one process and by rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["S"], help="model shapes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--times", type=int, default=3, help="timed updates of each rank")
    arguments = parser.parse_args()
    print(f"{date_and_processor()}\n")
    print("| | update (ms), one process | by rank | optimizer state (MB), one process | by rank |")
    print("|:---|---:|:---|---:|:---|")
    for shape in arguments.shape:
        for name in ("adamw", "muon"):
            config = replace(SHAPES[shape], optimiser=name)
            model, unsharded = GPT(config), new_optimiser(config)
            unsharded_seconds = update_seconds(model, unsharded, arguments.times)
            for size in arguments.ranks:
                times, n_bytes = [], []
                for rank in range(size):
                    shards = LocalShards(FakeRank(rank, size), model, partial(update_cost, unsharded))
                    optimiser = ShardedOptimiser(new_optimiser(config), shards)
                    times.append(update_seconds(model, optimiser, arguments.times))
                    n_bytes.append(n_state_bytes(optimiser))
                cells = [f"{1e3 * unsharded_seconds:.0f}", ", ".join(f"{1e3 * seconds:.0f}" for seconds in times)]
                cells += [f"{n_state_bytes(unsharded) / 1e6:.0f}", ", ".join(f"{n / 1e6:.0f}" for n in n_bytes)]
                print(f"| {shape}, {name}, {size} ranks | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
