"""Kernels over the items of a batch."""

from __future__ import annotations

from collections.abc import Callable

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel, upcasting


@kernel
@upcasting(1)
def batched_matmul(a: Array, b: Array) -> Array:
    """Products of (..., N, K) and (..., K, M), whose leading axes are the same, in the dtype of the operands."""
    return array_module(a).matmul(a, b)


@kernel
def run_over_batch(q: Array, work: Callable[[slice], None]) -> None:
    """Let `work` do its part of a computation over a batch for all items; a faster version gives out single ones."""
    work(slice(0, len(q)))
