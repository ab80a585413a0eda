"""Training that keeps the best weights."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from tqdm import tqdm

from tricycle.layers import Layer
from tricycle.optimisers import AdamW
from tricycle.scheduler import WarmupCosine
from tricycle.tensor import Tensor
from tricycle.training import NonFiniteError, train_on_batch

CHECKS = 20  # of the loss on validation data in a training; the weights with the lowest are kept
WARMUP = 100  # updates in which the learning rate rises; it falls to 0 along half a cosine


def stream(*key: int) -> np.random.Generator:
    """Return a random generator for a key; different keys give independent streams."""
    return np.random.default_rng(key)


def train_best(
    model: Any,
    batch_loss: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    steps: int,
    rate: float,
    validate: Callable[[], float],
    title: str,
    max_norm: float = 0.0,
) -> Any:
    """Train `model` in place by AdamW; return it with its weights of lowest validation loss; ArithmeticError if NaN.

    Args:
        batch_loss: the loss of a batch, times a factor.
        batches: one for each step.
        validate: returns the loss on validation data, of the model in evaluation.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    optimiser = AdamW(WarmupCosine(rate, 0, min(WARMUP, steps), steps), weight_decay=0)
    best, kept = math.inf, model.state_dict()
    failed = f"{title}: the loss is not finite; try a lower learning rate than {rate:g}"
    with tqdm(zip(range(1, steps + 1), batches), total=steps, desc=title, unit="step", leave=False) as bar:
        for step, batch in bar:
            try:
                train_on_batch(model.train(), optimiser, batch_loss, batch, max_norm)
            except NonFiniteError as error:
                raise ArithmeticError(failed) from error
            if step % max(1, steps // CHECKS) == 0 or step == steps:
                with model.evaluating():
                    loss = validate()
                bar.set_postfix(validation=f"{loss:.4g}")
                if loss < best:
                    best, kept = loss, copied(model)
    if not math.isfinite(best):
        raise ArithmeticError(failed)
    model.load_state_dict(kept)
    return model


def copied(model: Layer) -> dict[str, np.ndarray]:
    """Return a copy of the weights by name."""
    return {name: array.copy() for name, array in model.state_dict().items()}
