"""Few rows of float32 split into rows of int8 or bfloat16, and their products joined, in one call each."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle_accelerators import buffers
from tricycle_accelerators.compiled.loaded import load
from tricycle_accelerators.narrow_rows import Multiplication
from tricycle_accelerators.providers import unless


def _why_not(x: np.ndarray, few: Any) -> str | None:
    return None if x.flags.carray else "rows in one piece, aligned and not read-only"


@unless(_why_not)
def product_by_int8(x: np.ndarray, few: Multiplication) -> np.ndarray | None:
    scales = np.empty(len(x), np.float32)
    if not load("loops").split_int8(x, few.numbers, scales):
        return None
    few.run()
    product = buffers.empty((len(x), few.out.shape[1]), np.float32)
    load("loops").join_int8(few.out, scales, product)
    return product


@unless(_why_not)
def product_by_bfloat16(x: np.ndarray, few: Multiplication) -> np.ndarray | None:
    if not load("loops").split_bfloat16(x, few.numbers):
        return None
    few.run()
    product: np.ndarray = few.out[: len(x)] + few.out[len(x) :]
    return product
