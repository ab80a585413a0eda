"""Mixtures of experts: routing and the experts of one token, as in generation; products of rows sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle.kernels import FEW_ROWS
from tricycle.kernels.experts import Routing, group_slices
from tricycle_accelerators import buffers, chunks, matmul_plan, threads
from tricycle_accelerators.compiled.elementwise import CONTIGUOUS, FLOAT32, large_array_decline_reason
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.compiled.tiled_matmul import even_slices, multiply_in_this_thread
from tricycle_accelerators.compiled.vector_matmul import TOO_FEW, spin_team
from tricycle_accelerators.providers import decline_when

MIN_PART_ROWS, STEP = 64, 16  # of a group: parts of fewer rows are not worth a thread's while; ends of parts


def _route_decline_reason(logits: np.ndarray, routing: Routing, correction: np.ndarray | None = None) -> str | None:
    """Return why the loop cannot run: no rows, limited groups, wrong shapes, not contiguous float32; else None."""
    if routing.n_active_groups < routing.n_groups:
        return "experts of all groups"
    n_experts = logits.shape[1]
    if routing.n_active > n_experts or not (correction is None or correction.shape == (n_experts,)):
        return f"at most {n_experts} active experts, and a correction of each"  # the loop checks no bounds
    if correction is not None and not (correction.dtype == FLOAT32 and correction.flags.carray):
        return f"a correction of float32 {CONTIGUOUS}"
    if not logits.size:
        return "no rows"
    return None if logits.dtype == FLOAT32 and logits.flags.carray else f"float32 {CONTIGUOUS}, got {logits.dtype}"


@decline_when(_route_decline_reason)
def route(
    logits: np.ndarray, routing: Routing, correction: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return weights, scores and indices of the experts with the highest scores of rows of logits, by Numba."""
    shape = len(logits), routing.n_active
    weights, scores, selected = np.empty(shape, np.float32), np.empty_like(logits), np.empty(shape, np.int64)
    added = np.empty(0, np.float32) if correction is None else correction
    options, loop = (routing.sigmoid, routing.normalized, routing.scale), load_loops("expert_loops").route
    if len(logits) <= FEW_ROWS:
        loop(logits, added, *options, weights, scores, selected)
    else:
        threads.parallel_for(
            lambda part: loop(logits[part], added, *options, weights[part], scores[part], selected[part]),
            chunks.thread_slices(len(logits)),
            calls_blas=False,
        )
    return weights, scores, selected


def _mix_swiglu_experts_decline_reason(x: np.ndarray, weights: np.ndarray, *matrices: np.ndarray) -> str | None:
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


@decline_when(_mix_swiglu_experts_decline_reason)
def mix_swiglu_experts(x: np.ndarray, weights: np.ndarray, *matrices: np.ndarray) -> np.ndarray:
    """Return the weighted sum of the results of some experts for one row (1, C), by the threads of vector products."""
    y, add_expert = np.zeros((1, matrices[1].shape[1]), np.float32), load_loops("expert_loops").add_swiglu_expert
    experts = [(up.T, down.T, weight) for up, down, weight in zip(matrices[::2], matrices[1::2], weights[0].tolist())]

    def job(box: np.ndarray, n_threads: int) -> int:
        waited = [add_expert(x, *expert, y, box, n_threads) for expert in experts]
        return TOO_FEW if TOO_FEW in waited else max(waited)

    spin_team().run(job)
    return y


# -------------------------------------------------------------------- rows sorted by expert
def _grouped_decline_reason(
    a: np.ndarray, counts: Sequence[int], n_rows: int, matrices: Sequence[np.ndarray]
) -> str | None:
    """Return why threads cannot share the groups: little work, a worker, not float32, strides, shapes; else None.

    `n_rows` is the number of rows that each of the matrices must have.
    """
    if a.size * matrices[0].shape[-1] < matmul_plan.MIN_SHARED_WORK:
        return f"fewer than {matmul_plan.MIN_SHARED_WORK} multiplications"
    if threads.in_worker():
        return "a call by one of several threads at work"
    shape = n_rows, matrices[0].shape[1]
    if sum(counts) != len(a) or any(matrix.shape != shape for matrix in matrices):  # the loop checks no bounds
        return f"{len(a)} rows and matrices of {shape}, got {sum(counts)} and {[matrix.shape for matrix in matrices]}"
    for array in (a, *matrices):
        if array.dtype != FLOAT32 or not array.flags.aligned or array.itemsize not in array.strides:
            return f"aligned matrices of float32 with contiguous rows or columns, got {array.dtype} {array.shape}"
    return None


@decline_when(lambda a, counts, *matrices: _grouped_decline_reason(a, counts, a.shape[1], matrices))
def grouped_matmul(a: np.ndarray, counts: Sequence[int], *matrices: np.ndarray) -> np.ndarray:
    """Return (M, C_out): groups of `counts` rows of a (M, C_in), each times its matrix; threads share the groups."""
    product, groups = buffers.empty((len(a), matrices[0].shape[1]), np.float32), group_slices(counts)

    def work(part: tuple[int, slice]) -> None:
        e, rows = part
        multiply_in_this_thread(a[groups[e]][rows], matrices[e], product[groups[e]][rows])

    threads.parallel_for(work, _parts(counts, counts))
    return product


@decline_when(lambda a, counts, grad: _grouped_decline_reason(a, counts, len(a), [grad]))
def grouped_weight_gradients(a: np.ndarray, counts: Sequence[int], grad: np.ndarray) -> np.ndarray:
    """Return (E, C_in, C_out), each group's rows of `a` transposed times those of `grad`; threads share the groups."""
    products, groups = buffers.empty((len(counts), a.shape[1], grad.shape[1]), np.float32), group_slices(counts)

    def work(part: tuple[int, slice]) -> None:
        e, columns = part
        multiply_in_this_thread(a[groups[e]].T, grad[groups[e], columns], products[e, :, columns])

    threads.parallel_for(work, _parts(counts, [grad.shape[1]] * len(counts)))
    return products


def _parts(counts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, slice]]:
    """Return (group, slice of its length) of parts for threads, largest first; the work of a group is its count.

    Only groups of more than about half of a thread's share are divided.
    """
    share = max(MIN_PART_ROWS, sum(counts) // (2 * threads.n_threads()))
    parts = [
        (e, piece)
        for e, (count, length) in enumerate(zip(counts, lengths))
        if length
        for piece in even_slices(length, STEP, max(1, round(count / share)))
    ]
    return sorted(parts, key=lambda part: -counts[part[0]] * (part[1].stop - part[1].start) / lengths[part[0]])


def _sum_by_token_decline_reason(rows: np.ndarray, places: np.ndarray, weights: np.ndarray | None = None) -> str | None:
    """Return why the loop cannot run: small, not contiguous float32, or places or weights do not fit; else None."""
    why = large_array_decline_reason(rows, dtypes=("float32",))
    if why:
        return why
    if not (places.dtype == np.int64 and places.flags.carray and places.size == len(rows)):
        return f"places of int64 {CONTIGUOUS}, one for each row"
    fits = weights is None or (weights.dtype == FLOAT32 and weights.flags.carray and weights.shape == places.shape)
    return None if fits else f"weights of float32 {CONTIGUOUS}, one for each row"


@decline_when(_sum_by_token_decline_reason)
def sum_by_token(rows: np.ndarray, places: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the sums (N, C) over K of rows (N K, C) at `places` (N, K), times weights (N, K), in chunks by threads."""
    sums, loop = buffers.empty((len(places), rows.shape[1]), np.float32), load_loops("expert_loops").sum_by_token
    factors = np.ones(places.shape, np.float32) if weights is None else weights
    pieces = chunks.row_chunks(len(places), rows.shape[1])
    threads.parallel_for(lambda part: loop(rows, places[part], factors[part], sums[part]), pieces, calls_blas=False)
    return sums


def _sum_by_token_backward_decline_reason(
    grad: np.ndarray, rows: np.ndarray, places: np.ndarray, weights: Any
) -> str | None:
    """Return why the loop cannot run: `sum_by_token` could not, or `grad` is not contiguous float32; else None."""
    if grad.dtype != FLOAT32 or not grad.flags.carray:
        return f"a gradient of float32 {CONTIGUOUS}"
    return _sum_by_token_decline_reason(rows, places, weights)


@decline_when(_sum_by_token_backward_decline_reason)
def sum_by_token_backward(
    grad: np.ndarray, rows: np.ndarray, places: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of rows (N K, C) and weights (N, K) from `grad` (N, C), in chunks by threads."""
    to_rows, to_weights = buffers.empty(rows.shape, np.float32), np.empty_like(weights)
    loop = load_loops("expert_loops").sum_by_token_backward
    threads.parallel_for(
        lambda part: loop(grad[part], rows, places[part], weights[part], to_rows, to_weights[part]),
        chunks.row_chunks(len(places), rows.shape[1]),
        calls_blas=False,
    )
    return to_rows, to_weights
