"""Measure one layer of each kind against the sequence length: time, memory, multiplications and sequential steps."""

import time
import tracemalloc
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.comparison.chains import longest_path, shortest_path
from experiments.comparison.layers import LAYERS
from experiments.comparison.settings import COST, Settings
from experiments.shared.results import rounded
from experiments.shared.training import stream
from tricycle.layers import Layer, Sequential
from tricycle.tensor import Tensor

LEAST_SECONDS = 0.02  # short calls are repeated for so long: clocks are coarse
CHAIN_WIDTH = 4  # chains are as long at any width


def measure(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return by layer lists over settings.sizes: "cpu" and "wall" ms of each round, "memory" MiB, and others.

    Returns:
        "cpu" and "wall": milliseconds of forward and backward, a list for each round; "memory": the most MiB that
        these held beside weights and input; "multiplications": in the products of matrices of the forward pass;
        "sequential": the longest chain of products in it; "exponents" of all: see `exponents`.
    """
    costs: dict[str, dict[str, Any]] = {name: {"cpu": [], "wall": []} for name in LAYERS}
    cases = [(name, n) for n in settings.sizes for name in LAYERS]  # neighbours in time share the machine's moods
    repeats: dict[tuple[str, int], int] = {}
    with tqdm(total=len(cases) * (settings.rounds + 2), desc="costs", unit="measurement") as bar:
        for name, n in cases:
            layer, x = new_case(name, n, settings.width)
            costs[name].setdefault("memory", []).append(rounded(peak_memory(layer, x) / 2**20))
            repeats[name, n] = max(1, round(LEAST_SECONDS / max(1e-4, time_pass(layer, x, 1)[0])))
            bar.update()
        for _ in range(settings.rounds):
            for values in costs.values():
                values["cpu"].append([])
                values["wall"].append([])
            for name, n in cases:
                cpu, wall = time_pass(*new_case(name, n, settings.width), repeats[name, n])
                costs[name]["cpu"][-1].append(rounded(1000 * cpu))
                costs[name]["wall"][-1].append(rounded(1000 * wall))
                bar.update()
        for name, n in cases:
            chain, multiplications = longest_path(new_layer(name, n, settings.width), n, settings.width)
            costs[name].setdefault("sequential", []).append(chain)
            costs[name].setdefault("multiplications", []).append(multiplications)
            bar.update()
    for values in costs.values():
        values["exponents"] = {key: exponents(settings.sizes, value) for key, value in values.items()}
    return costs


def new_layer(name: str, n_tokens: int, width: int) -> Layer:
    """Return a new layer by its name in LAYERS, with the same random weights at each call."""
    return LAYERS[name](width, n_tokens, stream(COST))


def new_case(name: str, n_tokens: int, width: int) -> tuple[Layer, Tensor]:
    """Return (new layer, random Tensor (1, n_tokens, width)), the same at each call."""
    x = stream(COST, n_tokens).standard_normal((1, n_tokens, width), dtype=np.float32)
    return new_layer(name, n_tokens, width), Tensor(x)


def forward_and_backward(layer: Layer, x: Tensor) -> None:
    """Run a forward and a backward pass, with gradients of the weights and of the input, which are discarded."""
    layer(x).backward()
    layer.zero_grad()
    x.zero_grad()


def time_pass(layer: Layer, x: Tensor, repeats: int) -> tuple[float, float]:
    """Return (CPU seconds, wall seconds) of one forward and backward pass, the means of `repeats`."""
    if repeats > 1:
        forward_and_backward(layer, x)  # the first is not counted, where it would count for much
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        forward_and_backward(layer, x)
    return (time.process_time() - cpu) / repeats, (time.perf_counter() - wall) / repeats


def peak_memory(layer: Layer, x: Tensor) -> int:
    """Return the peak memory in bytes that a forward and backward pass allocates."""
    forward_and_backward(layer, x)  # the first call loads and compiles kernels, which is not the layer's memory
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    forward_and_backward(layer, x)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most - before


def exponents(sizes: list[int], values: Any) -> list[float]:
    """Return the exponent p of values ~ n^p over the upper half of the sizes, by row of values; [] for one size."""
    upper = slice(len(sizes) // 2, None)
    logs = np.log(np.atleast_2d(values).astype(float)[:, upper])
    if logs.shape[1] < 2:
        return []
    return [rounded(np.polyfit(np.log(sizes[upper]), row, 1)[0]) for row in logs]


# -------------------------------------------------------------------- paths
def paths(distances: list[int]) -> dict[str, dict[str, list[int]]]:
    """Return {layer: {"layers": number needed, "products": shortest chain in these}}, lists over the distances.

    The number needed is the smallest with which the gradient of the last output reaches the first token.
    """
    counts: dict[str, dict[str, list[int]]] = {name: {"layers": [], "products": []} for name in LAYERS}
    with tqdm(total=len(counts) * len(distances), desc="paths", unit="path") as bar:
        for name, values in counts.items():
            for distance in distances:
                n_layers = layers_needed(name, distance)
                stack = new_stack(name, n_layers, distance + 1)
                values["layers"].append(n_layers)
                values["products"].append(int(shortest_path(stack, distance + 1, CHAIN_WIDTH)))
                bar.update()
    return counts


def new_stack(name: str, n_layers: int, n_tokens: int) -> Sequential:
    """Return a Sequential of `n_layers` new layers of the kind `name`, of CHAIN_WIDTH channels."""
    generator = stream(COST)
    return Sequential(*(LAYERS[name](CHAIN_WIDTH, n_tokens, generator) for _ in range(n_layers)))


def layers_needed(name: str, distance: int) -> int:
    """Return the fewest layers whose gradient reaches `distance` tokens back; ValueError if more than `distance`."""
    x = stream(COST, distance).standard_normal((1, distance + 1, CHAIN_WIDTH))
    for n_layers in range(1, distance + 1):
        stack, first = new_stack(name, n_layers, distance + 1), Tensor(x)  # float64, where less vanishes
        for parameter in stack.parameters():
            parameter.array = parameter.array.astype(float)
        stack(first)[:, -1].backward()
        if first.grad is not None and first.grad.array[0, 0].any():
            return n_layers
    raise ValueError(f"{name}: expected the gradient to go back {distance} tokens in as many layers, it did not")
