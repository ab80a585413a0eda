"""Matrix products with a weight matrix that is packed into column panels once, compiled by Numba.

The import compiles the loops or loads cached machine code.

The columns of a recurrent layer's weights are cut into panels, of which PART_TERMS rows stay in a core's first cache
while the rows of all steps go by.

Shapes: R rows, K terms, N columns; P panels of PANEL columns.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from tricycle_accelerators import buffers
from tricycle_accelerators.compiled import amx_packed
from tricycle_accelerators.compiled.jit import (
    HAS_AMX,
    ZERO,
    compile_loop,
    emitted_intrinsic,
    inner_function,
    overload_by_types,
)
from tricycle_accelerators.compiled.registers import (
    INDEX,
    INSTRUCTION_SET,
    LANES,
    N_REGISTERS,
    VECTOR,
    build_product_sums,
    load,
    offset_address,
    store,
)

# Rows of a tile, and registers of a panel's row: sums, a row of a panel and one number fit into registers.
MOST_ROWS, N_VECTORS = (12, 2) if N_REGISTERS == 32 else (INSTRUCTION_SET.tile_rows, INSTRUCTION_SET.tile_vectors)
PANEL = N_VECTORS * LANES  # columns
PART_TERMS = 2**13 // (4 * LANES)  # rows of a panel that are multiplied at a time: 16 kB, or 24 kB of three registers


@emitted_intrinsic(types.void(*[types.int64] * 9))
def _tile(builder: Any, n_rows: Any, *operands: Any) -> None:
    """Write `n_rows` rows (K,) times a panel (K, PANEL) plus others (n_rows, PANEL) to `out` (Numba intrinsic).

    Args:
        n_rows: 1 to MOST_ROWS.
        operands: (rows, row_size, panel, n_terms, others, others_size, out, out_size): addresses; bytes from one row to
            the next, 0 for the same; and K, 1 or more.
    """
    end = builder.append_basic_block("tiles_end")
    choice = builder.switch(n_rows, end)
    for n in range(1, MOST_ROWS + 1):
        block = builder.append_basic_block(f"tile_of_{n}")
        choice.add_case(INDEX(n), block)
        builder.position_at_end(block)
        _write_tile(builder, n, *operands)
        builder.branch(end)
    builder.position_at_end(end)


def _write_tile(builder: Any, n_rows: int, *operands: Any) -> None:
    """Emit code that writes `n_rows` rows times a panel, plus others, to `out`; `operands` as of `_tile`."""
    rows, row_size, panel, n_terms, others, others_size, out, out_size = operands

    def place(start: Any, size: Any, i: int) -> Any:
        """Emit the address of vector i of the tile."""
        row = offset_address(builder, start, size, i // N_VECTORS)
        return offset_address(builder, row, INDEX(4 * LANES), i % N_VECTORS)

    first = [load(builder, place(others, others_size, i), VECTOR) for i in range(n_rows * N_VECTORS)]
    strided = rows, row_size, INDEX(4), panel, INDEX(4 * PANEL)
    for i, value in enumerate(build_product_sums(builder, (n_rows, N_VECTORS), False, strided, n_terms, first)):
        store(builder, value, place(out, out_size, i))


@compile_loop(types.void(types.Array(types.float32, 2, "A", readonly=True), types.float32[:, :, ::1]))
def _fill_panels(matrix: np.ndarray, panels: np.ndarray) -> None:
    """Write the columns of a matrix (K, N) to panels (P, K, PANEL), and zeros after the last."""
    n_terms, n_columns = matrix.shape
    for p in range(len(panels)):
        n = min(PANEL, n_columns - p * PANEL)
        for k in range(n_terms):
            for j in range(n):
                panels[p, k, j] = matrix[k, p * PANEL + j]
            panels[p, k, n:] = ZERO


def pack_panels(matrix: np.ndarray) -> np.ndarray:
    """Copy a float32 matrix (K, N) to panels of PANEL columns each, (P, K, PANEL); zeros fill up the last panel."""
    n_terms, n_columns = matrix.shape
    panels = buffers.aligned_empty((-(-n_columns // PANEL), n_terms, PANEL), np.float32)
    _fill_panels(matrix, panels)
    return panels


@numba.njit(inline="always")
def _rows_times_panel(
    x: np.ndarray, t: int, panels: np.ndarray, p: int, bias: np.ndarray, out: int, out_size: int, start: int
) -> None:
    """Write x[t] (B, K) times a panel's terms from `start` on, plus the bias or the sums so far, to an address."""
    n_rows, n_terms = x.shape[1], min(PART_TERMS, x.shape[2] - start)
    n_tiles = (n_rows + MOST_ROWS - 1) // MOST_ROWS
    of_x, row_size = x.ctypes.data + t * x.strides[0] + 4 * start, x.strides[1]
    of_panel = panels.ctypes.data + p * panels.strides[0] + start * panels.strides[1]
    others, others_size = (out, out_size) if start else (bias.ctypes.data + 4 * PANEL * p, 0)
    first = 0
    for tile in range(n_tiles):
        last = (tile + 1) * n_rows // n_tiles  # as many rows in each as can be: few make poor use of a panel
        place, of_others = out + first * out_size, others + first * others_size
        _tile(
            last - first, of_x + first * row_size, row_size, of_panel, n_terms, of_others, others_size, place, out_size
        )
        first = last


@inner_function()
def _multiply_panels(x: np.ndarray, panels: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write x (T, B, K) times panels (P, K, PANEL), plus a bias (P PANEL,), into `out` (T, B, N).

    Each sum is made in order.
    """
    n_steps, n_rows, n_columns = out.shape
    n_full = n_columns // PANEL
    for p in range(n_full):
        for start in range(0, x.shape[2], PART_TERMS):
            for t in range(n_steps):
                place = out.ctypes.data + t * out.strides[0] + 4 * PANEL * p
                _rows_times_panel(x, t, panels, p, bias, place, out.strides[1], start)
    if n_full == len(panels):
        return
    edge = np.empty((n_rows, PANEL), np.float32)
    for t in range(n_steps):
        for start in range(0, x.shape[2], PART_TERMS):
            _rows_times_panel(x, t, panels, n_full, bias, edge.ctypes.data, 4 * PANEL, start)
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
