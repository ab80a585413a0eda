"""Training speed beside PyTorch: python -m benchmarks.train --shape S --peer torch

Forward, loss, backward and AdamW on random tokens. The sides take turns. The limit is the speed of a machine that does
nothing but the products, all at the rate at which it multiplies two matrices of 2,048 x 2,048 numbers, ours or that of
PyTorch, whichever is faster. These products take turns with the others, for a machine's clock may move by a third.
"""

from __future__ import annotations

import argparse
import os
import platform
from datetime import date

from benchmarks.interleave import Schedule
from benchmarks.shapes import SHAPES
from benchmarks.workers import MATMUL_SIZE, SIDES, Worker, time_steps
from tricycle.softmaxes import SOFTMAXES
from tricycle_cli.speed import flops_per_token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S", help="model and batch")
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="whom to compare with")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="of both sides")
    parser.add_argument("--compile", action="store_true", help="add torch.compile as a third side")
    others = [name for name in SOFTMAXES if name != "softmax"]
    parser.add_argument("--softmax", nargs="*", choices=others, default=[], help="add ours with these as further sides")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side")
    Schedule.add_flags(parser)
    arguments = parser.parse_args()
    names = ["tricycle"] + (["torch"] if arguments.peer == "torch" else []) + ["torch-compile"] * arguments.compile
    names += arguments.softmax
    assert set(names) <= set(SIDES)
    config = SHAPES[arguments.shape]
    words = arguments.shape, arguments.precision
    products = ["product", "torch-product"] if "torch" in names else ["product"]
    workers = [Worker(name, arguments.threads, "benchmarks.workers", name, *words) for name in names + products]
    times = dict(zip(names + products, time_steps(workers, Schedule.of(arguments))))
    memory = {worker.side: worker.ask("memory") for worker in workers}
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {arguments.threads} threads")
    for worker in workers:
        if worker.side in names:
            print(f"  {worker.side}: {worker.ask('versions')}")
        worker.close()
    n_tokens = config.batch_size * config.context_window
    speeds = {name: n_tokens / times[name] for name in names}
    print(
        f"shape {arguments.shape}: batch {config.batch_size} x {config.context_window} tokens, "
        f"{arguments.precision}, medians of {Schedule.of(arguments)}"
    )
    rates = {name: 2 * MATMUL_SIZE**3 / times[name] for name in products}
    limit = max(rates.values()) / flops_per_token(config)
    told = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates.items())
    print(f"limit: {limit:,.0f} tokens a second, if all arithmetic went at the best of these: {told} GFLOP/s")
    print(f"{'':<15}{'tokens/s':>10}{'ours / it':>11}{'limit':>8}{'memory MB':>11}")
    for name in names:
        ratio = speeds["tricycle"] / speeds[name]
        columns = f"{speeds[name]:>10,.0f}{ratio:>11.2f}{speeds[name] / limit:>8.2f}"
        print(f"{name:<15}{columns}{memory[name]:>11,.0f}")


if __name__ == "__main__":
    main()
