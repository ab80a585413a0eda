"""Optimizer update kernels in NumPy and threads: AdamW, and orthogonalization for Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tricycle.kernels import muon
from tricycle.kernels.dispatch import is_16_bit, upcasting
from tricycle_accelerators import buffers, chunks, threads
from tricycle_accelerators.providers import decline_when

SMALL = 2**18  # elements in all of functions that end before a second thread would wake up
LARGE = 2**22  # elements of a function that is worth all threads


@upcasting(1)
def orthogonalize(x: np.ndarray, precision: str = "float32") -> np.ndarray:
    """Return about U V^T of each U S V^T in x (N, R, C), in x's dtype, one per thread; `precision` is ignored."""
    polar = buffers.empty(x.shape, x.dtype)

    def work(i: int) -> None:
        polar[i] = muon.orthogonalize.reference(x[i : i + 1])[0]

    threads.parallel_for(work, range(len(x)))
    return polar


def run_independent(like: np.ndarray, jobs: Sequence[tuple[Callable[[], Any], int, bool, bool]]) -> list[Any]:
    """Run jobs (function, n_elements, may run in any thread, uses one thread), large ones serially; return results."""
    if sum([job[1] for job in jobs]) < SMALL:
        return [job[0]() for job in jobs]
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        results[index] = jobs[index][0]()

    together = []
    for index, (_, size, is_parallelizable, is_single_threaded) in enumerate(jobs):
        if is_parallelizable and (is_single_threaded or size < LARGE):
            together.append(index)
        else:
            run(index)
    if together:
        threads.parallel_for(run, sorted(together, key=lambda index: -jobs[index][1]))
    return results


def _adamw_decline_reason(
    weights: np.ndarray, grad: np.ndarray, first: np.ndarray, second: np.ndarray, *_: Any, **__: Any
) -> str | None:
    """Return a reason for weights and moments of different memory orders, or 16-bit arrays; else None."""
    w, m, v = weights.flags, first.flags, second.flags
    by_row = w.c_contiguous and m.c_contiguous and v.c_contiguous
    if not by_row and not (w.f_contiguous and m.f_contiguous and v.f_contiguous):
        return "weights and moments in one piece each, all in the same order"
    if is_16_bit(weights) or is_16_bit(grad) or is_16_bit(first) or is_16_bit(second):
        return "floats of 16 bits"
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
    """Update weights, AdamW moments in place by NumPy from `factor` times the gradient; no change unless factor > 0."""
    arrays: Any = chunks.flatten_alike(weights, grad, first, second)
    share = 1.0 if factor is None else float(factor)
    if not share > 0:
        return
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

    if weights.size <= chunks.CHUNK_SIZE:  # nothing to share, and no product for which BLAS would have to be held
        work(slice(None))
    else:
        threads.parallel_for(work, chunks.row_chunks(weights.size))
