"""Blocked float32 matrix product compiled by Numba, from the register tiles of `tiles.py`.

The right matrix is laid out in panels of columns, and ROWS_AT_ONCE rows of the left one, as they lie, go by a panel at
a time. Of what a product sums a panel has STEPS at most, so that it stays in a core's second cache until all rows have
gone by.

Source: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

import numba
import numpy as np

from tricycle_accelerators.compiled.jit import OPTIONS, compile_loop, contiguous_row
from tricycle_accelerators.compiled.registers import LANES as LANES
from tricycle_accelerators.compiled.tiles import ROWS as ROWS
from tricycle_accelerators.compiled.tiles import (
    VECTORS,
    aligned_zeros,
    multiply,
    pack_right,
    pack_right_transposed,
    round_up_to_lanes,
)

PANEL = VECTORS * LANES  # columns
STEPS, ROWS_AT_ONCE = 768, 64
CHAIN = 96  # products that a register sums: rounding errors grow with their number, and each chain ends with a store


@numba.njit(**OPTIONS)
def _add_bias(out: np.ndarray, bias: np.ndarray) -> None:
    """Add a bias (N,) to each row of `out` (M, N) in place."""
    for i in range(len(out)):
        row = contiguous_row(out, i)
        for j in range(len(row)):
            row[j] += bias[j]


@numba.njit(**OPTIONS)
def _multiply_in_chains(left: np.ndarray, right: np.ndarray, out: np.ndarray, add: bool) -> None:
    """Write whole tiles left @ right into `out`, or add them there; sums of CHAIN products are added to each other."""
    for start in range(0, len(right), CHAIN):
        steps = slice(start, min(len(right), start + CHAIN))
        multiply(left[:, steps], right[steps], out, add or start > 0)


@compile_loop("void(f4[:, :], f4[:, :], f4[::1], f4[:, :])")
def multiply_large(a: np.ndarray, b: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write a (M, K) @ b (K, N) + bias (N,), or (0,) for none, into `out`; N is a multiple of LANES, and K not 0.

    Rows of `a` and of `out` are contiguous, and of b its rows or its columns. Rows after the last whole tile are
    multiplied as a tile that is filled up with zeros.
    """
    n_rows, n_inner = a.shape
    n_whole, n_columns = n_rows // ROWS * ROWS, b.shape[1]
    scratch, panel = aligned_zeros(LANES, STEPS, bias), aligned_zeros(STEPS, PANEL, bias)
    last_left, last_out = aligned_zeros(ROWS, STEPS, bias), aligned_zeros(ROWS, PANEL, bias)
    n_parts = (n_inner + STEPS - 1) // STEPS
    for part in range(n_parts):
        start, stop = n_inner * part // n_parts, n_inner * (part + 1) // n_parts
        last_left[: n_rows - n_whole, : stop - start] = a[n_whole:, start:stop]
        for first in range(0, n_columns, PANEL):
            columns = slice(first, min(n_columns, first + PANEL))
            right = panel[: stop - start, : columns.stop - first]
            if b.strides[1] == b.itemsize:
                pack_right(b[start:stop, columns], right)
            else:
                pack_right_transposed(b[start:stop, columns].T, scratch[:, : round_up_to_lanes(stop - start)], panel)
            for row in range(0, n_whole, ROWS_AT_ONCE):
                rows = slice(row, min(n_whole, row + ROWS_AT_ONCE))
                _multiply_in_chains(a[rows, start:stop], right, out[rows, columns], start > 0)
            if n_whole < n_rows:
                tile = last_out[:, : columns.stop - first]
                tile[: n_rows - n_whole] = out[n_whole:, columns]
                _multiply_in_chains(last_left[:, : stop - start], right, tile, start > 0)
                out[n_whole:, columns] = tile[: n_rows - n_whole]
            if len(bias) and stop == n_inner:
                _add_bias(out[:, columns], bias[columns])
