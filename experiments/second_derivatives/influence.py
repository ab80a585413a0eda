"""The influence of each training image on the loss of a test image, without training again.

Without example i the parameters change by H^-1 g_i / n to first order, where H is the Hessian of the training loss and
g_i the gradient of the example's loss; the loss of a test image with gradient g changes by g^T H^-1 g_i / n. One
linear system, H s = g, gives the influence of all examples. Source: Koh and Liang 2017, "Understanding black-box
predictions via influence functions".
"""

from functools import partial
from typing import Any

import numpy as np

from experiments.autoencoder.data import load
from experiments.second_derivatives.vectors import Loss, as_function, conjugate_gradient, hessian_product
from tricycle.layers import Dense, Sequential
from tricycle.loss import CrossEntropy
from tricycle.ops import tanh
from tricycle.tensor import Tensor
from tricycle.transforms import grad, vmap


class Problem:
    """A classifier of scikit-learn's digits, and training images (N, 64) in float64.

    Args:
        hidden: the width of a hidden layer; 0 for softmax regression.
        decay: of the parameters in the training loss; it makes the Hessian at the minimum positive definite.
    """

    def __init__(self, hidden: int, decay: float, n_train: int, seed: int) -> None:
        self.decay = decay
        data, generator = load("digits"), np.random.default_rng(seed)
        self.x, self.test_x = (part.images.reshape(-1, 64).astype(np.float64) for part in (data.train, data.test))
        self.x, self.y, self.test_y = self.x[:n_train], data.train.labels[:n_train], data.test.labels
        first: list[Any] = [Dense(64, hidden, generator=generator), tanh] if hidden else []
        self.predict, self.start = as_function(Sequential(*first, Dense(hidden or 64, 10, generator=generator)))

    def image_loss(self, vector: Any, image: Any, label: Any) -> Tensor:
        """Return the cross-entropy of one image (64,), or the mean of several."""
        return CrossEntropy()(label, self.predict(vector, image))

    def training_loss(self, vector: Any, removed: int | None = None) -> Tensor:
        """Return the regularized training loss, with weight 0 for the removed example."""
        weights = np.ones(len(self.y)) - (np.arange(len(self.y)) == removed)
        return CrossEntropy()(self.y, self.predict(vector, self.x), weights) + self.decay / 2 * (vector**2).sum()


def minimize(loss: Loss, vector: np.ndarray, n_steps: int = 100) -> np.ndarray:
    """Return the minimum near a vector by at most `n_steps` Newton steps, each halved until the loss is not higher."""
    for _ in range(n_steps):
        value, slope = loss(vector).item(), grad(loss)(vector).array
        if np.linalg.norm(slope) < 1e-8:
            break
        step = conjugate_gradient(hessian_product(loss, vector), slope, tolerance=1e-3)
        while loss(vector - step).item() > value + 1e-14:  # rounding
            step = step / 2
        vector = vector - step
    return vector


def influences(problem: Problem, vector: np.ndarray, i: int) -> np.ndarray:
    """Return the estimated change of the loss of test image i when each training example is removed, (n_train,)."""
    slope = grad(problem.image_loss)(vector, problem.test_x[i], problem.test_y[i]).array
    solution = conjugate_gradient(hessian_product(problem.training_loss, vector), slope)
    slopes = vmap(grad(problem.image_loss), (None, 0, 0))(vector, problem.x, problem.y).array
    return slopes @ solution / len(problem.y)


def changes(problem: Problem, vector: np.ndarray, i: int, n_removed: int) -> np.ndarray:
    """Return the change (n_removed,) of test image i's loss after retraining without each of the first examples."""
    loss = lambda vector: problem.image_loss(vector, problem.test_x[i], problem.test_y[i]).item()
    trained = [minimize(partial(problem.training_loss, removed=k), vector) for k in range(n_removed)]
    return np.array([loss(v) for v in trained]) - loss(vector)
