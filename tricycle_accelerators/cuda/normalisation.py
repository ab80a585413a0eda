"""Layer norm and RMS norm."""

from __future__ import annotations

from typing import Any

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch, sums
from tricycle_accelerators.cuda.arrays import f32, i32, i64
from tricycle_accelerators.providers import unless


def _why_not_layer_norm(
    x: Array, gain: Array, bias: Array | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> str | None:
    if dtype is not None and dtype != x.dtype:
        return f"a result of another dtype than {x.dtype}"
    return arrays.decline_reason(x)


@unless(_why_not_layer_norm)
def layer_norm(
    x: Array, gain: Array, bias: Array | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> tuple[Array, Array, Array]:
    size = x.shape[-1]
    n_rows = x.size // size
    statistics = (*x.shape[:-1], 1)
    y = arrays.empty(x)
    mean = arrays.empty(x, statistics, f32)
    scale = arrays.empty(x, statistics, f32)
    operands = arrays.dense(x), arrays.floats(gain), None if bias is None else arrays.floats(bias)
    numbers = i64(n_rows), i32(size), f32(eps), i32(subtract_mean)
    plan = launch.teams(n_rows, size, x.dtype.itemsize)
    launch.launch("norm", "layer_norm", (arrays.kind(x.dtype),), plan, *operands, y, mean, scale, *numbers)
    return y, mean, scale


def _why_not_layer_norm_backward(grad: Array, x: Array, gain: Array, *_: Any, **__: Any) -> str | None:
    size = x.shape[-1]
    if grad.dtype != x.dtype:
        return f"a gradient in {x.dtype}, got {grad.dtype}"
    if size > launch.LONGEST_NORM[1]:
        rows = grad, x, gain if gain.dtype == f32 else x  # another gain is read from a copy
        at_once = arrays.elements_at_once(size, arrays.kind(x.dtype), *rows)
        if size > launch.LONGEST_NORM[at_once]:
            return f"rows above {launch.LONGEST_NORM[at_once]} elements, of which a thread reads {at_once} at once"
    return arrays.decline_reason(x)


@unless(_why_not_layer_norm_backward)
def layer_norm_backward(
    grad: Array, x: Array, gain: Array, mean: Array, scale: Array, subtract_mean: bool
) -> tuple[Array, Array, Array]:
    kind, size = arrays.kind(x.dtype), x.shape[-1]
    n_rows = x.size // size
    rows = arrays.dense(grad), arrays.dense(x), arrays.floats(gain)
    statistics = arrays.floats(mean), arrays.floats(scale)
    at_once = arrays.elements_at_once(size, kind, *rows)
    plan, held = launch.norm_backward(n_rows, size, at_once)
    dx = arrays.empty(x)
    by_block = arrays.empty(x, (plan.grid[0], 2 * size), f32)
    template = kind, str(at_once), str(held)
    numbers = i64(n_rows), i32(size), i32(subtract_mean)
    launch.launch("norm", "layer_norm_backward", template, plan, *rows, *statistics, dx, by_block, *numbers)
    total = sums.column_sums(by_block, "float")
    return dx, total[:size], total[size:]
