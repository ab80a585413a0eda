"""The gradient of an embedding."""

from __future__ import annotations

from tricycle.devices import Array, array_module
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import f32, i32, i64
from tricycle_accelerators.providers import unless


def _why_not_embedding_backward(grad: Array, ids: Array, n_rows: int) -> str | None:
    return arrays.decline_reason(grad) if n_rows else "a table without rows"


@unless(_why_not_embedding_backward)
def embedding_backward(grad: Array, ids: Array, n_rows: int) -> Array:
    kind = arrays.kind(grad.dtype)
    xp = array_module(grad)
    n_tokens, size = grad.shape
    grad = arrays.dense(grad)
    ids = arrays.dense(ids.astype(i64, copy=False))
    n_tiles = launch.up(n_tokens, launch.TOKENS)
    counts = xp.zeros((n_tiles, n_rows), i32)
    ranks = arrays.empty(grad, (n_tokens,), i32)
    ordered = arrays.empty(grad, (n_tokens,), i32)
    totals = arrays.empty(grad, (n_rows,), i32)
    starts = arrays.empty(grad, (n_rows + 1,), i32)
    n, rows = i64(n_tokens), i64(n_rows)
    tiles = launch.Plan((n_tiles, 1), (launch.TOKENS, 1)).check()
    launch.launch("embedding", "rank_tokens", (), tiles, ids, ranks, counts, n, rows)
    launch.launch("embedding", "add_tiles", (), launch.elementwise(n_rows, 1), counts, totals, i64(n_tiles), rows)
    launch.launch("embedding", "start_rows", (), launch.Plan((1, 1), (1024, 1)), totals, starts, rows)
    launch.launch("embedding", "sort_tokens", (), tiles, ids, ranks, counts, starts, ordered, n, rows)
    at_once = arrays.elements_at_once(size, kind, grad)
    table = arrays.empty(grad, (n_rows, size), f32)
    plan = launch.token_sums(n_rows, size, at_once)
    numbers = rows, i64(size), i32(launch.MANY)
    launch.launch("embedding", "sum_tokens", (kind, str(at_once)), plan, grad, ordered, starts, table, *numbers)
    return table
