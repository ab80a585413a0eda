"""A physics-informed network for the heat equation u_t = a u_xx on 0 <= x <= 1, 0 <= t <= 1.

u(x, 0) = sin(pi x) and u(0, t) = u(1, t) = 0, so u = exp(-a pi^2 t) sin(pi x). The network N only sees the equation:
u = sin(pi x) + t x (1 - x) N(x, t) satisfies all conditions for any N. Source: Raissi et al. 2019.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from tricycle.extra_ops import concatenate, sin
from tricycle.layers import Dense, Sequential
from tricycle.ops import tanh
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.tensor import Tensor
from tricycle.transforms import grad

DIFFUSIVITY = 0.2
Solution = Callable[[Tensor, Tensor], Tensor]


def new_network(width: int, seed: int) -> Sequential:
    """Return a new MLP from (x, t), (N, 2), to (N, 1), with two hidden tanh layers."""
    sizes, generator = (2, width, width, 1), np.random.default_rng(seed)
    first, second, last = (Dense(m, n, generator=generator) for m, n in pairwise(sizes))
    return Sequential(first, tanh, second, tanh, last)


def solution_of(network: Sequential) -> Solution:
    """Return u(x, t) for columns x and t, (N, 1), which satisfies the initial and boundary conditions."""

    def u(x: Tensor, t: Tensor) -> Tensor:
        return sin(math.pi * x) + t * x * (1 - x) * network(concatenate([x, t], axis=1))

    return u


def residual(u: Solution, x: Tensor, t: Tensor) -> Tensor:
    """Return u_t - a u_xx at the points (x, t), (N, 1), differentiable with respect to the parameters of u."""
    u_x = grad(lambda x, t: u(x, t).sum())  # each u depends on its own point alone, so the sum has their derivatives
    u_t = grad(lambda x, t: u(x, t).sum(), argnums=1)(x, t)
    u_xx = grad(lambda x, t: u_x(x, t).sum())(x, t)
    return u_t - DIFFUSIVITY * u_xx


def train(steps: int, width: int = 32, n_points: int = 256, rate: float = 2e-2, seed: int = 0) -> tuple[list, Solution]:
    """Minimize the mean squared residual at random points; return the loss of each step and the solution u."""
    network, generator = new_network(width, seed), np.random.default_rng(seed)
    u, losses = solution_of(network), []
    optimiser = AdamW(WarmupCosine(rate, rate / 100, steps // 20, steps), weight_decay=0.0)
    for _ in range(steps):
        x, t = (Tensor(column, False) for column in generator.random((2, n_points, 1), dtype=np.float32))
        loss = (residual(u, x, t) ** 2).mean()
        loss.backward()
        network.update(optimiser)
        losses.append(loss.item())
    return losses, u


def errors(u: Solution, n_points: int = 101) -> tuple[np.ndarray, np.ndarray]:
    """Return u and its difference from the exact solution on a grid, (n_points of t, n_points of x)."""
    axis = np.linspace(0, 1, n_points, dtype=np.float32)
    t, x = (grid.reshape(-1, 1) for grid in np.meshgrid(axis, axis, indexing="ij"))
    values = u(Tensor(x, False), Tensor(t, False)).array
    exact = np.exp(-DIFFUSIVITY * math.pi**2 * t) * np.sin(math.pi * x)
    return values.reshape(n_points, n_points), (values - exact).reshape(n_points, n_points)
