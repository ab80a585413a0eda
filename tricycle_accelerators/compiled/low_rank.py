"""Low-rank updates by Numba: a product of a few terms is added to an array in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle.kernels.dispatch import upcast
from tricycle_accelerators import chunks, matmul_plan, threads
from tricycle_accelerators.compiled.elementwise import MIN_SIZE, TOO_SMALL, as_contiguous, view_for_loops
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when

MAX_TERMS = 128  # for which the right matrix of a layer fits into a core's second-level cache


def _decline_reason(total: np.ndarray, a: np.ndarray, b: np.ndarray, *_: Any, **__: Any) -> str | None:
    """Return why the loop cannot add a @ b: few numbers, many terms, other dtypes, strides or columns; else None."""
    if total.size < MIN_SIZE:
        return TOO_SMALL
    if len(b) > MAX_TERMS:
        return f"more than {MAX_TERMS} terms"
    if not {str(array.dtype) for array in (total, a, b)} <= {"float32", "bfloat16"}:
        return f"float32 or bfloat16, got {total.dtype}, {a.dtype} and {b.dtype}"
    if total.strides[1] != total.itemsize or not total.flags.behaved:
        return "a total with contiguous rows, aligned and not read-only"
    return matmul_plan.tile_shape_decline_reason(total.shape[1], load_loops("registers").LANES)


@decline_when(_decline_reason)
def add_matmul(total: np.ndarray, a: np.ndarray, b: np.ndarray, precision: str = "float32") -> None:
    """Add a @ b to `total` in place by Numba in threads; NotImplemented for small or unsuited arrays or many terms."""
    left, right, sums = as_contiguous(upcast(a)), as_contiguous(upcast(b)), view_for_loops(total)
    add = load_loops("low_rank_loops").add_product
    threads.parallel_for(lambda rows: add(left[rows], right, sums[rows]), chunks.thread_slices(len(total)), False)
