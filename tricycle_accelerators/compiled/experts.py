"""Mixtures of experts for few tokens, as in generation: routing, and the experts of one token by contiguous columns."""

from __future__ import annotations

import numpy as np

from tricycle.kernels import FEW_ROWS
from tricycle.kernels.experts import Routing
from tricycle_accelerators.compiled.elementwise import CONTIGUOUS, FLOAT32, few_rows_decline_reason
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.compiled.vector_matmul import NO_SCALES, TOO_FEW, spin_team
from tricycle_accelerators.providers import decline_when


def _route_decline_reason(logits: np.ndarray, routing: Routing, correction: np.ndarray | None = None) -> str | None:
    """Return why the loop cannot run: many rows, limited groups, wrong shapes, not contiguous float32; else None."""
    if len(logits) > FEW_ROWS:
        return f"{FEW_ROWS} rows or fewer, got {len(logits)}"
    if routing.n_active_groups < routing.n_groups:
        return "experts of all groups"
    n_experts = logits.shape[1]
    if routing.n_active > n_experts or not (correction is None or correction.shape == (n_experts,)):
        return f"at most {n_experts} active experts, and a correction of each"  # the loop checks no bounds
    if correction is not None and not (correction.dtype == FLOAT32 and correction.flags.carray):
        return f"a correction of float32 {CONTIGUOUS}"
    return few_rows_decline_reason(logits)


@decline_when(_route_decline_reason)
def route(
    logits: np.ndarray, routing: Routing, correction: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, scores and indices of the experts with the highest scores of a few rows of logits, by Numba."""
    shape = len(logits), routing.n_active
    weights, scores, selected = np.empty(shape, np.float32), np.empty_like(logits), np.empty(shape, np.int64)
    added = NO_SCALES if correction is None else correction
    options = routing.sigmoid, routing.normalized, routing.scale
    load_loops("expert_loops").route(logits, added, *options, weights, scores, selected)
    return weights, scores, selected


def _mix_decline_reason(x: np.ndarray, weights: np.ndarray, *matrices: np.ndarray) -> str | None:
    """Return why the loop cannot run: not one row, or arrays of another dtype, memory order or shape; else None."""
    if len(x) != 1 or not matrices:
        return f"one row and one expert or more, got {len(x)} rows and {len(matrices)} matrices"
    for array in (x, weights, *matrices):
        if array.dtype != FLOAT32:
            return f"float32 alone, got {array.dtype}"
        flags = array.flags
        if not (flags.f_contiguous and flags.behaved):  # a row is contiguous in both orders
            return "matrices by columns, aligned and not read-only"
    hidden_size, to_size = matrices[1].shape
    shapes = [(x.shape[1], 2 * hidden_size), (hidden_size, to_size)] * weights.shape[1]
    if [matrix.shape for matrix in matrices] != shapes:  # the loop checks no bounds
        return f"matrices of shapes {shapes}, got {[matrix.shape for matrix in matrices]}"
    return None


@decline_when(_mix_decline_reason)
def mix_swiglu_experts(x: np.ndarray, weights: np.ndarray, *matrices: np.ndarray) -> np.ndarray:
    """Return the weighted sum of the results of some experts for one row (1, C), by the threads of vector products."""
    y, add_expert = np.zeros((1, matrices[1].shape[1]), np.float32), load_loops("expert_loops").add_swiglu_expert
    experts = [(up.T, down.T, weight) for up, down, weight in zip(matrices[::2], matrices[1::2], weights[0].tolist())]

    def job(box: np.ndarray, n_threads: int) -> int:
        waited = [add_expert(x, *expert, y, box, n_threads) for expert in experts]
        return TOO_FEW if TOO_FEW in waited else max(waited)

    spin_team().run(job)
    return y
