"""Updates of one parameter, in pieces and matrix by matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import NotImplementedType

import numpy as np

from tricycle.kernels import muon
from tricycle.kernels.reference.widening import is_narrow, widening
from tricycle_accelerators import pieces, threads


@widening(1)
def orthogonalise(x: np.ndarray, precision: str = "float32") -> np.ndarray:
    """A matrix for each thread at a time."""
    polar = np.empty_like(x)

    def work(i: int) -> None:
        polar[i] = muon.orthogonalise.plain(x[i : i + 1])[0]

    threads.parallel(work, range(len(x)))
    return polar


def each(like: np.ndarray, calls: Sequence[Callable[[], None]]) -> None:
    threads.parallel(lambda call: call(), calls)


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
    """The factor goes into numbers that the gradient is multiplied by anyway."""
    arrays = pieces.flat(weights, grad, first, second)
    if arrays is None or any(is_narrow(a) for a in arrays):
        return NotImplemented
    share = 1.0 if factor is None else float(factor)
    if not share > 0:
        return None
    beta1, beta2 = betas
    correction = math.sqrt(1 - beta2**step)
    rate = learning_rate * correction / (1 - beta1**step)

    def work(piece: slice) -> None:
        w, g, m, v = (a[piece] for a in arrays)
        t = share * (1 - beta1) * g
        m *= beta1
        m += t
        np.multiply(g, g, out=t)
        t *= share * share * (1 - beta2)
        v *= beta2
        v += t
        if decay:
            w *= 1 - learning_rate * decay
        np.sqrt(v, out=t)
        t += eps * correction
        np.divide(m, t, out=t)
        t *= rate
        w -= t

    if weights.size <= pieces.PIECE:  # nothing to share, and no product for which BLAS would have to be held
        work(slice(None))
    else:
        threads.parallel(work, pieces.cut(weights.size))
    return None
