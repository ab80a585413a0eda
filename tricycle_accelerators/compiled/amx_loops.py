"""Blocked matrix product of float32 or bfloat16 by AMX tiles, compiled by Numba.

Groups of 32 columns of the right matrix are laid out as tiles until a core's second cache is half full; then groups of
32 rows of the left one meet them all. A group of rows is laid out when its turn comes, or once where it would be laid
out many times. INNER terms of the sums are added at a time.

Source: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from tricycle_accelerators.compiled.amx_tiles import (
    BLOCK,
    N_PARTS,
    PACK_TILE,
    STEP,
    TILE_BYTES,
    TILE_ROWS,
    begin_tiles,
    multiply_block_bfloat16,
    multiply_block_float32,
    release_tiles,
    write_bfloat16_rows,
    write_float32_rows,
)
from tricycle_accelerators.compiled.jit import (
    HAS_AMX,
    ZERO,
    compile_loop,
    convert_for,
    copy_row,
    inner_function,
    overload_by_types,
    to_float32,
)
from tricycle_accelerators.compiled.tiles import aligned_zeros

INNER = 384  # terms
RIGHT_BYTES = 2**20  # of columns that stay in a core's second cache while all rows go by
LEFT_BYTES = 2**23  # of rows that are laid out at once
MOST_LAYOUTS = 4  # of the same rows of the left matrix, one for each group of columns, before they are laid out at once
NEAR_STEPS = 12  # of a group of rows of bfloat16 that stay in a core's first cache


def _compile_for_amx(*signatures: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator `compile_loop`; without AMX it compiles at a call, since LLVM would end the process here."""
    return compile_loop([*signatures] if HAS_AMX else None)


def even_inner(n_inner: int) -> int:
    """Return the terms that are summed at a time: INNER or less, whole steps, about equally many each time."""
    n_times = -(-n_inner // INNER)
    return -(-n_inner // (n_times * STEP)) * STEP


@inner_function()
def _n_groups(size: int, group_bytes: int, most_bytes: int) -> int:
    """Return how many groups of BLOCK of `size` rows or columns are laid out at once: about equally many each time."""
    n_groups, most = (size + BLOCK - 1) // BLOCK, max(1, most_bytes // group_bytes)
    n_times = (n_groups + most - 1) // most
    return (n_groups + n_times - 1) // n_times


@inner_function()
def _group_bytes(n_parts: int, n_inner: int) -> int:
    """Return the bytes of BLOCK rows of n_inner terms that are laid out as tiles."""
    return (n_inner + STEP - 1) // STEP * 2 * n_parts * TILE_BYTES


@inner_function()
def _n_left_groups(n_rows: int, in_rows: bool, n_columns: int, n_resident: int, group_bytes: int) -> int:
    """Return how many groups of the left matrix's rows are laid out at once: one, when its turn comes, or what fits.

    More than one if rows are not contiguous, for they share cache lines then, or if each would be laid out many times.
    """
    if in_rows and n_columns <= MOST_LAYOUTS * n_resident:
        return 1
    return _n_groups(n_rows, group_bytes, LEFT_BYTES)


def scratch_bytes(a: np.ndarray, n_columns: int, n_inner: int) -> int:
    """Return the bytes of scratch memory for `multiply_large` of `a` and `n_columns`, `n_inner` terms at a time."""
    group = _group_bytes(N_PARTS if a.dtype == np.float32 else 1, n_inner)
    n_right = _n_groups(n_columns, group, RIGHT_BYTES)
    n_left = _n_left_groups(len(a), a.strides[1] == a.itemsize, n_columns, n_right * BLOCK, group)
    return int((n_left + n_right) * group)


# -------------------------------------------------------------------- operands
def _make_pack_tiles(n_parts: int) -> Any:
    """Return a Numba function that lays out BLOCK x STEP numbers of float32, or of bfloat16 bits if `n_parts` is 1.

    Its arguments are an address, bytes between rows and between columns, whether they are of a left operand, and the
    result's address. Rows or columns are contiguous.
    """
    pack = PACK_TILE[n_parts]
    lines, lines_transposed = pack[False, False], pack[False, True]
    pairs, pairs_transposed = pack[True, False], pack[True, True]
    size = 2 if n_parts == 1 else 4

    @inner_function()
    def pack_tiles(source: int, down: int, across: int, is_left: bool, result: int) -> None:
        in_rows = across == size
        for _ in range(2):
            if is_left and in_rows:
                lines(source, down, result, 2 * TILE_BYTES)
            elif is_left:
                pairs_transposed(source, across, result, 2 * TILE_BYTES)
            elif in_rows:
                lines_transposed(source, down, result, 2 * TILE_BYTES)
            else:
                pairs(source, across, result, 2 * TILE_BYTES)
            source += TILE_ROWS * down
            result += TILE_BYTES

    return pack_tiles


_pack_float32, _pack_bfloat16 = _make_pack_tiles(N_PARTS), _make_pack_tiles(1)


@overload_by_types
def _pack_tiles(x: Any, source: Any, down: Any, across: Any, is_left: Any, result: Any) -> Any:
    """Lay out BLOCK x STEP numbers of the dtype of x, as `_make_pack_tiles` says."""
    pack = _pack_bfloat16 if x.dtype == types.uint16 else _pack_float32
    return lambda x, source, down, across, is_left, result: pack(source, down, across, is_left, result)


@inner_function()
def pack_operand(x: np.ndarray, is_left: bool, edge: np.ndarray, result: int, group_bytes: int) -> None:
    """Write rows x (R, K) of a left operand, or columns of a right one, as tiles, missing numbers as 0.

    Each BLOCK of them begins `group_bytes` after the one before, from the address `result`. Numbers are read in the
    order of their addresses.

    Args:
        edge: (BLOCK, STEP) of the same dtype, overwritten.
    """
    n_groups, n_steps = (x.shape[0] + BLOCK - 1) // BLOCK, (x.shape[1] + STEP - 1) // STEP
    down, across = x.strides
    in_rows = across == x.itemsize
    for i in range(n_groups * n_steps):
        group, step = (i // n_steps, i % n_steps) if in_rows else (i % n_groups, i // n_groups)
        place = result + group * group_bytes + step * (2 * TILE_BYTES * _n_parts(x))
        row, term = BLOCK * group, STEP * step
        if row + BLOCK <= x.shape[0] and term + STEP <= x.shape[1]:
            _pack_tiles(x, x.ctypes.data + row * down + term * across, down, across, is_left, place)
        else:
            part = x[row : row + BLOCK, term : term + STEP]
            edge[:] = 0
            for r in range(len(part)):
                copy_row(part[r], edge[r, : part.shape[1]])
            _pack_tiles(x, edge.ctypes.data, edge.strides[0], edge.strides[1], is_left, place)


@overload_by_types
def _n_parts(x: Any) -> Any:
    """Return the bfloat16 parts of each number: one of bfloat16 bits (uint16), N_PARTS of float32."""
    n_parts = 1 if x.dtype == types.uint16 else N_PARTS
    return lambda x: n_parts


@_compile_for_amx(types.void(types.Array(types.float32, 2, "A", readonly=True), types.float32[:, :, ::1]))
def pack_as_tiles(matrix: np.ndarray, packed: np.ndarray) -> None:
    """Write a matrix (K, N), whose rows or columns are contiguous, as tiles for `amx_packed.py`, its edges with zeros.

    Args:
        packed: (N / BLOCK, K / STEP, 2 N_PARTS TILE_BYTES / 4), both rounded up, from the start of a cache line.
    """
    pack_operand(matrix.T, False, np.empty((STEP, STEP), np.float32), packed.ctypes.data, packed.strides[0])


# -------------------------------------------------------------------- products
@overload_by_types
def _multiply_block(x: Any, left: Any, right: Any, before: Any, sums: Any, n_steps: Any, add: Any) -> Any:
    """Write products of two groups that are laid out from matrices like x, plus the sums `before` if `add`, to sums."""
    multiply = multiply_block_bfloat16 if x.dtype == types.uint16 else multiply_block_float32
    return lambda x, left, right, before, sums, n_steps, add: multiply(left, right, before, sums, n_steps, add)


@overload_by_types
def _write_rows(out: Any, sums: Any, others: Any, others_down: Any, place: Any, n_rows: Any) -> Any:
    """Write BLOCK columns of sums + others, at addresses, to `place` in `out`; return NaN if not finite, else 0."""
    write = write_bfloat16_rows if out.dtype == types.uint16 else write_float32_rows

    def rows(out: Any, sums: Any, others: Any, others_down: Any, place: Any, n_rows: Any) -> Any:
        return write(sums, others, others_down, place, out.strides[0], n_rows)

    return rows


@inner_function()
def _write_edge(sums: np.ndarray, shift: np.ndarray, add: bool, out: np.ndarray) -> Any:
    """Write sums (BLOCK, BLOCK) + shift (BLOCK,) into `out` (M, N), or add sums there; NaN if not finite, else 0."""
    broken = ZERO
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            value = sums[i, j] + (to_float32(out[i, j]) if add else shift[j])
            broken += value * ZERO
            out[i, j] = convert_for(out, value)
    return broken


def _signature(operand: Any, result: Any) -> Any:
    """Return the signature of `multiply_large` for operands, which may be read-only, and results of these types."""
    x, out = types.Array(operand, 2, "A", readonly=True), types.Array(result, 2, "A")
    bias, memory = types.Array(types.float32, 1, "C", readonly=True), types.Array(types.uint8, 1, "C")
    return types.boolean(x, x, bias, out, types.intp, memory)


FLOAT32, BITS = types.float32, types.uint16


@_compile_for_amx(_signature(FLOAT32, FLOAT32), _signature(BITS, FLOAT32), _signature(BITS, BITS))
def multiply_large(
    a: np.ndarray, b: np.ndarray, bias: np.ndarray, out: np.ndarray, n_inner: int, scratch: np.ndarray
) -> bool:
    """Write a (M, K) @ b (K, N) + bias (N,), or (0,) for none, into `out`; return whether all results are finite.

    A float32 that is infinite, NaN or rounded to an infinite bfloat16 gives NaN, and the caller multiplies otherwise.

    Args:
        a, b: float32, or bits of bfloat16; of each the rows or the columns are contiguous. K is not 0.
        out: with contiguous rows; float32, or for bfloat16 also bits of it.
        n_inner: terms that are summed at a time; all for an `out` of bfloat16.
        scratch: `scratch_bytes` from a cache line's start.
    """
    n_rows, n_columns = out.shape
    group_bytes = _group_bytes(_n_parts(a), n_inner)
    n_resident = _n_groups(n_columns, group_bytes, RIGHT_BYTES) * BLOCK
    n_left = _n_left_groups(n_rows, a.strides[1] == a.itemsize, n_columns, n_resident, group_bytes)
    n_at_once = n_rows if n_left == 1 else n_left * BLOCK
    right = scratch.ctypes.data
    left = right + n_resident // BLOCK * group_bytes
    sums_so_far, sums = aligned_zeros(n_resident, BLOCK, bias), aligned_zeros(BLOCK, BLOCK, bias)
    edge = np.zeros((STEP, STEP), a.dtype)
    shift = np.zeros(n_columns + BLOCK, np.float32)
    copy_row(bias, shift[: len(bias)])
    broken, near, step_bytes = ZERO, NEAR_STEPS // _n_parts(a), 2 * _n_parts(a) * TILE_BYTES
    begin_tiles()
    for start in range(0, len(b), n_inner):
        terms = slice(start, min(len(b), start + n_inner))
        n_steps = (terms.stop - start + STEP - 1) // STEP
        for top in range(0, n_rows, n_at_once):
            if n_left > 1:
                pack_operand(a[top : top + n_at_once, terms], True, edge, left, group_bytes)
            for first in range(0, n_columns, n_resident):
                columns = slice(first, min(n_columns, first + n_resident))
                pack_operand(b[terms, columns].T, False, edge, right, group_bytes)
                for row in range(top, min(n_rows, top + n_at_once), BLOCK):
                    rows, of_left = slice(row, min(n_rows, row + BLOCK)), left
                    if n_left == 1:
                        pack_operand(a[rows, terms], True, edge, left, group_bytes)
                    else:
                        of_left += (row - top) // BLOCK * group_bytes
                    for step in range(0, n_steps, near):
                        of_step, n_near, is_last = step * step_bytes, min(near, n_steps - step), step + near >= n_steps
                        for column in range(columns.start, columns.stop, BLOCK):
                            of_right = right + (column - first) // BLOCK * group_bytes + of_step
                            before = sums_so_far.ctypes.data + (column - first) * 4 * BLOCK
                            of_sums = sums.ctypes.data if is_last else before  # the last are in the first cache
                            _multiply_block(a, of_left + of_step, of_right, before, of_sums, n_near, step > 0)
                            if not is_last:
                                continue
                            if column + BLOCK > n_columns:
                                broken += _write_edge(sums, shift[column:], start > 0, out[rows, column:])
                                continue
                            # addresses, for views of arrays here would take a fifth of the time of a product
                            place = out.ctypes.data + row * out.strides[0] + column * out.itemsize
                            others = place if start > 0 else shift.ctypes.data + 4 * column
                            others_down = out.strides[0] if start > 0 else 0
                            broken += _write_rows(out, of_sums, others, others_down, place, rows.stop - row)
    release_tiles()
    return broken == 0
