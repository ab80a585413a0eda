"""How evenly an update and its moments are shared out among ranks: python -m benchmarks.sharded_updates --shape S M

Each rank's part of an update is made here, one after another, without the others: what it takes, and what is
remembered.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from datetime import date
from functools import partial

import numpy as np

from benchmarks.shapes import SHAPES
from tricycle.distributed.processes import ProcessGroup
from tricycle.distributed.shards import ShardedOptimiser, Shards, n_state_bytes, update_cost
from tricycle.models import GPT
from tricycle.optimisers import Optimiser
from tricycle.tensor import Tensor
from tricycle.training_state import new_optimiser


class FakeRank(ProcessGroup):
    """One of several, of whom the others do not exist: what they would send is not there."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


class LocalShards(Shards):
    """Nothing is sent."""

    def broadcast(self, arrays: object, owners: object) -> None:
        pass


def update_seconds(model: GPT, optimiser: Optimiser, n_times: int) -> float:
    """The median of some updates, after one more."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["S"], help="models")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--times", type=int, default=3, help="timed updates of each rank")
    arguments = parser.parse_args()
    print(f"{date.today()}\n\n| | ms of an update, whole | by rank | MB remembered, whole | by rank |")
    print("|:---|---:|:---|---:|:---|")
    for shape in arguments.shape:
        for name in ("adamw", "muon"):
            config = replace(SHAPES[shape], optimiser=name)
            model, alone = GPT(config), new_optimiser(config)
            whole = update_seconds(model, alone, arguments.times)
            for size in arguments.ranks:
                times, n_bytes = [], []
                for rank in range(size):
                    shards = LocalShards(FakeRank(rank, size), model, partial(update_cost, alone))
                    optimiser = ShardedOptimiser(new_optimiser(config), shards)
                    times.append(update_seconds(model, optimiser, arguments.times))
                    n_bytes.append(n_state_bytes(optimiser))
                cells = [", ".join(f"{1e3 * each:.0f}" for each in times), f"{n_state_bytes(alone) / 1e6:.0f}"]
                cells += [", ".join(f"{each / 1e6:.0f}" for each in n_bytes)]
                print(f"| {shape}, {name}, {size} ranks | {1e3 * whole:.0f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
