"""The largest eigenvalues of the Hessian of the loss while gradient descent trains a small GPT on characters.

Gradient descent with learning rate r diverges on a quadratic function with an eigenvalue above 2 / r. In networks the
largest one, the sharpness, rises to 2 / r and stays there. Source: Cohen et al. 2021, "Gradient descent on neural
networks typically occurs at the edge of stability".
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.second_derivatives.vectors import Loss, as_function, hessian_product
from experiments.shared.texts import zen
from tricycle.configs.model import ModelConfig
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.transforms import value_and_grad

N_TOKENS = 32


def new_problem(width: int, seed: int) -> tuple[Loss, np.ndarray]:
    """Return the loss of a GPT on the characters of "The Zen of Python", and its initial parameters, by a seed."""
    letters, ids = np.unique(list(zen()), return_inverse=True)
    n_labels = (len(ids) - 1) // N_TOKENS * N_TOKENS
    tokens, labels = (ids[start : start + n_labels].reshape(-1, N_TOKENS) for start in (0, 1))
    shape = {"context_window": N_TOKENS, "embedding_dim": width, "n_heads": 2, "n_layers": 1}
    predict, vector = as_function(GPT(ModelConfig(vocab_size=len(letters), seed=seed, **shape)))
    return lambda vector: CrossEntropy()(labels, predict(vector, tokens)), vector


def lanczos(multiply: Callable[[np.ndarray], np.ndarray], start: np.ndarray, n_steps: int) -> np.ndarray:
    """Return approximate eigenvalues, ascending, of a symmetric matrix given by its products with vectors (Lanczos)."""
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


def largest_eigenvalues(loss: Loss, vector: np.ndarray, n_steps: int = 15) -> list[float]:
    """Return the three largest eigenvalues of the Hessian, by Lanczos's method with Hessian-vector products."""
    start = np.random.default_rng(0).standard_normal(vector.size)
    return [float(value) for value in lanczos(hessian_product(loss, vector), start, n_steps)[:-4:-1]]


def descend(loss: Loss, vector: np.ndarray, rate: float, steps: int, every: int) -> list[Any]:
    """Train by gradient descent; return (step, loss, largest eigenvalues) every `every` steps."""
    history, step_of = [], value_and_grad(loss)
    for step in range(steps + 1):
        value, slope = step_of(vector)
        if step % every == 0:
            history.append((step, value.item(), largest_eigenvalues(loss, vector)))
        vector = vector - rate * slope.array
    return history
