"""AdamW update in one CUDA kernel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle.devices import Array, array_module
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import f32, i64
from tricycle_accelerators.providers import decline_when


def _adamw_decline_reason(weights: Array, grad: Array, first: Array, second: Array, *_: Any, **__: Any) -> str | None:
    """Return a reason unless weights and moments are float32, of one memory order and shape, as `grad`; else None."""
    turned = not weights.flags.c_contiguous and weights.flags.f_contiguous
    for x in (weights, first, second):
        if x.dtype != f32:
            return f"weights and moments in float32, got {x.dtype}"
        if not (x.flags.f_contiguous if turned else x.flags.c_contiguous):
            return "weights and moments in one piece and one order"
    if not grad.shape == first.shape == second.shape == weights.shape:
        return f"a gradient and moments of shape {weights.shape}, got {grad.shape}, {first.shape} and {second.shape}"
    return arrays.dtype_decline_reason(grad)


@decline_when(_adamw_decline_reason)
def adamw(
    weights: Array,
    grad: Array,
    first: Array,
    second: Array,
    step: Any,
    learning_rate: Any,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    factor: Array | float | None = None,
) -> None:
    """Update weights, AdamW moments in place by CUDA from `factor` times the gradient; no change unless factor > 0.

    `step`, `learning_rate` and `factor` may be 0-d arrays on the device.
    """
    if not weights.size:
        return
    if not weights.flags.c_contiguous:
        weights, grad, first, second = weights.T, grad.T, first.T, second.T

    def number(value: Any) -> tuple[Any, Array | None]:
        on_device = hasattr(value, "ndim") and not isinstance(value, np.generic)
        return (f32(0), arrays.contiguous_float32(value)) if on_device else (f32(value), None)

    logs = (f32(math.log(beta)) if beta else f32(-math.inf) for beta in betas)
    at = None if factor is None else _on_device(factor, weights)
    numbers = *number(step), *number(learning_rate), at, *map(f32, betas), *logs, f32(eps), f32(decay)
    plan = launch.plan_elementwise(weights.size, launch.elements_per_16_bytes(grad.dtype.itemsize))
    operands = weights, arrays.contiguous(grad), first, second, i64(weights.size)
    launch.launch("adamw", "adamw", (arrays.cuda_type(grad.dtype),), plan, *operands, *numbers)


def _on_device(factor: Array | float, like: Array) -> Array:
    """Return the factor as a 0-d float32 array on the device of `like`."""
    if type(factor) is type(like):
        return arrays.contiguous_float32(factor)
    return array_module(like).full((), factor, f32)  # filled there: a copy from the host would wait
