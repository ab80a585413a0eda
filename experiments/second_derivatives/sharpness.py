"""The largest eigenvalue of the Hessian of the loss (the sharpness) while gradient descent trains a small network.

Gradient descent with learning rate r diverges on a quadratic function with an eigenvalue above 2 / r. In networks the
sharpness rises to 2 / r and stays there. Source: Cohen et al. 2021, "Gradient descent on neural networks typically
occurs at the edge of stability".
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.second_derivatives.vectors import Loss, as_function, hessian_product
from tricycle.layers import Dense, Sequential
from tricycle.loss import MeanSquaredError
from tricycle.ops import tanh
from tricycle.transforms import hessian, value_and_grad


def new_problem(width: int, seed: int) -> tuple[Loss, np.ndarray]:
    """Return the loss of an MLP on 20 points of the Chebyshev polynomial T_5, and its initial parameters."""
    generator = np.random.default_rng(seed)
    model = Sequential(Dense(1, width, generator=generator), tanh, Dense(width, 1, generator=generator))
    x = np.linspace(-1, 1, 20)[:, None]
    y, loss_fn = np.cos(5 * np.arccos(x)), MeanSquaredError()
    predict, vector = as_function(model)
    return lambda vector: loss_fn(y, predict(vector, x)), vector


def lanczos(multiply: Callable[[np.ndarray], np.ndarray], start: np.ndarray, n_steps: int) -> np.ndarray:
    """Return approximate eigenvalues, in ascending order, of a symmetric matrix, given by its products with vectors."""
    basis = [start / np.linalg.norm(start)]
    alphas: list[float] = []
    betas: list[float] = []
    for _ in range(n_steps):
        v = multiply(basis[-1])
        alphas.append(float(v @ basis[-1]))
        for _ in range(2):  # twice, because rounding leaves some of the components
            v = v - np.stack(basis).T @ (np.stack(basis) @ v)
        betas.append(float(np.linalg.norm(v)))
        if betas[-1] < 1e-10 * abs(alphas[0]):
            break
        basis.append(v / betas[-1])
    inner = betas[: len(alphas) - 1]
    return np.linalg.eigvalsh(np.diag(alphas) + np.diag(inner, 1) + np.diag(inner, -1))


def sharpness(loss: Loss, vector: np.ndarray, n_steps: int = 15) -> float:
    """Return the largest eigenvalue of the Hessian by Lanczos's method with Hessian-vector products."""
    start = np.random.default_rng(0).standard_normal(vector.size)
    return float(lanczos(hessian_product(loss, vector), start, n_steps)[-1])


def exact_sharpness(loss: Loss, vector: np.ndarray) -> float:
    """Return the largest eigenvalue of the whole Hessian matrix."""
    return float(np.linalg.eigvalsh(hessian(loss)(vector).array)[-1])


def descend(loss: Loss, vector: np.ndarray, rate: float, steps: int, every: int) -> tuple[list[Any], np.ndarray]:
    """Train by gradient descent; return (step, loss, sharpness) every `every` steps, and the last parameters."""
    history, step_of = [], value_and_grad(loss)
    for step in range(steps + 1):
        value, slope = step_of(vector)
        if step % every == 0:
            history.append((step, value.item(), sharpness(loss, vector)))
        vector = vector - rate * slope.array
    return history, vector
