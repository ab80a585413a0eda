"""A penalty on the gradient of the loss with respect to the images (double backpropagation) of a classifier of digits.

The training loss contains the mean squared norm of each image's gradient, and is itself minimized by gradients. A
smaller gradient makes it harder to change the loss by small changes of the pixels (fast gradient sign method). Sources:
Drucker and LeCun 1992, "Improving generalization performance using double backpropagation"; Ross and Doshi-Velez 2018;
Goodfellow et al. 2015.
"""

from typing import Any

import numpy as np

from experiments.autoencoder.data import load
from tricycle.layers import Dense, Sequential
from tricycle.loss import CrossEntropy
from tricycle.ops import tanh
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.tensor import Tensor
from tricycle.transforms import grad

N_TRAIN = 1_000
SIZES = (0, 0.05, 0.1, 0.15, 0.2)  # of the changes of pixels, which are between 0 (paper) and 1 (ink)


def image_gradients(model: Sequential, images: Any, labels: np.ndarray) -> Tensor:
    """Return the gradient of each image's cross-entropy with respect to the image, (N, 64)."""
    return grad(lambda x: CrossEntropy()(labels, model(x)) * len(labels))(images)


def train(strength: float, n_epochs: int, seed: int, batch_size: int = 50, rate: float = 3e-3) -> Sequential:
    """Train an MLP on N_TRAIN digits with `strength` times the mean squared norm of image gradients in the loss."""
    data, generator = load("digits").train, np.random.default_rng(seed)
    images, labels = data.images[:N_TRAIN].reshape(N_TRAIN, 64), data.labels[:N_TRAIN]
    model = Sequential(Dense(64, 64, generator=generator), tanh, Dense(64, 10, generator=generator))
    n_steps = n_epochs * (N_TRAIN // batch_size)
    optimiser = AdamW(WarmupCosine(rate, rate / 100, n_steps // 20, n_steps), weight_decay=0.0)
    for _ in range(n_epochs):
        for batch in generator.permutation(N_TRAIN).reshape(-1, batch_size):
            x, y = Tensor(images[batch], False), labels[batch]
            loss = CrossEntropy()(y, model(x))
            if strength:
                loss = loss + strength * (image_gradients(model, x, y) ** 2).sum() / batch_size
            loss.backward()
            model.update(optimiser)
    return model


def evaluate(model: Sequential) -> dict[str, Any]:
    """Return "norm", the mean image gradient norm, and "accuracies" on test images moved along its sign by SIZES."""
    test = load("digits").test
    images, labels = test.images.reshape(-1, 64), test.labels
    slopes = image_gradients(model, images, labels).array
    changed = [images + np.float32(size) * np.sign(slopes) for size in SIZES]
    accuracies = [(model(Tensor(x, False)).array.argmax(-1) == labels).mean() for x in changed]
    return {"norm": np.linalg.norm(slopes, axis=1).mean(), "accuracies": accuracies}
