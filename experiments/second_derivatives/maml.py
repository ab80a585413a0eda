"""Model-agnostic meta-learning (MAML) of sinusoids: initial parameters from which few gradient steps learn a new task.

A task is y = a sin(x + p), of which 10 points are known. MAML minimizes the loss after one gradient step on these
points and differentiates through this gradient, which its first-order variant takes as a constant. Source: Finn et al.
2017, "Model-agnostic meta-learning for fast adaptation of deep networks", section 5.1.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from tricycle.activation import ReLU
from tricycle.optimisers import AdamW
from tricycle.parameter import Parameter
from tricycle.scheduler import WarmupCosine
from tricycle.tensor import Tensor
from tricycle.transforms import grad

METHODS = ("MAML", "MAML, first order", "all tasks at once")
SIZES, N_POINTS, RATE = (1, 40, 40, 1), 10, 0.01  # of layers; known points, and rate of gradient steps, in a task
Points = tuple[np.ndarray, np.ndarray]  # x and y, each (tasks, points, 1)


def new_weights(seed: int) -> list[Tensor]:
    """Return an MLP's initial Parameters by a seed: normal weights (m, n), zero biases (1, n), in turn; sizes SIZES."""
    generator = np.random.default_rng(seed)
    pairs = [(generator.standard_normal((m, n)) * min(1, 2 / m) ** 0.5, np.zeros((1, n))) for m, n in pairwise(SIZES)]
    return [Parameter(array) for pair in pairs for array in pair]


def predict(weights: list[Tensor], x: Any) -> Tensor:
    """Return the output for x, (tasks, points, 1), of an MLP with these weights, which may have an axis for tasks."""
    for i in range(0, len(weights) - 2, 2):
        x = ReLU()(x @ weights[i] + weights[i + 1])
    return x @ weights[-2] + weights[-1]


def errors(weights: list[Tensor], points: Points) -> Tensor:
    """Return the mean squared error of each task, (tasks,)."""
    return ((predict(weights, points[0]) - points[1]) ** 2).mean(axis=(1, 2))


def new_tasks(generator: np.random.Generator, n_tasks: int, n_points: int) -> list[Points]:
    """Return [(x, y) of N_POINTS points, (x, y) of `n_points` others] of random sinusoids, (n_tasks, points, 1)."""
    amplitude, phase = generator.uniform((0.1, 0), (5, np.pi), (n_tasks, 2)).astype(np.float32).T[..., None, None]
    xs = [generator.uniform(-5, 5, (n_tasks, n, 1)).astype(np.float32) for n in (N_POINTS, n_points)]
    return [(x, amplitude * np.sin(x + phase)) for x in xs]


def adapted(weights: list[Tensor], points: tuple[np.ndarray, np.ndarray], constant: bool = False) -> list[Tensor]:
    """Return the weights of each task after a gradient step on its points; `constant`: not differentiable twice."""
    copies = [w + np.zeros((len(points[0]), 1, 1), np.float32) for w in weights]
    slopes = grad(lambda weights: errors(weights, points).sum())(copies)
    return [w - RATE * (slope.detach() if constant else slope) for w, slope in zip(copies, slopes)]


def train(method: str, n_steps: int, seed: int, rate: float = 3e-3, n_tasks: int = 25) -> list[Tensor]:
    """Return MLP weights trained by a method of METHODS on `n_tasks` new random sinusoids per step."""
    weights, generator = new_weights(seed), np.random.default_rng(seed)
    optimiser = AdamW(WarmupCosine(rate, rate / 10, n_steps // 50, n_steps), weight_decay=0.0)
    for _ in range(n_steps):
        known, other = new_tasks(generator, n_tasks, N_POINTS)
        current: Any = weights if method == METHODS[2] else adapted(weights, known, method == METHODS[1])
        errors(current, other).mean().backward()
        optimiser.update([(str(i), w) for i, w in enumerate(weights)])
        for w in weights:
            w.zero_grad()
    return weights


def errors_after(weights: list[Tensor], n_steps: int, n_tasks: int, seed: int) -> list[float]:
    """Return the mean squared error on 100 other points of each new task after 0 to `n_steps` gradient steps."""
    known, other = new_tasks(np.random.default_rng(seed), n_tasks, 100)
    current: Any = [Tensor(w.array, False) for w in weights]
    found = []
    for _ in range(n_steps + 1):
        found.append(errors(current, other).mean().item())
        current = [w.detach() for w in adapted(current, known)]
    return found
