"""Float32 rows split into a large and a small part of int8, which providers multiply by a quantized matrix.

Shapes: R rows, K numbers of each.
"""

from __future__ import annotations

import numpy as np

MAX_STEPS, HIGH_STEP = 32512.0, 256.0  # a number is a whole number of steps, a row's largest / (127 * 256) each
OFFSET = 128 * HIGH_STEP + 128 + 0.5  # makes the steps positive, so that cutting off the fraction rounds to nearest
MIN_MAX_ABS = 1e-30  # of a row's largest: numbers of rows below it become zeros


def row_max_abs(x: np.ndarray) -> np.ndarray | None:
    """Return the largest absolute value of each row, (R, 1), at least MIN_MAX_ABS; None for infinity or NaN."""
    largest: np.ndarray = np.maximum.reduce(np.abs(x), axis=1, keepdims=True)
    if not np.maximum.reduce(largest, axis=None) < np.inf:
        return None
    return np.maximum(largest, MIN_MAX_ABS, out=largest)


def split_int8(x: np.ndarray, largest: np.ndarray, out: np.ndarray) -> None:
    """Split float32 x (R, K), with `row_max_abs(x)`, into low and high int8 parts, written into `out` (2, R, K)."""
    numbers = x * (MAX_STEPS / largest)
    numbers += OFFSET
    parts = numbers.astype("<u2", order="C").view(np.uint8).reshape(*x.shape, 2).transpose(2, 0, 1)
    np.bitwise_xor(parts, 128, out=out.view(np.uint8))  # subtracts 128
