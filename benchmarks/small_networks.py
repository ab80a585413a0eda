"""Training time of small networks and import time, compared with PyTorch (`python -m benchmarks.small_networks`).

A thousand steps of networks of a tutorial's size in Tricycle and eager PyTorch, and the time that a new Python process
needs to import each library. As in the tutorials, Tricycle's inputs require gradients and PyTorch's do not. Each side
runs in a separate process, and the sides are interleaved.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata, util
from typing import Any

import numpy as np

from benchmarks.heading import date_and_processor
from benchmarks.interleave import run_rounds

N_FEATURES, N_CLASSES = 4, 3
# name: rows of data, hidden size, task ("flowers" is classification with ReLU and cross-entropy, "numbers" regression
# with tanh and mean squared error), optimiser
NETWORKS = {
    "flowers, SGD": (150, 16, "flowers", "sgd"),
    "numbers, SGD": (32, 3, "numbers", "sgd"),
    "numbers, AdamW": (32, 3, "numbers", "adamw"),
}


def random_data(n_rows: int, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs (N, N_FEATURES) and targets: classes (N,) for "flowers", else float32 sums (N, 1)."""
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((n_rows, N_FEATURES)).astype(np.float32)
    if task == "flowers":
        return inputs, generator.integers(0, N_CLASSES, n_rows)
    return inputs, inputs.sum(axis=1, keepdims=True)


# -------------------------------------------------------------------- the sides
def tricycle_step(n_rows: int, width: int, task: str, optimiser_name: str) -> Callable[[], None]:
    """Return a function that makes a training step with Tricycle; `optimiser_name` is "sgd", or else AdamW."""
    from tricycle import to_tensor
    from tricycle.activation import ReLU
    from tricycle.functions import Tanh
    from tricycle.layers import Dense, Sequential
    from tricycle.loss import CrossEntropy, MeanSquaredError
    from tricycle.optimisers import AdamW, StochasticGradientDescent

    x, y = random_data(n_rows, task)
    inputs = to_tensor(x, is_batched=True)
    targets = to_tensor(y, is_batched=True, dtype=int if task == "flowers" else None)
    activation: Any = ReLU() if task == "flowers" else Tanh()
    model = Sequential(Dense(N_FEATURES, width), activation, Dense(width, N_CLASSES if task == "flowers" else 1))
    loss_fn: Any = CrossEntropy() if task == "flowers" else MeanSquaredError()
    optimiser = (StochasticGradientDescent if optimiser_name == "sgd" else AdamW)(learning_rate=1e-2)

    def step() -> None:
        loss_fn(targets, model(inputs)).backward()
        model.update(optimiser)

    return step


def torch_step(n_rows: int, width: int, task: str, optimiser_name: str) -> Callable[[], None]:
    """Return a function that makes a training step with PyTorch on one thread; "sgd", or else AdamW."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    x, y = random_data(n_rows, task)
    inputs, targets = torch.tensor(x), torch.tensor(y)
    activation: Any = nn.ReLU() if task == "flowers" else nn.Tanh()
    last = nn.Linear(width, N_CLASSES if task == "flowers" else 1)
    model = nn.Sequential(nn.Linear(N_FEATURES, width), activation, last)
    loss_fn: Any = nn.CrossEntropyLoss() if task == "flowers" else nn.MSELoss()
    optimiser = (torch.optim.SGD if optimiser_name == "sgd" else torch.optim.AdamW)(model.parameters(), lr=1e-2)

    def step() -> None:
        optimiser.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimiser.step()

    return step


SIDES = {"tricycle": tricycle_step, "torch": torch_step}
_steps: dict[tuple[str, str], Callable[[], None]] = {}


def time_steps(side: str, network: str, n_steps: int) -> float:
    """Return the seconds of `n_steps` training steps in total; the network of a side is built once per process."""
    key = side, network
    if key not in _steps:
        _steps[key] = SIDES[side](*NETWORKS[network])
    step = _steps[key]
    start = time.perf_counter()
    for _ in range(n_steps):
        step()
    return time.perf_counter() - start


def compare_steps(sides: list[str], n_steps: int, repeats: int) -> None:
    """Print median milliseconds of `n_steps` steps by network and side (a process each), and any tricycle / torch."""
    spawn = multiprocessing.get_context("spawn")
    workers = {side: ProcessPoolExecutor(1, mp_context=spawn) for side in sides}
    print(f"milliseconds of {n_steps:,} steps, medians of {repeats} interleaved rounds")
    print(f"{'':<16}" + "".join(f"{side:>10}" for side in sides) + f"{'time / PyTorch':>16}" * (len(sides) > 1))
    for network in NETWORKS:
        run = lambda side, network=network: workers[side].submit(time_steps, side, network, n_steps).result()
        times = run_rounds({side: partial(run, side) for side in sides}, repeats)
        row = "".join(f"{1e3 * statistics.median(times[side]):>10.1f}" for side in sides)
        if len(sides) > 1:
            row += f"{statistics.median(a / b for a, b in zip(times['tricycle'], times['torch'])):>16.2f}"
        print(f"{network:<16}{row}")
    for worker in workers.values():
        worker.shutdown()


def time_import(module: str) -> float:
    """Return the seconds of a new process that imports a module, with bytecode files; CalledProcessError on failure."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment)
    return time.perf_counter() - start


def compare_imports(modules: list[str], repeats: int) -> None:
    """Print the median milliseconds to import each module, minus "numpy" too, which `modules` must contain."""
    times = run_rounds(
        {module: partial(time_import, module) for module in modules}, repeats
    )  # writes bytecode at first
    print(f"\nmilliseconds of a Python process that imports one module, medians of {repeats} interleaved rounds")
    for module in modules:
        difference = statistics.median(a - b for a, b in zip(times[module], times["numpy"]))
        print(f"{module:<16}{1e3 * statistics.median(times[module]):>10.1f}{1e3 * difference:>+10.1f} against numpy")


def main() -> None:
    """Parse sys.argv, and print the milliseconds of training steps and of imports, by library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="training steps of a round")
    parser.add_argument("--repeats", type=int, default=11, help="measured rounds")
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="library to compare with")
    arguments = parser.parse_args()
    peer = ["torch"] if arguments.peer == "torch" and util.find_spec("torch") is not None else []
    versions = "".join(f", {side} {metadata.version(side)}" for side in peer)
    print(f"{date_and_processor()}, NumPy {np.__version__}{versions}, one thread")
    compare_steps(["tricycle", *peer], arguments.steps, arguments.repeats)
    compare_imports(["numpy", "tricycle", *peer], arguments.repeats)


if __name__ == "__main__":
    main()
