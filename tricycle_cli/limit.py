"""How near training comes to what this machine can do: all its arithmetic at the rate of a large product.

The rest of a step, from norms and softmax to the optimiser, has few operations and much memory to go through; none of
it counts as work here, so that the share is below 1 however well it is done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from tricycle import kernels
from tricycle.configs import GPTConfig

SMALL_GPT = GPTConfig(
    vocab_size=1024, context_window=256, embedding_dim=384, n_heads=6, n_layers=2, batch_size=4, tied=False
)


def operations_a_token(config: GPTConfig) -> int:
    """Floating-point operations of the products of a token, forward and backward; attention is counted whole."""
    width = config.embedding_dim
    mlp = (3 if config.is_gated else 2) * width * config.mlp_width
    weights = config.n_layers * (4 * width**2 + mlp) + config.vocab_size * width
    attention = 2 * config.n_layers * config.context_window * width  # scores, and the means of values
    return 3 * 2 * (weights + attention)


def product_operand(precision: str = "float32", n: int = 2048) -> np.ndarray:
    """Return an n x n matrix of random numbers as products of that precision take it."""
    numbers = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)
    return kernels.operand(numbers, precision)


def product(operand: np.ndarray, precision: str = "float32") -> Callable[[], object]:
    """Return a function that multiplies a square matrix by itself."""
    return lambda: kernels.matmul(operand, operand, precision=precision)


def training_step(config: GPTConfig, precision: str = "float32") -> Callable[[], object]:
    """Build a GPT, and return a function that makes one training step with AdamW on random tokens."""
    from tricycle.loss import CrossEntropy
    from tricycle.models import GPT
    from tricycle.optimisers import AdamW
    from tricycle.training import labelled, train_on_batch

    model, optimiser = GPT(config).use_precision(precision), AdamW(1e-4)
    loss_of = labelled(model, CrossEntropy())
    shape = (2, config.batch_size, config.context_window)
    batch = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    return lambda: train_on_batch(model, optimiser, loss_of, batch)


def product_rate(precision: str = "float32", n: int = 2048, repeats: int = 5) -> float:
    """Operations a second of an n x n product of ours, the best of several."""
    return 2 * n**3 / min(_times(product(product_operand(precision, n), precision), repeats))


def share_of_limit(rate: float, precision: str = "float32", n_steps: int = 6) -> float:
    """Of that rate, what a small GPT's training steps with AdamW come to in the median."""
    seconds = statistics.median(_times(training_step(SMALL_GPT, precision), n_steps))
    return operations_a_token(SMALL_GPT) * SMALL_GPT.batch_size * SMALL_GPT.context_window / seconds / rate


def _times(work: Callable[[], object], repeats: int) -> list[float]:
    """In seconds, after one call that may have to load or compile something."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times
