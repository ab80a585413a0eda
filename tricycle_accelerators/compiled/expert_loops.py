"""Loops of mixtures of experts. The import compiles or loads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle_accelerators.compiled.jit import ONE, ZERO, compile_loop, inner_function, multiply_by_sigmoid
from tricycle_accelerators.compiled.loops import softmax, swiglu
from tricycle_accelerators.compiled.vector_loops import multiply_vectors
from tricycle_accelerators.compiled.vector_rows import FLOAT32


@inner_function()
def _is_higher(a: Any, b: Any) -> bool:
    """Return whether a is higher than b, where any number is higher than NaN."""
    return a > b or (a == a and b != b)


@compile_loop("void(f4[:, ::1], f4[::1], b1, b1, f4, f4[:, ::1], f4[:, ::1], i8[:, ::1])")
def route(
    logits: np.ndarray,
    correction: np.ndarray,
    sigmoid: bool,
    normalized: bool,
    scale: float,
    weights: np.ndarray,
    scores: np.ndarray,
    selected: np.ndarray,
) -> None:
    """Write the scores (R, E) of logits, and the indices (R, K) of the highest, the first of equal ones, with weights.

    Args:
        correction: (E,), added to the scores for the selection alone; or (0,), for none.
        sigmoid: whether scores are sigmoids, and not a softmax.
        normalized, scale: whether the weights of a row are divided by their sum; their factor.
    """
    n_rows, n_experts = logits.shape
    if sigmoid:
        for i in range(n_rows):
            for e in range(n_experts):
                scores[i, e] = multiply_by_sigmoid(ONE, logits[i, e])
    else:
        softmax(logits, scores, False)
    ranks = np.empty(n_experts, np.float32)
    for i in range(n_rows):
        is_left, total = np.ones(n_experts, np.bool_), ZERO
        for e in range(n_experts):
            ranks[e] = scores[i, e] + (correction[e] if len(correction) else ZERO)
        for k in range(selected.shape[1]):
            best = -1
            for e in range(n_experts):
                if is_left[e] and (best < 0 or _is_higher(ranks[e], ranks[best])):
                    best = e
            is_left[best], selected[i, k], weights[i, k] = False, best, scores[i, best]
            total += scores[i, best]
        for k in range(selected.shape[1]):
            weights[i, k] *= scale / total if normalized else scale


@compile_loop("i8(f4[:, ::1], f4[:, ::1], f4[:, ::1], f4, f4[:, ::1], i8[::1], i8)")
def add_swiglu_expert(
    x: np.ndarray, up: np.ndarray, down: np.ndarray, weight: float, y: np.ndarray, box: Any, n_threads: int
) -> int:
    """Add `weight` times swiglu(x U) D of a row x (1, C) to y (1, C), by the threads that serve the mailbox `box`.

    Args:
        up, down: U and D transposed, (2 H, C) and (C, H).

    Returns:
        As `vector_loops.multiply_vectors`.
    """
    hidden, activated = np.empty((1, len(up)), np.float32), np.empty((1, len(up) // 2), np.float32)
    product = np.empty((1, len(down)), np.float32)
    waited_up = multiply_vectors(x, (FLOAT32, up.ctypes.data, 0, 0), hidden, box, n_threads)
    swiglu(hidden, activated)
    waited_down = multiply_vectors(activated, (FLOAT32, down.ctypes.data, 0, 0), product, box, n_threads)
    for j in range(len(down)):
        y[0, j] += weight * product[0, j]
    return min(waited_up, waited_down) if min(waited_up, waited_down) < 0 else max(waited_up, waited_down)


@compile_loop("void(f4[:, ::1], i8[:, ::1], f4[:, ::1], f4[:, ::1])")
def sum_by_token(rows: np.ndarray, places: np.ndarray, weights: np.ndarray, sums: np.ndarray) -> None:
    """Write the sums (N, C) over K of rows (M, C) at `places` (N, K), times weights (N, K)."""
    for i in range(len(sums)):
        total = sums[i]
        total[:] = ZERO
        for k in range(places.shape[1]):
            row, weight = rows[places[i, k]], weights[i, k]
            for j in range(len(total)):
                total[j] += weight * row[j]


@compile_loop("void(f4[:, ::1], f4[:, ::1], i8[:, ::1], f4[:, ::1], f4[:, ::1], f4[:, ::1])")
def sum_by_token_backward(
    grad: np.ndarray,
    rows: np.ndarray,
    places: np.ndarray,
    weights: np.ndarray,
    to_rows: np.ndarray,
    to_weights: np.ndarray,
) -> None:
    """Write the gradients of rows (M, C) and weights (N, K) of `sum_by_token`, from `grad` (N, C)."""
    for i in range(len(grad)):
        slope = grad[i]
        for k in range(places.shape[1]):
            row, to_row, weight = rows[places[i, k]], to_rows[places[i, k]], weights[i, k]
            total = ZERO
            for j in range(len(slope)):
                total += slope[j] * row[j]
                to_row[j] = weight * slope[j]
            to_weights[i, k] = total
