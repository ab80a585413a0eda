"""Products of a few float32 rows, split into int8 or bfloat16 rows and recombined by Numba loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle_accelerators import buffers
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when
from tricycle_accelerators.split_precision import LowPrecisionMatmul


def _decline_reason(x: np.ndarray, prepared: Any) -> str | None:
    """Return why x is not contiguous, aligned and writable, or None; `prepared` is not examined."""
    return None if x.flags.carray else "rows in one piece, aligned and not read-only"


@decline_when(_decline_reason)
def int8_split_matmul(x: np.ndarray, prepared: LowPrecisionMatmul) -> np.ndarray | None:
    """Multiply float32 rows by an int8 matrix as low and high int8 rows, split, joined by Numba; None for NaN, inf."""
    scales = np.empty(len(x), np.float32)
    if not load_loops("loops").split_int8(x, prepared.numbers, scales):
        return None
    prepared.run()
    product = buffers.empty((len(x), prepared.out.shape[1]), np.float32)
    load_loops("loops").join_int8(prepared.out, scales, product)
    return product


@decline_when(_decline_reason)
def bfloat16_split_matmul(x: np.ndarray, prepared: LowPrecisionMatmul) -> np.ndarray | None:
    """Return float32 x @ bfloat16 matrix by two bfloat16 parts, overwriting `prepared`; None for NaN or infinity."""
    if not load_loops("loops").split_bfloat16(x, prepared.numbers):
        return None
    prepared.run()
    product: np.ndarray = prepared.out[: len(x)] + prepared.out[len(x) :]
    return product
