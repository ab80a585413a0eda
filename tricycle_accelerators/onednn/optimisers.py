"""Orthogonalization of matrices (Muon) by bfloat16 products of oneDNN."""

from __future__ import annotations

import numpy as np

from tricycle.kernels.muon import POLAR
from tricycle_accelerators import buffers, threads
from tricycle_accelerators.onednn import library
from tricycle_accelerators.onednn.matrices import rounding_decline_reason
from tricycle_accelerators.providers import decline_when

SAFETY = 1.01


@decline_when(rounding_decline_reason)
def orthogonalize(x: np.ndarray, precision: str = "float32") -> np.ndarray:
    """Return about U V^T of each U S V^T in float32 x (N, R, C); NotImplemented for other x, another `precision`.

    Operands have 16 bits, sums 32.

    Rounding takes singular values a little above 1, from where the iteration would take them far away: so its weights
    are those of values that may be larger by SAFETY (Amsel et al. 2025, on finite precision).
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.swapaxes(1, 2), precision).swapaxes(1, 2)
    _, n_rows, n_columns = x.shape
    polar = buffers.empty(x.shape, np.float32)
    bfloat16 = library.bfloat16()

    def work(i: int) -> None:
        matrix = np.ascontiguousarray(x[i])
        square = np.empty((n_rows, n_rows), np.float32)
        rounded = np.empty((n_rows, n_columns), bfloat16)
        factors = np.empty((2, n_rows, n_rows), bfloat16)
        library.convert(matrix * (1 / (1.01 * np.linalg.norm(matrix) + 1e-7)), rounded)
        diagonal = square.reshape(-1)[:: n_rows + 1]
        for step, weights in enumerate(POLAR):  # a + b s + c s^2 as a + s (b + c s), where s = x x^T
            a, b, c = (weight / SAFETY ** (2 * i + 1) for i, weight in enumerate(weights))
            library.matmul(rounded, rounded.T, square)
            library.convert(square, factors[0])
            square *= c
            diagonal += b
            library.convert(square, factors[1])
            library.matmul(factors[0], factors[1], square)
            diagonal += a
            library.convert(square, factors[0])
            result = polar[i] if step == len(POLAR) - 1 else np.empty_like(rounded)
            library.matmul(factors[0], rounded, result)
            rounded = result

    threads.parallel_for(work, range(len(x)))
    return polar
