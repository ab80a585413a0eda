"""Layer norm and RMS norm."""

from __future__ import annotations

from types import NotImplementedType
from typing import Any

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch, sums
from tricycle_accelerators.cuda.arrays import f32, i32, i64


def layer_norm(
    x: Array, gain: Array, bias: Array | None, eps: float, centred: bool, dtype: Any = None
) -> tuple[Array, Array, Array] | NotImplementedType:
    kind = arrays.kind(x)
    if kind is None or not x.size or (dtype is not None and dtype != x.dtype):
        return NotImplemented
    size = x.shape[-1]
    n_rows = x.size // size
    statistics = (*x.shape[:-1], 1)
    y = arrays.empty(x)
    mean = arrays.empty(x, statistics, f32)
    scale = arrays.empty(x, statistics, f32)
    operands = arrays.dense(x), arrays.floats(gain), None if bias is None else arrays.floats(bias)
    numbers = i64(n_rows), i32(size), f32(eps), i32(centred)
    plan = launch.teams(n_rows, size, x.dtype.itemsize)
    launch.launch("norm", "layer_norm", (kind,), plan, *operands, y, mean, scale, *numbers)
    return y, mean, scale


def layer_norm_backward(
    grad: Array, x: Array, gain: Array, mean: Array, scale: Array, centred: bool
) -> tuple[Array, Array, Array] | NotImplementedType:
    kind = arrays.kind(grad, x)
    if kind is None or not x.size:
        return NotImplemented
    size = x.shape[-1]
    n_rows = x.size // size
    rows = arrays.dense(grad), arrays.dense(x), arrays.floats(gain)
    statistics = arrays.floats(mean), arrays.floats(scale)
    at_once = arrays.elements_at_once(size, kind, *rows)
    blocks = launch.norm_backward(n_rows, size, at_once)
    if blocks is None:
        return NotImplemented
    plan, held = blocks
    dx = arrays.empty(x)
    by_block = arrays.empty(x, (plan.grid[0], 2 * size), f32)
    template = kind, str(at_once), str(held)
    numbers = i64(n_rows), i32(size), i32(centred)
    launch.launch("norm", "layer_norm_backward", template, plan, *rows, *statistics, dx, by_block, *numbers)
    total = sums.column_sums(by_block, "float")
    return dx, total[:size], total[size:]
