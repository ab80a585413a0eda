"""Training speed beside PyTorch: python -m benchmarks.train --shape S --peer torch

Forward, loss, backward and AdamW on random tokens. The sides take turns, a few steps at a time.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from datetime import date

from benchmarks.shapes import SHAPES
from benchmarks.workers import SIDES, Worker

# Threads of the libraries below wait for more work by spinning, for up to a fifth of a second: long enough to
# slow down whoever comes next.
PAUSE = 0.5
# After a pause the first steps are slow, until the system has spread the threads over the cores again. Training
# goes on without pauses, so a turn has some steps that are not timed.
SETTLING_STEPS, STEPS_A_TURN = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S", help="model and batch")
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="whom to compare with")
    parser.add_argument("--compile", action="store_true", help="add torch.compile as a third side")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those")
    arguments = parser.parse_args()
    names = ["tricycle"] + (["torch"] if arguments.peer == "torch" else []) + ["torch-compile"] * arguments.compile
    assert set(names) <= set(SIDES)
    config = SHAPES[arguments.shape]
    workers = [Worker(name, arguments.shape, arguments.threads) for name in names]
    times: dict[str, list[float]] = {name: [] for name in names}
    # memory is read before the matrix product below, which has nothing to do with training
    for turn in range(-(-arguments.steps // STEPS_A_TURN)):
        for worker in workers:
            time.sleep(PAUSE)
            for _ in range(SETTLING_STEPS if turn else arguments.warmup):
                worker.ask("step")
            times[worker.side] += [worker.ask("step")["seconds"] for _ in range(STEPS_A_TURN)]
    memory = {worker.side: worker.ask("memory") for worker in workers}
    rates = {worker.side: worker.ask("matmul") for worker in workers}
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {arguments.threads} threads")
    for worker in workers:
        print(f"  {worker.side}: {worker.ask('versions')}")
        worker.close()
    n_tokens = config.batch_size * config.context_window
    speeds = {name: n_tokens / statistics.median(seconds) for name, seconds in times.items()}
    print(f"shape {arguments.shape}: batch {config.batch_size} x {config.context_window} tokens, "
          f"medians of {len(times['tricycle'])} steps, three in a turn")
    print(f"{'':<15}{'tokens/s':>10}{'ours / it':>11}{'memory MB':>11}{'matmul GFLOP/s':>16}")
    for name in names:
        ratio = speeds["tricycle"] / speeds[name]
        print(f"{name:<15}{speeds[name]:>10,.0f}{ratio:>11.2f}{memory[name]:>11,.0f}{rates[name]:>16,.0f}")


if __name__ == "__main__":
    main()
