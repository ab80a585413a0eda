"""Products of a few float32 rows, each split into two int8 or bfloat16 rows.

Each row is split into a large and a small part, which a provider multiplies by a quantized matrix. What is computed
before and after that is a kernel with a plain version in NumPy. `tricycle.kernels.KERNELS` does not list these kernels,
as only providers call them.

Shapes: R rows, K numbers of each, M columns of the product.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tricycle.kernels.dispatch import Kernel

MAX_STEPS, HIGH_STEP = 32512.0, 256.0  # a number is a whole number of steps, a row's largest / (127 * 256) each
OFFSET = 128 * HIGH_STEP + 128 + 0.5  # makes the steps positive, so that cutting off the fraction rounds to nearest
MIN_MAX_ABS = 1e-30  # of a row's largest: numbers of rows below it become zeros


class LowPrecisionMatmul(Protocol):
    """Protocol of a provider's product of 2 R low-precision rows and a matrix, in arrays that it keeps.

    Attributes:
        numbers: (2 R, K) to be filled: int8, or the bits of bfloat16 as uint16.
        out: (2 R, M) of float32, which `run` writes.
    """

    numbers: np.ndarray
    out: np.ndarray

    def run(self) -> None:
        """Compute the product of `numbers` and the matrix into `out` (protocol method without an implementation)."""


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


@Kernel
def int8_split_matmul(x: np.ndarray, prepared: LowPrecisionMatmul) -> np.ndarray | None:
    """Return float32 rows (R, K) times an int8 matrix, (R, M), overwriting `prepared`; None for inf or NaN."""
    largest = row_max_abs(x)
    if largest is None:
        return None
    split_int8(x, largest, prepared.numbers.reshape(2, *x.shape))
    prepared.run()
    rest, large = prepared.out[: len(x)], prepared.out[len(x) :]
    large *= HIGH_STEP
    large += rest
    product: np.ndarray = large * (largest / MAX_STEPS)  # to the last bit as for a row alone
    return product


@Kernel
def bfloat16_split_matmul(x: np.ndarray, prepared: LowPrecisionMatmul) -> np.ndarray | None:
    """Return float32 x (R, K) @ bfloat16 matrix by two parts of x in `prepared`, overwritten; None for inf or NaN."""
    import ml_dtypes

    if not np.isfinite(x).all():
        return None
    rounded, rest = prepared.numbers.view(ml_dtypes.bfloat16).reshape(2, *x.shape)
    rounded[...] = x
    rest[...] = x - rounded.astype(np.float32)
    prepared.run()
    product: np.ndarray = prepared.out[: len(x)] + prepared.out[len(x) :]
    return product
