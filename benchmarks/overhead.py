"""Overhead of an operation in each autodiff library (`python -m benchmarks.overhead`).

Forward and backward pass of a chain of `x = x * b + c` on one-element tensors, with gradients of x, b and c. The
arithmetic is negligible, so the time is the library's overhead. Each side runs in a separate process, unaffected by the
imports of the others, and the sides are interleaved.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata, util
from typing import Any

import numpy as np

from benchmarks.heading import date_and_processor
from benchmarks.interleave import run_rounds

VALUES = (1.0, 0.999, 0.001)  # x, b and c: these do not overflow for any number of steps


def multiply_add_chain(n_steps: int, x: Any, b: Any, c: Any) -> Any:
    """Return x after `n_steps` updates x = x * b + c."""
    for _ in range(n_steps):
        x = x * b + c
    return x


# -------------------------------------------------------------------- the sides
# Each generator yields after the creation of its inputs, after the forward pass, and the gradients after the backward
# pass.
def tricycle(n_steps: int) -> Iterator[Any]:
    """Run the chain with Tricycle; yield None after setup and after forward, then the gradients [x, b, c]."""
    from tricycle import to_tensor

    inputs: Any = [to_tensor([value]) for value in VALUES]
    yield
    result = multiply_add_chain(n_steps, *inputs)
    yield
    result.backward()
    yield [x.grad.item() for x in inputs]


def torch(n_steps: int) -> Iterator[Any]:
    """Run the chain with PyTorch on one thread; yield None after setup and forward, then the gradients [x, b, c]."""
    import torch

    torch.set_num_threads(1)
    inputs: Any = [torch.tensor([value], requires_grad=True) for value in VALUES]
    yield
    result = multiply_add_chain(n_steps, *inputs)
    yield
    result.backward()
    yield [x.grad.item() for x in inputs]


def autograd(n_steps: int) -> Iterator[Any]:
    """Run the chain with HIPS autograd; yield None after setup and after forward, then the gradients [x, b, c]."""
    from autograd import make_vjp

    inputs = [np.array([value], np.float32) for value in VALUES]
    yield
    vjp, result = make_vjp(multiply_add_chain, argnum=(1, 2, 3))(n_steps, *inputs)
    yield
    gradients = vjp(np.ones_like(result))
    yield [gradient.item() for gradient in gradients]


def micrograd(n_steps: int) -> Iterator[Any]:
    """Run the chain by micrograd, recursion limit raised; yield None at setup, forward, then gradients [x, b, c]."""
    from micrograd.engine import Value

    sys.setrecursionlimit(10 * n_steps + 1000)  # its topological sort is recursive
    inputs = [Value(value) for value in VALUES]
    yield
    result = multiply_add_chain(n_steps, *inputs)
    yield
    result.backward()
    yield [x.grad for x in inputs]


SIDES = {side.__name__: side for side in (tricycle, torch, autograd, micrograd)}


def time_chain(side: str, n_steps: int, collector: bool) -> tuple[float, float, list[float]]:
    """Return (forward seconds, backward seconds, gradients [x, b, c]) of a run of a side in SIDES; leave gc enabled.

    Args:
        collector: keep Python's garbage collector enabled.
    """
    run = SIDES[side](n_steps)
    next(run)
    gc.collect()  # garbage of an earlier run must not be collected in this one
    if not collector:
        gc.disable()
    start = time.perf_counter()
    next(run)
    middle = time.perf_counter()
    gradients = next(run)
    end = time.perf_counter()
    gc.enable()
    return middle - start, end - middle, gradients


def main() -> None:
    """Parse sys.argv, measure all installed sides, and print microseconds per node, forward and backward."""
    parser = argparse.ArgumentParser(description=__doc__)
    peers = [side for side in SIDES if side != "tricycle"]
    parser.add_argument("--length", type=int, default=10_000, help="steps of the chain, with two operations each")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each side")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="library to compare with")
    parser.add_argument("--no-collector", action="store_true", help="disable Python's garbage collector in timed runs")
    arguments = parser.parse_args()
    missing = [side for side in arguments.peers if util.find_spec(side) is None]
    sides = ["tricycle"] + [side for side in arguments.peers if side not in missing]
    spawn = multiprocessing.get_context("spawn")
    workers = {side: ProcessPoolExecutor(1, mp_context=spawn) for side in sides}

    def run(side: str) -> tuple[float, float]:
        return workers[side].submit(time_chain, side, arguments.length, not arguments.no_collector).result()[:2]

    times = run_rounds({side: partial(run, side) for side in sides}, arguments.repeats)
    for worker in workers.values():
        worker.shutdown()

    import tricycle as library

    versions = [f"Tricycle {library.__version__}"] + [f"{side} {metadata.version(side)}" for side in sides[1:]]
    print(f"{date_and_processor()}, one thread")
    print(f"  {', '.join(versions)}, NumPy {np.__version__}, Python {platform.python_version()}")
    for side in missing:
        print(f"  {side} is omitted, because it is not installed (pip install {side})")
    n_nodes = 2 * arguments.length
    print(
        f"microseconds per node: {n_nodes:,} nodes, medians of {arguments.repeats} interleaved runs, "
        f"garbage collector {'off' if arguments.no_collector else 'on'} for all"
    )
    print(f"{'':<15}{'forward':>10}{'backward':>10}{'both':>10}{'time / Tricycle':>17}")
    totals = {side: [sum(run) for run in runs] for side, runs in times.items()}
    for side, runs in times.items():
        medians = [*map(statistics.median, zip(*runs)), statistics.median(totals[side])]
        # ratios within a round, because the speed of the machine changes over time
        ratio = statistics.median(other / own for other, own in zip(totals[side], totals["tricycle"]))
        print(f"{side:<15}{''.join(f'{1e6 * seconds / n_nodes:>10.2f}' for seconds in medians)}{ratio:>17.2f}")


if __name__ == "__main__":
    main()
