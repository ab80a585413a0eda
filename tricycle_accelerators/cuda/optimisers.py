"""AdamW in one kernel."""

from __future__ import annotations

import math
from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.devices import Array, array_module
from tricycle_accelerators.cuda import arrays, launch
from tricycle_accelerators.cuda.arrays import f32, i64


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
) -> NotImplementedType | None:
    """`step`, `learning_rate` and `factor` may be 0-d arrays on the device."""
    changed = weights, first, second
    if not weights.flags.c_contiguous and weights.flags.f_contiguous:
        return adamw(weights.T, grad.T, first.T, second.T, step, learning_rate, betas, eps, decay, factor)
    kind = arrays.kind(grad)
    if kind is None or any(a.dtype != f32 or not a.flags.c_contiguous for a in changed):
        return NotImplemented
    if any(a.shape != weights.shape for a in (grad, *changed)):
        return NotImplemented
    if not weights.size:
        return None

    def number(value: Any) -> tuple[Any, Array | None]:
        on_device = hasattr(value, "ndim") and not isinstance(value, np.generic)
        return (f32(0), arrays.floats(value)) if on_device else (f32(value), None)

    logs = (f32(math.log(beta)) if beta else f32(-math.inf) for beta in betas)
    at = None if factor is None else _on_device(factor, weights)
    numbers = *number(step), *number(learning_rate), at, *map(f32, betas), *logs, f32(eps), f32(decay)
    plan = launch.elementwise(weights.size, launch.pack(grad.dtype.itemsize))
    operands = weights, arrays.dense(grad), first, second, i64(weights.size)
    launch.launch("adamw", "adamw", (kind,), plan, *operands, *numbers)
    return None


def _on_device(factor: Array | float, like: Array) -> Array:
    """As a 0-d array."""
    if type(factor) is type(like):
        return arrays.floats(factor)
    return array_module(like).full((), factor, f32)  # filled there: a copy from the host would wait
