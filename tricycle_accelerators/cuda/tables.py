"""Gradient of an embedding table in CUDA."""

from __future__ import annotations

from typing import Any

from tricycle.devices import Array, array_module
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import f32, i32, i64
from tricycle_accelerators.providers import decline_when


def _embedding_backward_decline_reason(grad: Array, ids: Array, n_rows: int) -> str | None:
    """Return a reason for a table without rows, an empty `grad` or an unsupported dtype; else None."""
    return arrays.array_decline_reason(grad) if n_rows else "a table without rows"


@decline_when(_embedding_backward_decline_reason)
def embedding_backward(grad: Array, ids: Array, n_rows: int) -> Array:
    """Sum rows of `grad` with equal token ids into a float32 table by CUDA; NotImplemented if float64 or empty."""
    kind = arrays.cuda_type(grad.dtype)
    xp = array_module(grad)
    n_tokens, size = grad.shape
    grad = arrays.contiguous(grad)
    ids = arrays.contiguous(ids.astype(i64, copy=False))
    n_tiles = launch.ceil_div(n_tokens, launch.TOKENS)
    counts = xp.zeros((n_tiles, n_rows), i32)
    ranks = arrays.empty_like(grad, (n_tokens,), i32)
    ordered = arrays.empty_like(grad, (n_tokens,), i32)
    totals = arrays.empty_like(grad, (n_rows,), i32)
    starts = arrays.empty_like(grad, (n_rows + 1,), i32)
    n, rows = i64(n_tokens), i64(n_rows)
    tiles = launch.LaunchPlan((n_tiles, 1), (launch.TOKENS, 1)).check()
    launch.launch("embedding", "rank_tokens", (), tiles, ids, ranks, counts, n, rows)
    launch.launch("embedding", "add_tiles", (), launch.plan_elementwise(n_rows, 1), counts, totals, i64(n_tiles), rows)
    launch.launch("embedding", "start_rows", (), launch.LaunchPlan((1, 1), (1024, 1)), totals, starts, rows)
    launch.launch("embedding", "sort_tokens", (), tiles, ids, ranks, counts, starts, ordered, n, rows)
    at_once = arrays.vector_width(size, kind, grad)
    table = arrays.empty_like(grad, (n_rows, size), f32)
    plan = launch.plan_token_sums(n_rows, size, at_once)
    numbers = rows, i64(size), i32(launch.SHARED_TOKENS)
    launch.launch("embedding", "sum_tokens", (kind, str(at_once)), plan, grad, ordered, starts, table, *numbers)
    return table


def _add_at_decline_reason(total: Array, index: Any, array: Array) -> str | None:
    """Return a reason unless the index is an array of integers, and `embedding_backward` sums the rows; else None."""
    if type(index) is not type(total) or index.dtype.kind not in "iu":
        return "an array of whole numbers as the index"
    return _embedding_backward_decline_reason(array, index, len(total))


@decline_when(_add_at_decline_reason)
def add_at(total: Array, index: Any, array: Array) -> None:
    """Add rows of `array` to those of `total` that the index selects, in a fixed order; NotImplemented for others."""
    rows = array.reshape(index.size, total.size // len(total))
    ids = index.reshape(-1).astype(i64, copy=False) % len(total)
    total += embedding_backward(rows, ids, len(total)).reshape(total.shape)
