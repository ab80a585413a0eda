"""Updates of one parameter in one pass over memory."""

from __future__ import annotations

import math
from types import NotImplementedType

import numpy as np

from tricycle_accelerators import pieces, threads
from tricycle_accelerators.compiled.elementwise import SMALL
from tricycle_accelerators.compiled.loaded import training_loops


def adamw(
    weights: np.ndarray,
    grad: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    factor: np.ndarray | float | None = None,
) -> NotImplementedType | None:
    if weights.size < SMALL or any(a.dtype != np.float32 for a in (weights, grad, first, second)):
        return NotImplemented
    arrays = pieces.flat(weights, grad, first, second)
    if arrays is None or not all(a.flags.carray for a in arrays):
        return NotImplemented
    share = 1.0 if factor is None else float(factor)
    if not share > 0:
        return None
    w, g, m, v = arrays
    beta1, beta2 = betas
    correction = math.sqrt(1 - beta2**step)
    rate = learning_rate * correction / (1 - beta1**step)
    numbers = np.array([share, beta1, 1 - beta1, beta2, 1 - beta2, eps * correction, rate, 1 - learning_rate * decay])
    numbers = numbers.astype(np.float32)
    update = training_loops().adamw

    def work(piece: slice) -> None:
        update(w[piece], g[piece], m[piece], v[piece], numbers)

    threads.parallel(work, pieces.cut(weights.size))
    return None
