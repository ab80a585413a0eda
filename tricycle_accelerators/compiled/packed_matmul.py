"""Matrix products with a weight matrix that is packed into column panels once, compiled by Numba.

The import compiles the loops or loads cached machine code.

The columns of a recurrent layer's weights are cut into panels, each of which stays in a core's first cache while the
rows of a step go by.

Shapes: R rows, K terms, N columns; P panels of PANEL columns.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from tricycle_accelerators.compiled import amx_packed
from tricycle_accelerators.compiled.jit import HAS_AMX, OPTIONS, compile_loop, intrinsic, overload_by_types
from tricycle_accelerators.compiled.registers import (
    INDEX,
    LANES,
    N_REGISTERS,
    VECTOR,
    build_product_sums,
    load,
    offset_address,
    store,
)

N_VECTORS = 2  # of a panel's row
PANEL = N_VECTORS * LANES  # columns
MOST_ROWS = 12 if N_REGISTERS == 32 else 6  # of a tile: its sums, a row of a panel and one number fit into registers


@intrinsic
def _tile(
    context: Any, n_rows: Any, rows: Any, row_size: Any, panel: Any, n_terms: Any, bias: Any, out: Any, out_size: Any
) -> Any:
    """Write `n_rows` rows (K,) times a panel (K, PANEL) plus a bias (PANEL,) to `out` (Numba intrinsic).

    Args:
        n_rows: 1 to MOST_ROWS.
        rows, panel, bias, out: addresses.
        row_size, out_size: bytes from one row to the next.
        n_terms: K, 1 or more.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count, *rest = arguments
        end = builder.append_basic_block("tiles_end")
        choice = builder.switch(count, end)
        for n in range(1, MOST_ROWS + 1):
            block = builder.append_basic_block(f"tile_of_{n}")
            choice.add_case(INDEX(n), block)
            builder.position_at_end(block)
            _write_tile(builder, n, *rest)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), code


def _write_tile(
    builder: Any, n_rows: int, rows: Any, row_size: Any, panel: Any, n_terms: Any, bias: Any, out: Any, out_size: Any
) -> None:
    """Emit code that writes `n_rows` rows times a panel, plus the bias, to `out`."""
    along, places = INDEX(4 * LANES), range(N_VECTORS)
    first = [load(builder, offset_address(builder, bias, along, i), VECTOR) for i in places]
    operands = rows, row_size, INDEX(4), panel, INDEX(4 * PANEL)
    sums = build_product_sums(builder, (n_rows, N_VECTORS), False, operands, n_terms, first)
    for i, value in enumerate(sums):
        row = offset_address(builder, out, out_size, i // N_VECTORS)
        store(builder, value, offset_address(builder, row, along, i % N_VECTORS))


def pack_panels(matrix: np.ndarray) -> np.ndarray:
    """Copy a float32 matrix (K, N) to panels of PANEL columns each, (P, K, PANEL); zeros fill up the last panel."""
    n_terms, n_columns = matrix.shape
    n_panels = -(-n_columns // PANEL)
    panels = np.zeros((n_panels, n_terms, PANEL), np.float32)
    n_full = n_columns // PANEL
    panels[:n_full] = matrix[:, : n_full * PANEL].reshape(n_terms, n_full, PANEL).swapaxes(0, 1)
    panels[n_full:, :, : n_columns - n_full * PANEL] = matrix[:, n_full * PANEL :]
    return panels


@numba.njit(inline="always")
def _rows_times_panel(
    x: np.ndarray, t: int, panels: np.ndarray, p: int, bias: np.ndarray, out: int, out_size: int
) -> None:
    """Write x[t] (B, K) times a panel, plus its part of the bias, to an address."""
    n_rows = x.shape[1]
    n_tiles = (n_rows + MOST_ROWS - 1) // MOST_ROWS
    of_x, row_size = x.ctypes.data + t * x.strides[0], x.strides[1]
    of_panel, of_bias = panels.ctypes.data + p * panels.strides[0], bias.ctypes.data + 4 * PANEL * p
    first = 0
    for tile in range(n_tiles):
        last = (tile + 1) * n_rows // n_tiles  # as many rows in each as can be: few make poor use of a panel
        place = out + first * out_size
        _tile(last - first, of_x + first * row_size, row_size, of_panel, x.shape[2], of_bias, place, out_size)
        first = last


@numba.njit(**OPTIONS)
def _multiply_panels(x: np.ndarray, panels: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write x (T, B, K) times panels (P, K, PANEL), plus a bias (P PANEL,), into `out` (T, B, N).

    Each sum is made in order.
    """
    n_steps, n_rows, n_columns = out.shape
    n_full = n_columns // PANEL
    for p in range(n_full):  # a panel stays in the first cache while all rows go by
        for t in range(n_steps):
            place = out.ctypes.data + t * out.strides[0] + 4 * PANEL * p
            _rows_times_panel(x, t, panels, p, bias, place, out.strides[1])
    if n_full == len(panels):
        return
    edge = np.empty((n_rows, PANEL), np.float32)
    for t in range(n_steps):
        _rows_times_panel(x, t, panels, n_full, bias, edge.ctypes.data, 4 * PANEL)
        for b in range(n_rows):
            for j in range(n_columns - n_full * PANEL):
                out[t, b, n_full * PANEL + j] = edge[b, j]


@overload_by_types
def _multiply(x: Any, packed: Any, bias: Any, out: Any) -> Any:
    """Write x times a packed matrix, in panels or in tiles, plus a bias, into `out`, as `multiply_packed`."""
    if not HAS_AMX:
        return lambda x, packed, bias, out: _multiply_panels(x, packed, bias, out)

    def multiply(x: Any, packed: Any, bias: Any, out: Any) -> None:
        if packed.shape[2] == amx_packed.WIDTH:
            amx_packed.multiply_tiles(x, packed, bias, out)
        else:
            _multiply_panels(x, packed, bias, out)

    return multiply


@compile_loop("void(f4[:, :, :], f4[:, :, ::1], f4[::1], f4[:, :, :])")
def multiply_packed(x: np.ndarray, packed: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write x (T, B, K) times a packed matrix, plus a bias (P PANEL,), into `out` (T, B, N).

    The last axes are in one piece.

    Args:
        packed: by `pack_panels` (P, K, PANEL), or as AMX tiles by `amx_loops.pack_as_tiles`.
    """
    _multiply(x, packed, bias, out)
