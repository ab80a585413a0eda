"""Newton's method on the network of the tutorial, which classifies iris flowers (docs/tutorial.md).

Newton's step -H^-1 g leads to a saddle point, or to a maximum, where the Hessian H has negative eigenvalues. With their
absolute values the loss falls: -|H|^-1 g. Source: Dauphin et al. 2014, "Identifying and attacking the saddle point
problem in high-dimensional non-convex optimization".
"""

import numpy as np

from experiments.second_derivatives.vectors import Loss, as_function
from tricycle.activation import ReLU
from tricycle.layers import Dense, Sequential
from tricycle.loss import CrossEntropy
from tricycle.transforms import grad, hessian

METHODS = ("gradient descent", "Newton", "Newton, absolute")
DAMPING = 1e-2  # added to the eigenvalues
RATE = 0.05  # of gradient descent, as in the tutorial


def new_problem(seed: int) -> tuple[Loss, np.ndarray]:
    """Return the loss of the tutorial's network on 150 irises, and its 131 initial parameters."""
    from sklearn.datasets import load_iris

    generator = np.random.default_rng(seed)
    x, y = load_iris(return_X_y=True)
    model = Sequential(Dense(4, 16, generator=generator), ReLU(), Dense(16, 3, generator=generator))
    predict, vector = as_function(model)
    return lambda vector: CrossEntropy()(y, predict(vector, x)), vector


def newton_step(matrix: np.ndarray, slope: np.ndarray, absolute: bool) -> np.ndarray:
    """Return -(H + DAMPING I)^-1 g; with `absolute`, the eigenvalues of H are replaced by their absolute values."""
    values, vectors = np.linalg.eigh(matrix)
    values = abs(values) if absolute else values
    return -vectors @ ((vectors.T @ slope) / (values + DAMPING))


def descend(loss: Loss, vector: np.ndarray, method: str, n_steps: int) -> list[float]:
    """Return the loss before each step of a method of METHODS, and after the last step.

    A step with absolute eigenvalues is halved until the loss is lower.
    """
    losses, gradient, curvature = [loss(vector).item()], grad(loss), hessian(loss)
    absolute = method == "Newton, absolute"
    for _ in range(n_steps):
        slope = gradient(vector).array
        if method == "gradient descent":
            step = -RATE * slope
        else:
            step = newton_step(curvature(vector).array, slope, absolute)
        fraction = 1.0
        while absolute and fraction > 1e-3 and loss(vector + fraction * step).item() > losses[-1]:
            fraction /= 2
        vector = vector + fraction * step
        losses.append(loss(vector).item())
    return losses
