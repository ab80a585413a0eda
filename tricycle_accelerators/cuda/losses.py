"""Cross-entropy."""

from __future__ import annotations

from types import NotImplementedType

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch, sums
from tricycle_accelerators.cuda.arrays import f32, i64


def cross_entropy(
    logits: Array, labels: Array, weights: Array, smoothing: float = 0.0, with_slope: bool = True
) -> tuple[Array, Array | None] | NotImplementedType:
    kind = arrays.kind(logits)
    if kind is None or not logits.size:
        return NotImplemented
    slope = arrays.empty(logits) if with_slope else None
    return _cross_entropy(kind, logits, labels, weights, smoothing, slope), slope


def _cross_entropy(
    kind: str, logits: Array, labels: Array, weights: Array, smoothing: float, slope: Array | None
) -> Array:
    n_rows, size = logits.shape
    if labels.shape != (n_rows,) or weights.shape != (n_rows,):
        got = f"{labels.shape} and {weights.shape}"
        raise ValueError(f"cross_entropy: expected labels and weights of shape ({n_rows},), got {got}")
    costs = arrays.empty(logits, (n_rows,), f32)
    ids = arrays.dense(labels.astype(i64, copy=False))
    operands = arrays.dense(logits), ids, arrays.floats(weights)
    numbers = i64(n_rows), i64(size), f32(smoothing)
    plan = launch.teams(n_rows, size, logits.dtype.itemsize)
    launch.launch("rows", "cross_entropy", (kind,), plan, *operands, costs, slope, *numbers)
    return sums.whole_sum(costs, "float", "false")
