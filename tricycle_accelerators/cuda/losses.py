"""Cross-entropy."""

from __future__ import annotations

from typing import Any

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch, sums
from tricycle_accelerators.cuda.arrays import f32, i64
from tricycle_accelerators.providers import unless


def _why_not_cross_entropy(logits: Array, *_: Any, **__: Any) -> str | None:
    return arrays.decline_reason(logits)


@unless(_why_not_cross_entropy)
def cross_entropy(
    logits: Array, labels: Array, weights: Array, smoothing: float = 0.0, with_gradient: bool = True
) -> tuple[Array, Array | None]:
    slope = arrays.empty(logits) if with_gradient else None
    return _cross_entropy(logits, labels, weights, smoothing, slope), slope


def _cross_entropy(logits: Array, labels: Array, weights: Array, smoothing: float, slope: Array | None) -> Array:
    n_rows, size = logits.shape
    if labels.shape != (n_rows,) or weights.shape != (n_rows,):
        got = f"{labels.shape} and {weights.shape}"
        raise ValueError(f"cross_entropy: expected labels and weights of shape ({n_rows},), got {got}")
    costs = arrays.empty(logits, (n_rows,), f32)
    ids = arrays.dense(labels.astype(i64, copy=False))
    operands = arrays.dense(logits), ids, arrays.floats(weights)
    numbers = i64(n_rows), i64(size), f32(smoothing)
    plan = launch.teams(n_rows, size, logits.dtype.itemsize)
    launch.launch("rows", "cross_entropy", (arrays.kind(logits.dtype),), plan, *operands, costs, slope, *numbers)
    return sums.whole_sum(costs, "float", "false")
