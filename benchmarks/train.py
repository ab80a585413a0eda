"""Training speed compared with PyTorch (`python -m benchmarks.train --shape S --peer torch`).

A step is forward pass, loss, backward pass and AdamW on random tokens. The sides are interleaved. Peak is the speed of
training if all its floating-point operations ran at the rate of a 2,048 x 2,048 matrix product, of Tricycle or PyTorch,
whichever is faster. These products are interleaved with the training steps, because a clock may change by a third.
"""

from __future__ import annotations

import argparse

from benchmarks.heading import date_and_processor
from benchmarks.interleave import Schedule, add_comparison_flags
from benchmarks.shapes import SHAPES
from benchmarks.workers import MATMUL_SIZE, Worker, time_steps
from tricycle.softmaxes import SOFTMAXES
from tricycle_cli.speed import flops_per_token


def main() -> None:
    """Parse sys.argv, and print tokens/s, speed-up, fraction of peak and peak MB of each side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="S", help="model and batch")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="float32", help="precision of all sides"
    )
    parser.add_argument("--compile", action="store_true", help="add torch.compile as a third side")
    variants = [name for name in SOFTMAXES if name != "softmax"]
    parser.add_argument(
        "--softmax", nargs="*", choices=variants, default=[], help="softmax variants to add as further sides"
    )
    add_comparison_flags(parser)
    arguments = parser.parse_args()
    names = ["tricycle"] + (["torch"] if arguments.peer == "torch" else []) + ["torch-compile"] * arguments.compile
    names += arguments.softmax
    config = SHAPES[arguments.shape]
    task = arguments.shape, arguments.precision
    matmuls = ["matmul", "torch-matmul"] if "torch" in names else ["matmul"]
    workers = [Worker(name, arguments.threads, "benchmarks.workers", name, *task) for name in names + matmuls]
    times = dict(zip(names + matmuls, time_steps(workers, Schedule.from_arguments(arguments))))
    memory = {worker.side: worker.request("memory") for worker in workers}
    print(f"{date_and_processor()}, {arguments.threads} threads")
    for worker in workers:
        if worker.side in names:
            print(f"  {worker.side}: {worker.request('versions')}")
        worker.close()
    n_tokens = config.batch_size * config.context_window
    speeds = {name: n_tokens / times[name] for name in names}
    print(
        f"shape {arguments.shape}: batch {config.batch_size} x {config.context_window} tokens, "
        f"{arguments.precision}, medians of {Schedule.from_arguments(arguments)}"
    )
    rates = {name: 2 * MATMUL_SIZE**3 / times[name] for name in matmuls}
    peak = max(rates.values()) / flops_per_token(config)
    rate_list = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in rates.items())
    print(f"peak: {peak:,.0f} tokens/s at the highest GEMM throughput: {rate_list} GFLOP/s")
    print("speed-up: Tricycle's speed relative to the row's")
    print(f"{'':<15}{'tokens/s':>10}{'speed-up':>10}{'fraction of peak':>18}{'memory MB':>11}")
    for name in names:
        speed_up = speeds["tricycle"] / speeds[name]
        columns = f"{speeds[name]:>10,.0f}{speed_up:>10.2f}{speeds[name] / peak:>18.2f}"
        print(f"{name:<15}{columns}{memory[name]:>11,.0f}")


if __name__ == "__main__":
    main()
