"""Cross-entropy kernel in CUDA."""

from __future__ import annotations

from tricycle.devices import Array
from tricycle_accelerators.cuda import arrays, launch, sums
from tricycle_accelerators.cuda.arrays import f32, i64
from tricycle_accelerators.providers import decline_when

# Two blocks at a time run on a multiprocessor, so that one reads while the other waits at a barrier.
THREADS = 512


@decline_when(lambda logits, *_, **__: arrays.array_decline_reason(logits))
def cross_entropy(
    logits: Array, labels: Array, weights: Array, smoothing: float = 0.0, with_gradient: bool = True
) -> tuple[Array, Array | None]:
    """Return the float32 sum of weight * cross-entropy and its gradient or None, by CUDA; ValueError for bad shapes."""
    n_rows, size = logits.shape
    if labels.shape != (n_rows,) or weights.shape != (n_rows,):
        got = f"{labels.shape} and {weights.shape}"
        raise ValueError(f"cross_entropy: expected labels and weights of shape ({n_rows},), got {got}")
    slope = arrays.empty_like(logits) if with_gradient else None
    costs = arrays.empty_like(logits, (n_rows,), f32)
    ids = arrays.contiguous(labels.astype(i64, copy=False))
    operands = arrays.contiguous(logits), ids, arrays.contiguous_float32(weights)
    numbers = i64(n_rows), i64(size), f32(smoothing)
    plan = launch.plan_rows(n_rows, size, logits.dtype.itemsize, THREADS)
    launch.launch("rows", "cross_entropy", (arrays.cuda_type(logits.dtype),), plan, *operands, costs, slope, *numbers)
    return sums.total_sum(costs, "float", "false"), slope
