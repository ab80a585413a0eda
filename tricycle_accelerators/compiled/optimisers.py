"""AdamW update of one parameter by Numba, in one pass over memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle_accelerators import chunks, threads
from tricycle_accelerators.compiled.elementwise import CONTIGUOUS, FLOAT32, MIN_SIZE, TOO_SMALL
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when


def _adamw_decline_reason(
    weights: np.ndarray, grad: np.ndarray, first: np.ndarray, second: np.ndarray, *_: Any, **__: Any
) -> str | None:
    """Return why the loop cannot run: few weights, not float32, or different memory orders; else None."""
    if weights.size < MIN_SIZE:
        return TOO_SMALL
    for array in (weights, grad, first, second):
        if array.dtype != FLOAT32:
            return f"float32 alone, got {array.dtype}"
    changed = weights, first, second
    alike = all(a.flags.c_contiguous for a in changed) or all(a.flags.f_contiguous for a in changed)
    if not alike or not all(a.flags.behaved for a in changed):
        return f"weights and moments that lie alike, {CONTIGUOUS}"
    lies_alike = grad.flags.f_contiguous if weights.flags.f_contiguous else grad.flags.c_contiguous
    if lies_alike and not grad.flags.behaved:  # another is copied
        return "a gradient that is aligned and not read-only"
    return None


@decline_when(_adamw_decline_reason)
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
) -> None:
    """Update weights, AdamW moments in place by Numba from `factor` times the gradient; no change unless factor > 0."""
    share = 1.0 if factor is None else float(factor)
    if not share > 0:
        return
    w, g, m, v = chunks.flatten_alike(weights, grad, first, second)  # type: ignore[misc]
    beta1, beta2 = betas
    correction = math.sqrt(1 - beta2**step)
    rate = learning_rate * correction / (1 - beta1**step)
    numbers = np.array([share, beta1, 1 - beta1, beta2, 1 - beta2, eps * correction, rate, 1 - learning_rate * decay])
    numbers = numbers.astype(np.float32)
    update = load_loops("training_loops").adamw

    def work(piece: slice) -> None:
        update(w[piece], g[piece], m[piece], v[piece], numbers)

    threads.parallel_for(work, chunks.row_chunks(weights.size), calls_blas=False)
