"""What one operation costs beside its arithmetic: python -m benchmarks.overhead

Forward and backward of a chain of `x = x * b + c` on tensors of one element, where b and c want gradients too: next
to no arithmetic, so the time is the library's own. Each side has a process to itself, so that none pays for what
another has imported, and the sides take turns.
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
from datetime import date
from importlib import metadata, util
from typing import Any

import numpy as np

VALUES = (1.0, 0.999, 0.001)  # x, b and c: no number of steps makes these overflow


def multiply_add_chain(n_steps: int, x: Any, b: Any, c: Any) -> Any:
    for _ in range(n_steps):
        x = x * b + c
    return x


# -------------------------------------------------------------------- the sides
# Each stops when its inputs are there, after the forward, and after the backward, there with the gradients.
def tricycle(n_steps: int) -> Iterator[Any]:
    from tricycle import to_tensor

    inputs: Any = [to_tensor([value]) for value in VALUES]
    yield
    result = multiply_add_chain(n_steps, *inputs)
    yield
    result.backward()
    yield [x.grad.item() for x in inputs]


def torch(n_steps: int) -> Iterator[Any]:
    import torch

    torch.set_num_threads(1)
    inputs: Any = [torch.tensor([value], requires_grad=True) for value in VALUES]
    yield
    result = multiply_add_chain(n_steps, *inputs)
    yield
    result.backward()
    yield [x.grad.item() for x in inputs]


def autograd(n_steps: int) -> Iterator[Any]:
    """HIPS autograd, on NumPy arrays."""
    from autograd import make_vjp

    inputs = [np.array([value], np.float32) for value in VALUES]
    yield
    to_inputs, result = make_vjp(multiply_add_chain, argnum=(1, 2, 3))(n_steps, *inputs)
    yield
    gradients = to_inputs(np.ones_like(result))
    yield [gradient.item() for gradient in gradients]


def micrograd(n_steps: int) -> Iterator[Any]:
    """Python's own numbers, no arrays."""
    from micrograd.engine import Value

    sys.setrecursionlimit(10 * n_steps + 1000)  # its topological sort calls itself for every node
    inputs = [Value(value) for value in VALUES]
    yield
    result = multiply_add_chain(n_steps, *inputs)
    yield
    result.backward()
    yield [x.grad for x in inputs]


SIDES = {side.__name__: side for side in (tricycle, torch, autograd, micrograd)}


def time_chain(side: str, n_steps: int, collector: bool) -> tuple[float, float, list[float]]:
    """Seconds of a forward, seconds of a backward, and the gradients of x, b and c."""
    run = SIDES[side](n_steps)
    next(run)
    gc.collect()  # what an earlier run left behind is not this one's cost
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
    parser = argparse.ArgumentParser(description=__doc__)
    peers = [side for side in SIDES if side != "tricycle"]
    parser.add_argument("--length", type=int, default=10_000, help="steps of the chain, two operations each")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each side")
    parser.add_argument("--peers", nargs="*", choices=peers, default=peers, help="whom to compare with")
    parser.add_argument("--no-collector", action="store_true", help="switch Python's garbage collector off meanwhile")
    arguments = parser.parse_args()
    missing = [side for side in arguments.peers if util.find_spec(side) is None]
    sides = ["tricycle"] + [side for side in arguments.peers if side not in missing]
    spawn = multiprocessing.get_context("spawn")
    workers = {side: ProcessPoolExecutor(1, mp_context=spawn) for side in sides}
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for turn in range(arguments.repeats + 1):
        for side, worker in workers.items():
            *seconds, _ = worker.submit(time_chain, side, arguments.length, not arguments.no_collector).result()
            if turn:  # the first warms up
                times[side].append((seconds[0], seconds[1]))
    for worker in workers.values():
        worker.shutdown()

    import tricycle as library

    versions = [f"Tricycle {library.__version__}"] + [f"{side} {metadata.version(side)}" for side in sides[1:]]
    print(f"{date.today()}, {platform.processor() or platform.machine()}, one thread")
    print(f"  {', '.join(versions)}, NumPy {np.__version__}, Python {platform.python_version()}")
    for side in missing:
        print(f"  {side} is not installed (pip install {side}): left out")
    n_nodes = 2 * arguments.length
    print(
        f"microseconds a node: {n_nodes:,} nodes, medians of {arguments.repeats} runs in turns, "
        f"garbage collector {'off' if arguments.no_collector else 'on'} for all"
    )
    print(f"{'':<15}{'forward':>10}{'backward':>10}{'both':>10}{'it / ours':>11}")
    totals = {side: [sum(run) for run in runs] for side, runs in times.items()}
    for side, runs in times.items():
        medians = [*map(statistics.median, zip(*runs)), statistics.median(totals[side])]
        # within a turn, so that both have the machine in the same mood
        ratio = statistics.median(its / ours for its, ours in zip(totals[side], totals["tricycle"]))
        print(f"{side:<15}{''.join(f'{1e6 * seconds / n_nodes:>10.2f}' for seconds in medians)}{ratio:>11.2f}")


if __name__ == "__main__":
    main()
