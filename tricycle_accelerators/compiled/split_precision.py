"""Few rows of float32 split into rows of int8 or bfloat16, and their products joined, in one call each."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle_accelerators import buffers
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when
from tricycle_accelerators.split_precision import LowPrecisionMatmul


def _decline_reason(x: np.ndarray, few: Any) -> str | None:
    return None if x.flags.carray else "rows in one piece, aligned and not read-only"


@decline_when(_decline_reason)
def int8_split_matmul(x: np.ndarray, few: LowPrecisionMatmul) -> np.ndarray | None:
    scales = np.empty(len(x), np.float32)
    if not load_loops("loops").split_int8(x, few.numbers, scales):
        return None
    few.run()
    product = buffers.empty((len(x), few.out.shape[1]), np.float32)
    load_loops("loops").join_int8(few.out, scales, product)
    return product


@decline_when(_decline_reason)
def bfloat16_split_matmul(x: np.ndarray, few: LowPrecisionMatmul) -> np.ndarray | None:
    if not load_loops("loops").split_bfloat16(x, few.numbers):
        return None
    few.run()
    product: np.ndarray = few.out[: len(x)] + few.out[len(x) :]
    return product
