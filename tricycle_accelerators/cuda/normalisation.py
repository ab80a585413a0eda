"""Layer norm and RMS norm kernels in CUDA."""

from __future__ import annotations

from typing import Any

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch, sums
from tricycle_accelerators.cuda.arrays import f32, i32, i64
from tricycle_accelerators.providers import decline_when


def _layer_norm_decline_reason(
    x: Array, gain: Array, bias: Array | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> str | None:
    """Return a reason for a result in another dtype than x, an empty x or an unsupported dtype; else None."""
    if dtype is not None and dtype != x.dtype:
        return f"a result of another dtype than {x.dtype}"
    return arrays.array_decline_reason(x)


@decline_when(_layer_norm_decline_reason)
def layer_norm(
    x: Array, gain: Array, bias: Array | None, eps: float, subtract_mean: bool, dtype: Any = None
) -> tuple[Array, Array, Array]:
    """Return layer norm (RMS norm without `subtract_mean`), means and 1 / deviations (..., 1), by a CUDA kernel."""
    size = x.shape[-1]
    n_rows = x.size // size
    statistics = (*x.shape[:-1], 1)
    y = arrays.empty_like(x)
    mean = arrays.empty_like(x, statistics, f32)
    scale = arrays.empty_like(x, statistics, f32)
    operands = (
        arrays.contiguous(x),
        arrays.contiguous_float32(gain),
        None if bias is None else arrays.contiguous_float32(bias),
    )
    numbers = i64(n_rows), i32(size), f32(eps), i32(subtract_mean)
    plan = launch.plan_rows(n_rows, size, x.dtype.itemsize)
    launch.launch("norm", "layer_norm", (arrays.cuda_type(x.dtype),), plan, *operands, y, mean, scale, *numbers)
    return y, mean, scale


def _layer_norm_backward_decline_reason(grad: Array, x: Array, gain: Array, *_: Any, **__: Any) -> str | None:
    """Return a reason for a gradient in another dtype, too long rows, or an unsupported x; else None."""
    size = x.shape[-1]
    if grad.dtype != x.dtype:
        return f"a gradient in {x.dtype}, got {grad.dtype}"
    if size > launch.LONGEST_NORM[1]:
        rows = grad, x, gain if gain.dtype == f32 else x  # another gain is read from a copy
        at_once = arrays.vector_width(size, arrays.cuda_type(x.dtype), *rows)
        if size > launch.LONGEST_NORM[at_once]:
            return f"rows above {launch.LONGEST_NORM[at_once]} elements, of which a thread reads {at_once} at once"
    return arrays.array_decline_reason(x)


@decline_when(_layer_norm_backward_decline_reason)
def layer_norm_backward(
    grad: Array, x: Array, gain: Array, mean: Array, scale: Array, subtract_mean: bool
) -> tuple[Array, Array, Array]:
    """Return the gradients of x (in its dtype), gain and bias (float32) of the norm; NotImplemented for long rows."""
    kind, size = arrays.cuda_type(x.dtype), x.shape[-1]
    n_rows = x.size // size
    rows = arrays.contiguous(grad), arrays.contiguous(x), arrays.contiguous_float32(gain)
    statistics = arrays.contiguous_float32(mean), arrays.contiguous_float32(scale)
    at_once = arrays.vector_width(size, kind, *rows)
    plan, held = launch.plan_norm_backward(n_rows, size, at_once)
    dx = arrays.empty_like(x)
    by_block = arrays.empty_like(x, (plan.grid[0], 2 * size), f32)
    template = kind, str(at_once), str(held)
    numbers = i64(n_rows), i32(size), i32(subtract_mean)
    launch.launch("norm", "layer_norm_backward", template, plan, *rows, *statistics, dx, by_block, *numbers)
    total = sums.column_sums(by_block, "float")
    return dx, total[:size], total[size:]
