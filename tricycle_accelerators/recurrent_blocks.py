"""Recurrent weights copied into blocks that BLAS multiplies by few rows without copying them at each step."""

from __future__ import annotations

from functools import cached_property

import numpy as np

# With every product of more than one row BLAS copies the matrix into an order that suits it, which takes as long as a
# product of few rows. Up to a million multiplications OpenBLAS reads it where it is stored: with few rows (at most
# `ITEMS` of cpu/recurrence.py) and blocks of the matrix of this size.
MOST_TERMS = 480
BLOCK_COLUMNS = 64


class Blocks:
    """A matrix by which many others are multiplied, one after another, copied once into blocks."""

    __array_ufunc__ = None  # so that NumPy leaves `array @ blocks` to us

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix = matrix
        self.blocks: np.ndarray | None = None

    # Cache: valid as long as the blocks, which one call of a layer makes and drops.
    @cached_property
    def T(self) -> Blocks:
        return Blocks(self.matrix.T)

    def __rmatmul__(self, left: np.ndarray) -> np.ndarray:
        if len(left) == 1:
            return left @ self.matrix
        if self.blocks is None:
            self.blocks = self._cut()
        n_sums, n_blocks, _, n_columns = self.blocks.shape
        n_rows = len(left)
        out = np.empty((n_sums, n_rows, n_blocks * n_columns), left.dtype)
        terms = left.reshape(n_rows, n_sums, 1, -1).transpose(1, 2, 0, 3)
        np.matmul(terms, self.blocks, out=out.reshape(n_sums, n_rows, n_blocks, -1).swapaxes(1, 2))
        return (out[0] if n_sums == 1 else out.sum(axis=0))[:, : self.matrix.shape[1]]

    def _cut(self) -> np.ndarray:
        """(sums, blocks, terms, columns), with zeros where the last block is not full."""
        n_inner, n_columns = self.matrix.shape
        n_sums = 1
        n_blocks = -(-n_columns // BLOCK_COLUMNS)
        while n_inner > n_sums * MOST_TERMS and n_inner % (2 * n_sums) == 0:
            n_sums *= 2
        whole = np.zeros((n_inner, n_blocks * BLOCK_COLUMNS), self.matrix.dtype)
        whole[:, :n_columns] = self.matrix
        return np.ascontiguousarray(whole.reshape(n_sums, -1, n_blocks, BLOCK_COLUMNS).swapaxes(1, 2))
