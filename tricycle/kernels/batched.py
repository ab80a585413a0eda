"""Kernels over the items of a batch: batched matrix products, and parallel loops over items."""

from __future__ import annotations

from collections.abc import Callable

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel, upcasting


@kernel
@upcasting(1)
def batched_matmul(a: Array, b: Array) -> Array:
    """Compute the matrix products of a (..., N, K) and b (..., K, M) with equal leading axes, in their dtype."""
    return array_module(a).matmul(a, b)


@kernel
def run_over_batch(q: Array, work: Callable[[slice], None]) -> None:
    """Call `work` with slices that cover the batch items of q; a provider may call it for single items in threads."""
    work(slice(0, len(q)))
