"""Blocked float32 matrix product compiled by Numba, from the register tiles of `tiles.py`.

The right matrix is packed in panels of columns. N_PANELS of them, with STEPS terms at most, stay in a core's
second-level cache while all rows of the left matrix are multiplied by them. Rows are not packed. ROWS_AT_ONCE of them,
CHAIN terms long, fit into the first-level cache beside their part of a panel.

Source: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

import numpy as np

from tricycle_accelerators.compiled.jit import compile_loop, contiguous_row, inner_function
from tricycle_accelerators.compiled.registers import LANES as LANES
from tricycle_accelerators.compiled.tiles import ROWS as ROWS
from tricycle_accelerators.compiled.tiles import (
    VECTORS,
    aligned_zeros,
    copy_rows,
    multiply,
    pack_right,
    pack_right_transposed,
    round_up_to_lanes,
)

PANEL = VECTORS * LANES  # columns
N_PANELS = max(1, 192 // PANEL)  # 590 kB with STEPS terms
STEPS, ROWS_AT_ONCE = 768, 32
CHAIN = 96  # products that a register sums: rounding errors grow with their number, and each chain ends with a store


@inner_function()
def _add_bias(out: np.ndarray, bias: np.ndarray) -> None:
    """Add a bias (N,) to each row of `out` (M, N) in place."""
    for i in range(len(out)):
        row = contiguous_row(out, i)
        for j in range(len(row)):
            row[j] += bias[j]


@inner_function()
def _multiply_in_chains(left: np.ndarray, right: np.ndarray, out: np.ndarray, add: bool) -> None:
    """Write whole tiles left @ right into `out`, or add them there; sums of CHAIN products are added to each other."""
    for start in range(0, len(right), CHAIN):
        steps = slice(start, min(len(right), start + CHAIN))
        multiply(left[:, steps], right[steps], out, add or start > 0)


@inner_function()
def _pack_panels(b: np.ndarray, scratch: np.ndarray, panels: np.ndarray) -> None:
    """Write b (K, N) to panels (P, STEPS, PANEL) of columns, by way of `scratch` (LANES, STEPS) if transposed."""
    n_terms, n_columns = b.shape
    for p in range(len(panels)):
        columns = b[:, p * PANEL : min(n_columns, (p + 1) * PANEL)]
        if b.strides[1] == b.itemsize:
            pack_right(columns, panels[p])
        else:
            pack_right_transposed(columns.T, scratch[:, : round_up_to_lanes(n_terms)], panels[p])


@inner_function()
def _multiply_panels(left: np.ndarray, panels: np.ndarray, bias: np.ndarray, out: np.ndarray, add: bool) -> None:
    """Write whole tiles left (M, K) @ panels (P, STEPS, PANEL) + bias into `out` (M, N), or add them there."""
    for p in range(len(panels)):
        columns = slice(p * PANEL, min(out.shape[1], (p + 1) * PANEL))
        right = panels[p, : left.shape[1], : columns.stop - columns.start]
        _multiply_in_chains(left, right, out[:, columns], add)
    if len(bias):
        _add_bias(out, bias)


@compile_loop("void(f4[:, :], f4[:, :], f4[::1], f4[:, :])")
def multiply_large(a: np.ndarray, b: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write a (M, K) @ b (K, N) + bias (N,), or (0,) for none, into `out`; N is a multiple of LANES, and K not 0.

    Rows of `a` and of `out` are contiguous, and of b its rows or its columns. Rows after the last whole tile are
    multiplied as a tile that is filled up with zeros.
    """
    n_rows, n_inner = a.shape
    n_whole, n_columns = n_rows // ROWS * ROWS, b.shape[1]
    scratch = aligned_zeros(LANES, STEPS, bias)
    panels = aligned_zeros(N_PANELS * STEPS, PANEL, bias).reshape(N_PANELS, STEPS, PANEL)
    last_left, last_out = aligned_zeros(ROWS, STEPS, bias), aligned_zeros(ROWS, N_PANELS * PANEL, bias)
    n_parts = (n_inner + STEPS - 1) // STEPS
    for part in range(n_parts):
        start, stop = n_inner * part // n_parts, n_inner * (part + 1) // n_parts
        copy_rows(a[n_whole:, start:stop], last_left)
        for first in range(0, n_columns, N_PANELS * PANEL):
            columns = slice(first, min(n_columns, first + N_PANELS * PANEL))
            right = panels[: (columns.stop - first + PANEL - 1) // PANEL]
            _pack_panels(b[start:stop, columns], scratch, right)
            shifts = bias[columns if stop == n_inner else slice(0)]
            for row in range(0, n_whole, ROWS_AT_ONCE):
                rows = slice(row, min(n_whole, row + ROWS_AT_ONCE))
                _multiply_panels(a[rows, start:stop], right, shifts, out[rows, columns], start > 0)
            if n_whole < n_rows:
                tile = last_out[:, : columns.stop - first]
                copy_rows(out[n_whole:, columns], tile)
                _multiply_panels(last_left[:, : stop - start], right, shifts, tile, start > 0)
                copy_rows(tile[: n_rows - n_whole], out[n_whole:, columns])
