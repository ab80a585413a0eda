"""Deterministic sums of all elements and of columns in CUDA."""

from __future__ import annotations

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import f32, i64


def total_sum(x: Array, kind: str, squares: str) -> Array:
    """Sum x of CUDA type `kind`, or its squares if `squares` is "true" (else "false"), to 0-d float32 by CUDA."""
    plan = launch.plan_total_sum(x.size, x.dtype.itemsize)
    n_blocks = plan.grid[0]
    total = arrays.empty_like(x, (), f32)
    partial_sums = total if n_blocks == 1 else arrays.empty_like(x, (n_blocks,), f32)
    launch.launch("reduce", "sum_all", (kind, squares), plan, arrays.contiguous(x), partial_sums, i64(x.size))
    if n_blocks > 1:
        one = launch.LaunchPlan((1, 1), plan.block)
        launch.launch("reduce", "sum_all", ("float", "false"), one, partial_sums, total, i64(n_blocks))
    return total


def column_sums(x: Array, kind: str) -> Array:
    """Sum each column of a C-contiguous matrix (R, C) of CUDA type `kind` to a float32 vector (C,) by a CUDA kernel."""
    n_rows, size = x.shape
    plan, chunk = launch.plan_column_sums(n_rows, size, x.dtype.itemsize)
    partial_sums = arrays.empty_like(x, (plan.grid[1], size), f32)
    launch.launch("reduce", "sum_rows", (kind,), plan, x, partial_sums, i64(n_rows), i64(size), i64(chunk))
    return partial_sums[0] if len(partial_sums) == 1 else column_sums(partial_sums, "float")
