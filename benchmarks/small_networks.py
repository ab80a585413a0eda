"""What small things cost: python -m benchmarks.small_networks

A thousand steps of networks of a tutorial's size, beside PyTorch (eager; its data want no gradient, as its users write
them, and ours do, as the tutorial does), and how long a fresh Python takes to import either. Each side has a process to
itself, and the sides take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib import metadata, util
from typing import Any

import numpy as np

N_FEATURES, N_CLASSES = 4, 3
# name: rows of data, width of the hidden layer, "flowers" are told apart (ReLU, cross-entropy), "numbers" are predicted
# (tanh, mean squared error), optimiser
NETWORKS = {
    "flowers, SGD": (150, 16, "flowers", "sgd"),
    "numbers, SGD": (32, 3, "numbers", "sgd"),
    "numbers, AdamW": (32, 3, "numbers", "adamw"),
}


def random_data(n_rows: int, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Random, for the time does not depend on the values."""
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((n_rows, N_FEATURES)).astype(np.float32)
    if task == "flowers":
        return inputs, generator.integers(0, N_CLASSES, n_rows)
    return inputs, inputs.sum(axis=1, keepdims=True)


# -------------------------------------------------------------------- the sides: each gives one step of training
def tricycle_step(n_rows: int, width: int, task: str, optimiser_name: str) -> Callable[[], None]:
    from tricycle import to_tensor
    from tricycle.activation import ReLU
    from tricycle.functions import Tanh
    from tricycle.layers import Dense, Sequential
    from tricycle.loss import CrossEntropy, MeanSquaredError
    from tricycle.optimisers import AdamW, StochasticGradientDescent

    x, y = random_data(n_rows, task)
    inputs = to_tensor(x, is_batched=True)
    truth = to_tensor(y, is_batched=True, dtype=int if task == "flowers" else None)
    activation: Any = ReLU() if task == "flowers" else Tanh()
    model = Sequential(Dense(N_FEATURES, width), activation, Dense(width, N_CLASSES if task == "flowers" else 1))
    loss_fn: Any = CrossEntropy() if task == "flowers" else MeanSquaredError()
    optimiser = (StochasticGradientDescent if optimiser_name == "sgd" else AdamW)(learning_rate=1e-2)

    def step() -> None:
        loss_fn(truth, model(inputs)).backward()
        model.update(optimiser)

    return step


def torch_step(n_rows: int, width: int, task: str, optimiser_name: str) -> Callable[[], None]:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    x, y = random_data(n_rows, task)
    inputs, truth = torch.tensor(x), torch.tensor(y)
    activation: Any = nn.ReLU() if task == "flowers" else nn.Tanh()
    last = nn.Linear(width, N_CLASSES if task == "flowers" else 1)
    model = nn.Sequential(nn.Linear(N_FEATURES, width), activation, last)
    loss_fn: Any = nn.CrossEntropyLoss() if task == "flowers" else nn.MSELoss()
    optimiser = (torch.optim.SGD if optimiser_name == "sgd" else torch.optim.AdamW)(model.parameters(), lr=1e-2)

    def step() -> None:
        optimiser.zero_grad()
        loss_fn(model(inputs), truth).backward()
        optimiser.step()

    return step


SIDES = {side.__name__: side for side in (tricycle_step, torch_step)}
_steps: dict[tuple[str, str], Callable[[], None]] = {}


def time_steps(side: str, network: str, n_steps: int) -> float:
    key = side, network
    if key not in _steps:
        _steps[key] = SIDES[side](*NETWORKS[network])
    step = _steps[key]
    start = time.perf_counter()
    for _ in range(n_steps):
        step()
    return time.perf_counter() - start


def compare_steps(sides: list[str], n_steps: int, repeats: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    workers = {side: ProcessPoolExecutor(1, mp_context=spawn) for side in sides}
    print(f"milliseconds of {n_steps:,} steps, medians of {repeats} turns")
    print(f"{'':<16}" + "".join(f"{side:>10}" for side in sides) + f"{'ours / it':>12}" * (len(sides) > 1))
    for network in NETWORKS:
        times: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(repeats + 1):
            for side, worker in workers.items():
                elapsed = worker.submit(time_steps, side, network, n_steps).result()
                if turn:  # the first warms up
                    times[side].append(elapsed)
        row = "".join(f"{1e3 * statistics.median(times[side]):>10.1f}" for side in sides)
        if len(sides) > 1:
            row += f"{statistics.median(a / b for a, b in zip(times['tricycle'], times['torch'])):>12.2f}"
        print(f"{network:<16}{row}")
    for worker in workers.values():
        worker.shutdown()


def time_import(module: str) -> float:
    """In a Python of its own, whose modules are compiled already, as those of an installed package are."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment)
    return time.perf_counter() - start


def compare_imports(modules: list[str], repeats: int) -> None:
    times: dict[str, list[float]] = {module: [] for module in modules}
    for turn in range(repeats + 1):
        for module in modules:
            elapsed = time_import(module)
            if turn:  # the first compiles
                times[module].append(elapsed)
    print(f"\nmilliseconds of a Python that imports one module and ends, medians of {repeats} turns")
    for module in modules:
        more = statistics.median(a - b for a, b in zip(times[module], times["numpy"]))
        print(f"{module:<16}{1e3 * statistics.median(times[module]):>10.1f}{1e3 * more:>+10.1f} beside numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of training in a turn")
    parser.add_argument("--repeats", type=int, default=11, help="turns that count")
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="who runs beside us")
    arguments = parser.parse_args()
    peer = ["torch"] if arguments.peer == "torch" and util.find_spec("torch") is not None else []
    versions = "".join(f", {side} {metadata.version(side)}" for side in peer)
    print(f"{date.today()}, {platform.processor() or platform.machine()}, NumPy {np.__version__}{versions}, one thread")
    compare_steps(["tricycle", *peer], arguments.steps, arguments.repeats)
    compare_imports(["numpy", "tricycle", *peer], arguments.repeats)


if __name__ == "__main__":
    main()
