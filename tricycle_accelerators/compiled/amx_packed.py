"""Products of few rows of float32 with a matrix that `amx_loops.pack_as_tiles` has packed once, for `packed_matmul.py`.

A packed matrix is an array of float32 with the bits of tiles in it: (groups of BLOCK columns, steps of STEP terms,
WIDTH). It stays in a core's second cache from one step of a recurrent layer to the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle_accelerators.compiled.amx_pairs import split_row
from tricycle_accelerators.compiled.amx_tiles import (
    BLOCK,
    N_PARTS,
    ROW_BYTES,
    STEP,
    TILE_BYTES,
    TILE_PAIRS,
    TILE_ROWS,
    begin_tiles,
    multiply_block_float32,
    multiply_rows_float32,
    release_tiles,
    write_float32_rows,
)
from tricycle_accelerators.compiled.jit import ZERO, aligned_empty, bfloat16_to_float32, copy_row, inner_function

STEP_BYTES = 2 * N_PARTS * TILE_BYTES  # of BLOCK rows or columns
WIDTH = STEP_BYTES // 4  # float32 of as many bytes
TILE_NUMBERS = TILE_BYTES // 2  # of bfloat16


@inner_function()
def _pack_rows(x: np.ndarray, first: int, left: np.ndarray) -> int:
    """Pack up to BLOCK rows of x (T, B, K), from number `first` of all T B on; return how many."""
    n_items, n_terms = x.shape[1:]
    n = min(BLOCK, x.shape[0] * n_items - first)
    for row in range(n):
        t, b = (first + row) // n_items, (first + row) % n_items
        source = x.ctypes.data + t * x.strides[0] + b * x.strides[1]
        place = left.ctypes.data + row // TILE_ROWS * TILE_BYTES + row % TILE_ROWS * ROW_BYTES
        for term in range(0, n_terms, TILE_PAIRS):
            result = place + term // STEP * STEP_BYTES + 2 * (term % STEP)
            split_row(source + 4 * term, min(TILE_PAIRS, n_terms - term), result, 2 * TILE_BYTES)
    return n


@inner_function()
def _write_rows(sums: np.ndarray, bias: np.ndarray, out: np.ndarray, first: int, n_rows: int, column: int) -> Any:
    """Write `n_rows` rows of sums (BLOCK, BLOCK) plus a bias to columns of `out`, from row `first` of all on.

    Returns 0, or NaN if a result is not finite.
    """
    n_items, n_columns = out.shape[1:]
    broken, row, width = ZERO, 0, min(BLOCK, n_columns - column)
    while row < n_rows:
        t, b = (first + row) // n_items, (first + row) % n_items
        n = min(n_rows - row, n_items - b)
        if width == BLOCK:
            place = out.ctypes.data + t * out.strides[0] + b * out.strides[1] + 4 * column
            of_sums, of_bias = sums.ctypes.data + row * sums.strides[0], bias.ctypes.data + 4 * column
            broken += write_float32_rows(of_sums, of_bias, 0, place, out.strides[1], n)
        else:
            for i in range(n):
                for j in range(width):
                    value = sums[row + i, j] + bias[column + j]
                    broken += value * ZERO
                    out[t, b + i, column + j] = value
        row += n
    return broken


@inner_function()
def _unpack(packed: np.ndarray) -> np.ndarray:
    """Return the float32 matrix of packed tiles, with the zeros at its edges.

    The parts of an infinite number are infinite and NaN, so only the first counts.
    """
    n_groups, n_steps, _ = packed.shape
    matrix = np.zeros((n_steps * STEP, n_groups * BLOCK), np.float32)
    for group in range(n_groups):
        for step in range(n_steps):
            bits = packed[group, step].view(np.uint16)
            for i in range(len(bits)):  # of a part, a tile, a row of pairs, a column, and the first or second of a pair
                row, column = i // STEP % TILE_ROWS * 2 + i % 2, i // TILE_NUMBERS % 2 * TILE_ROWS + i % STEP // 2
                part = bfloat16_to_float32(bits[i])
                total = matrix[step * STEP + row, group * BLOCK + column]
                if np.isfinite(total):
                    matrix[step * STEP + row, group * BLOCK + column] = total + part
    return matrix


@inner_function()
def _multiply_in_vectors(x: np.ndarray, matrix: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write a row x (K,) times a matrix, of K rows or more, plus a bias to `out` (N,), without tiles."""
    copy_row(bias, out)
    for k in range(len(x)):
        row = matrix[k]
        for j in range(len(out)):
            out[j] += x[k] * row[j]


@inner_function()
def multiply_tiles(x: np.ndarray, packed: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """Write x (T, B, K) times a matrix packed as tiles, plus a bias, into `out` (T, B, N).

    Rows whose products are not all finite are multiplied by the unpacked matrix: parts of infinite numbers give NaN.
    """
    n_steps, n_items = x.shape[:2]
    n_groups, depth, _ = packed.shape
    left = aligned_empty(depth, WIDTH)
    if x.shape[2] % STEP:
        left[:] = ZERO  # for the terms that the last step lacks
    sums = aligned_empty(2 * BLOCK, BLOCK).reshape(2, BLOCK, BLOCK)
    matrix = np.empty((0, 0), np.float32)
    begin_tiles()
    for first in range(0, n_steps * n_items, BLOCK):
        n = _pack_rows(x, first, left)
        broken = ZERO
        for group in range(0, n_groups, 2):
            n_beside = min(2, n_groups - group)
            right = packed.ctypes.data + group * packed.strides[0]
            if n <= TILE_ROWS:
                between = packed.strides[0] if n_beside == 2 else 0
                multiply_rows_float32(left.ctypes.data, right, between, sums.ctypes.data, depth)
            else:
                for i in range(n_beside):
                    of_group, of_sums = right + i * packed.strides[0], sums[i].ctypes.data
                    multiply_block_float32(left.ctypes.data, of_group, of_sums, of_sums, depth, False)
            for i in range(n_beside):
                broken += _write_rows(sums[i], bias, out, first, n, BLOCK * (group + i))
        if broken != 0:
            if not len(matrix):
                matrix = _unpack(packed)
            for i in range(first, first + n):
                _multiply_in_vectors(x[i // n_items, i % n_items], matrix, bias, out[i // n_items, i % n_items])
    release_tiles()
