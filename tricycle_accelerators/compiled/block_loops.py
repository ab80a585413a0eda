"""Products with quantized blocks of GGUF files, and their dequantization. The import compiles or loads it.

The rows of a product are shared by the threads that serve a mailbox (`vector_loops`).

A matrix consists of one or several parts, of different formats or at different places in memory.

Shapes: R rows of x, K numbers each; M rows of blocks, which are the columns of the product.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tricycle_accelerators.compiled.block_rows import FORMATS, dot_blocks, write_dequantized
from tricycle_accelerators.compiled.block_rows import ROWS as BLOCK_ROWS
from tricycle_accelerators.compiled.jit import OPTIONS, ZERO, compile_loop, max_abs_if_finite, maximum
from tricycle_accelerators.compiled.vector_loops import run_job
from tricycle_accelerators.compiled.vector_rows import (
    FUNCTION,
    KIND,
    N_PARTS,
    N_ROWS,
    OTHER,
    OUT,
    ROWS,
    SCALES,
    SIZE,
    STRIDE,
    SUMS,
    X,
    pointer_to,
)

# More fields of a job: what the products of x's integers are added to, x's rows, bytes from row to row of the result,
# the address of the table of parts, and its rows.
STARTS, N_X, OUT_STRIDE, TABLE, N_TABLE = range(FUNCTION + 1, FUNCTION + 6)
# Columns of the table of a matrix's parts: the number of the format, the constant that its integers are too large by,
# the first row of the part, the row after its last, the address of its blocks, bytes from row to row, blocks in a row.
FORMAT, OFFSET, FIRST, END, BLOCKS, ROW_BYTES, N_BLOCKS = range(7)
PART = 32  # numbers of x with one scale
NOT_FINITE = -2  # what `multiply_blocks` returns for infinity or NaN
NUMBERS = {name: number for number, name in enumerate(FORMATS)}
MOST_INT8 = np.float32(127)
TINY = np.float32(1e-30)  # the smallest largest number of a part


def _multiply_block_rows(place: int, start: int, stop: int) -> None:
    """Compute some rows of a job's product for all rows of x; `place` is the address of its mailbox."""
    box = numba.carray(pointer_to(place, np.int64(0)), (FUNCTION + 6,))
    size, n_x = box[SIZE], box[N_X]
    table = numba.carray(pointer_to(box[TABLE], np.int64(0)), (box[N_TABLE], N_BLOCKS + 1))
    for p in range(len(table)):
        part = table[p]
        last = min(stop, part[END])
        for i in range(max(start, part[FIRST]), last, BLOCK_ROWS):
            row, n = part[BLOCKS] + (i - part[FIRST]) * part[ROW_BYTES], min(BLOCK_ROWS, last - i)
            for r in range(n_x):
                out = numba.carray(pointer_to(box[OUT] + r * box[OUT_STRIDE], ZERO), (box[N_ROWS],))
                numbers = r * (size // PART) * 4
                starts, scales, sums = box[STARTS] + (p * n_x + r) * size, box[SCALES] + numbers, box[SUMS] + numbers
                vector = box[X] + r * size
                products = dot_blocks(
                    part[FORMAT], vector, starts, scales, sums, part[N_BLOCKS], row, part[ROW_BYTES], n
                )
                for j in range(n):
                    out[i + j] = products[j]


multiply_block_rows: Any = numba.cfunc("void(i8, i8, i8)", cache=True, error_model="numpy")(_multiply_block_rows)


@numba.njit(**OPTIONS)
def _quantize(x: Any, integers: Any, fours: Any, scales: Any, sums: Any) -> None:
    """Write a finite row's int8 values, their sums by four, and the scale and scaled sum of each PART numbers."""
    for part in range(len(x) // PART):
        first = part * PART
        largest = TINY
        for j in range(first, first + PART):
            largest = maximum(abs(x[j]), largest)
        factor = MOST_INT8 / largest
        total = np.int32(0)
        for j in range(first, first + PART):
            integers[j] = np.int8(np.rint(x[j] * factor))
        for j in range(first // 4, (first + PART) // 4):
            four = np.int32(0)
            for k in range(4 * j, 4 * j + 4):
                four += np.int32(integers[k])
            total += four
            fours[j] = four
        scales[part] = largest / MOST_INT8
        sums[part] = scales[part] * np.float32(total)


@compile_loop("i8(f4[:, ::1], i8[:, ::1], f4[:, ::1], i8, i8[::1], i8)")
def multiply_blocks(
    x: np.ndarray, table: np.ndarray, out: np.ndarray, function: int, box: np.ndarray, n_threads: int
) -> int:
    """Write x (R, K) times M block rows to `out` (R, M), by the threads of `box`; return NOT_FINITE if x is not.

    Args:
        table: describes the parts of the rows by the columns FORMAT to N_BLOCKS.
        function: the address of `multiply_block_rows`.

    Returns:
        As `vector_loops.multiply_vector`; NOT_FINITE, without a product, if x has infinity or NaN.
    """
    n_x, size = x.shape
    integers = np.empty((n_x, size), np.int8)
    fours = np.empty((n_x, size // 4), np.int32)
    starts = np.empty((len(table), n_x, size // 4), np.int32)
    scales = np.empty((2, n_x, size // PART), np.float32)
    for r in range(n_x):
        if max_abs_if_finite(x[r]) == ZERO:
            return NOT_FINITE
        _quantize(x[r], integers[r], fours[r], scales[0, r], scales[1, r])
    for p in range(len(table)):
        starts[p] = fours * -np.int32(table[p, OFFSET])
    box[KIND], box[FUNCTION], box[N_PARTS] = OTHER, function, n_threads
    box[X], box[STARTS], box[N_X], box[SIZE] = integers.ctypes.data, starts.ctypes.data, n_x, size
    box[SCALES], box[SUMS] = scales.ctypes.data, scales[1].ctypes.data
    box[ROWS], box[STRIDE], box[N_ROWS] = table[0, BLOCKS], table[0, ROW_BYTES], out.shape[1]
    box[TABLE], box[N_TABLE] = table.ctypes.data, len(table)
    box[OUT], box[OUT_STRIDE] = out.ctypes.data, out.strides[0]
    waited = run_job(box)
    if len(integers) + len(starts) + len(scales) == 0:  # named here, or their memory would be free by now
        return NOT_FINITE
    return waited


@compile_loop("void(i8, i8, i8, f4[::1])")
def dequantize(form: int, rows: int, n_blocks: int, out: np.ndarray) -> None:
    """Write the values of `n_blocks` blocks that begin at the address `rows` into `out`."""
    if n_blocks > 0:
        write_dequantized(form, rows, out.ctypes.data, n_blocks)
