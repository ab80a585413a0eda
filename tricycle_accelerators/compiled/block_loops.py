"""Products with quantized blocks of GGUF files, and their dequantization. The import compiles or loads it.

The rows of a product are shared by the threads that serve a mailbox (`vector_loops`), in groups of LANES rows. Of few
vectors, each is multiplied with the blocks (`block_rows`); for more, the blocks are unpacked first (`block_tiles`).

A matrix consists of one or several parts, of different formats or at different places in memory.

Shapes: R rows of x, K numbers each; M rows of blocks, which are the columns of the product.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tricycle_accelerators.compiled.block_rows import FORMATS, PART, dot_blocks, quantize_vector, write_dequantized
from tricycle_accelerators.compiled.block_rows import ROWS as BLOCK_ROWS
from tricycle_accelerators.compiled.block_tiles import KIND_OF_FORMAT as KIND_OF_FORMAT
from tricycle_accelerators.compiled.block_tiles import TILE_VECTORS, multiply_tile, unpack_blocks
from tricycle_accelerators.compiled.jit import ZERO, compile_callback, compile_loop, inner_function, pointer_to
from tricycle_accelerators.compiled.registers import LANES
from tricycle_accelerators.compiled.tiles import aligned_zeros, round_up, transpose_tile
from tricycle_accelerators.compiled.vector_loops import MAILBOX, run_job
from tricycle_accelerators.compiled.vector_rows import (
    FUNCTION,
    KIND,
    N_PARTS,
    N_ROWS,
    N_X,
    OTHER,
    OUT,
    ROWS,
    SCALES,
    SIZE,
    STRIDE,
    SUMS,
    X,
)

# More fields of a job: what the products of x's integers are added to, x's rows, bytes from row to row of the result,
# the address of the table of parts, and its rows.
STARTS, OUT_STRIDE, TABLE, N_TABLE = range(FUNCTION + 1, FUNCTION + 5)
# Columns of the table of a matrix's parts: the number of the format, the constant that its integers are too large by,
# the first group of the part, the group after its last, its first row, its rows, the address of its blocks, bytes from
# row to row, blocks in a row, bytes and values of a block, the kind of its format (`block_tiles.KINDS`), and how many
# scales 32 values have.
FORMAT, OFFSET, FIRST, END, FIRST_ROW, PART_ROWS, BLOCKS, ROW_BYTES, N_BLOCKS, BLOCK_BYTES, BLOCK_VALUES = range(11)
FORMAT_KIND, SHARES, N_FIELDS = range(11, 14)
TILE_ROWS = 6  # from this number of vectors on, unpacking the blocks once takes less time than multiplying each vector
DEPTH = 1024  # values of each of LANES rows that are unpacked at once: they fit into a processor's first cache
# A row of unpacked values: integers, four in a word; scales, of which 32 values have one or two; minima.
SCALES_AT, MINIMA_AT, WORDS = DEPTH // 4, DEPTH // 4 + DEPTH // 16, DEPTH // 4 + DEPTH // 8
NOT_FINITE = -2  # what `multiply_blocks` returns for infinity or NaN
NUMBERS = {name: number for number, name in enumerate(FORMATS)}


# This and `_multiply_block_tiles` are compiled apart: in one function, products of few vectors took 5% longer.
@compile_callback("void(i8, i8, i8)")
def _multiply_block_rows(place: int, start: int, stop: int) -> None:
    """Compute some groups of a job's product, vector by vector; `place` is the address of its mailbox."""
    box = numba.carray(pointer_to(place, np.int64(0)), (FUNCTION + 5,))
    size, n_x = box[SIZE], box[N_X]
    table = numba.carray(pointer_to(box[TABLE], np.int64(0)), (box[N_TABLE], N_FIELDS))
    for p in range(len(table)):
        part = table[p]
        last = min((stop - part[FIRST]) * LANES, part[PART_ROWS])
        for i in range(max(start - part[FIRST], 0) * LANES, last, BLOCK_ROWS):
            row, n = part[BLOCKS] + i * part[ROW_BYTES], min(BLOCK_ROWS, last - i)
            for r in range(n_x):
                out = numba.carray(pointer_to(box[OUT] + r * box[OUT_STRIDE], ZERO), (part[FIRST_ROW] + last,))
                numbers = r * (size // PART) * 4
                starts, scales, sums = box[STARTS] + (p * n_x + r) * size, box[SCALES] + numbers, box[SUMS] + numbers
                vector = box[X] + r * size
                products = dot_blocks(
                    part[FORMAT], vector, starts, scales, sums, part[N_BLOCKS], row, part[ROW_BYTES], n
                )
                for j in range(n):
                    out[part[FIRST_ROW] + i + j] = products[j]


@inner_function()
def _unpack_group(part: Any, row: int, start: int, n: int, rows: Any, columns: Any) -> None:
    """Unpack LANES rows of n blocks of a part from block `start` on into `columns`, by way of `rows`, its transpose."""
    for j in range(LANES):
        last = min(row + j, part[PART_ROWS] - 1)  # of a group that is not full, the last row is repeated
        blocks = part[BLOCKS] + last * part[ROW_BYTES] + start * part[BLOCK_BYTES]
        place = rows[j].ctypes.data
        unpack_blocks(part[FORMAT], blocks, place, place + 4 * SCALES_AT, place + 4 * MINIMA_AT, n)
    n_parts = n * part[BLOCK_VALUES] // PART
    for first, n_words in ((0, n_parts * (PART // 4)), (SCALES_AT, n_parts * part[SHARES]), (MINIMA_AT, n_parts)):
        for i in range(first, first + n_words, LANES):
            transpose_tile(rows.ctypes.data + 4 * i, rows.strides[0], columns[i].ctypes.data, columns.strides[0])


@inner_function()
def _multiply_group(box: Any, part: Any, starts: int, row: int, buffers: Any, sums: Any) -> None:
    """Write the products of all vectors with LANES rows of a part, from `row` on, to `sums` (vectors, LANES)."""
    rows, columns = buffers
    size, step = box[SIZE], DEPTH // part[BLOCK_VALUES]
    sums[:] = ZERO
    for start in range(0, part[N_BLOCKS], step):
        n = min(step, part[N_BLOCKS] - start)
        _unpack_group(part, row, start, n, rows, columns)
        first, n_parts = start * part[BLOCK_VALUES], n * part[BLOCK_VALUES] // PART
        weights, scales, minima = columns[0].ctypes.data, columns[SCALES_AT].ctypes.data, columns[MINIMA_AT].ctypes.data
        for i in range(0, len(sums), TILE_VECTORS):
            numbers = (i * size + first) // PART * 4
            place = starts + i * size + first // PART * 4 * part[SHARES]
            multiply_tile(
                part[FORMAT_KIND],
                size,
                box[X] + i * size + first,
                place,
                box[SCALES] + numbers,
                box[SUMS] + numbers,
                weights,
                scales,
                minima,
                sums[i].ctypes.data,
                n_parts,
            )


@compile_callback("void(i8, i8, i8)")
def _multiply_block_tiles(place: int, start: int, stop: int) -> None:
    """Compute some groups of a job's product for all vectors at once; `place` is the address of its mailbox."""
    box = numba.carray(pointer_to(place, np.int64(0)), (FUNCTION + 5,))
    table = numba.carray(pointer_to(box[TABLE], np.int64(0)), (box[N_TABLE], N_FIELDS))
    n_vectors = round_up(box[N_X], TILE_VECTORS)
    sums = aligned_zeros(n_vectors, LANES, np.zeros(1, np.float32))
    rows = aligned_zeros(LANES, WORDS, np.zeros(1, np.uint32))
    columns = aligned_zeros(WORDS, LANES, rows)
    for p in range(len(table)):
        part = table[p]
        for group in range(max(start, part[FIRST]), min(stop, part[END])):
            row = (group - part[FIRST]) * LANES
            n, starts = min(LANES, part[PART_ROWS] - row), box[STARTS] + p * n_vectors * box[SIZE]
            _multiply_group(box, part, starts, row, (rows, columns), sums)
            for r in range(box[N_X]):
                out = numba.carray(pointer_to(box[OUT] + r * box[OUT_STRIDE], ZERO), (part[FIRST_ROW] + row + n,))
                for j in range(n):
                    out[part[FIRST_ROW] + row + j] = sums[r, j]


FUNCTIONS = np.array([_multiply_block_rows.address, _multiply_block_tiles.address])


@inner_function()
def _write_starts(fours: Any, factor: Any, n: int, starts: Any) -> None:
    """Write the sums of each n numbers of `fours` (R, K / 4), times a factor, to the first places of rows `starts`."""
    for r in range(len(fours)):
        for i in range(fours.shape[1] // n):
            total = np.int32(0)
            for j in range(i * n, (i + 1) * n):
                total += fours[r, j]
            starts[r, i] = total * factor


@compile_loop("i8(f4[:, ::1], i8[:, ::1], f4[:, ::1], i8, i8[::1], i8)")
def multiply_blocks(
    x: np.ndarray, table: np.ndarray, out: np.ndarray, functions: int, box: np.ndarray, n_threads: int
) -> int:
    """Write x (R, K) times M block rows to `out` (R, M), by the threads of `box`; return NOT_FINITE if x is not.

    Args:
        table: describes the parts of the rows by the columns FORMAT to SHARES.
        functions: the address of FUNCTIONS.

    Returns:
        As `vector_loops.multiply_vectors`; NOT_FINITE, without a product, if x has infinity or NaN.
    """
    n_x, size = x.shape
    by_tiles = n_x >= TILE_ROWS
    n_vectors = round_up(n_x, TILE_VECTORS) if by_tiles else n_x
    integers = np.empty((n_vectors, size), np.int8)
    fours = np.empty((n_vectors, size // 4), np.int32)
    starts = np.empty((len(table), n_vectors, size // 4), np.int32)
    scales = np.empty((2, n_vectors, size // PART), np.float32)
    for r in range(n_x):
        is_finite = quantize_vector(
            x[r].ctypes.data,
            integers[r].ctypes.data,
            fours[r].ctypes.data,
            scales[0, r].ctypes.data,
            scales[1, r].ctypes.data,
            size // PART,
        )
        if not is_finite:
            return NOT_FINITE
    for p in range(len(table)):
        _write_starts(
            fours[:n_x], -np.int32(table[p, OFFSET]), PART // 4 // table[p, SHARES] if by_tiles else 1, starts[p]
        )
    function = numba.carray(pointer_to(functions, np.int64(0)), (2,))[1 if by_tiles else 0]
    box[KIND], box[FUNCTION], box[N_PARTS] = OTHER, function, n_threads
    box[X], box[STARTS], box[N_X], box[SIZE] = integers.ctypes.data, starts.ctypes.data, n_x, size
    box[SCALES], box[SUMS] = scales.ctypes.data, scales[1].ctypes.data
    box[ROWS], box[STRIDE], box[N_ROWS] = table[0, BLOCKS], table[0, ROW_BYTES] * LANES, table[-1, END]
    box[TABLE], box[N_TABLE] = table.ctypes.data, len(table)
    box[OUT], box[OUT_STRIDE] = out.ctypes.data, out.strides[0]
    waited = run_job(box)
    if len(integers) + len(starts) + len(scales) == 0:  # named here, or their memory would be free by now
        return NOT_FINITE
    return waited


@compile_callback("i8(i8, i8, i8, i8, i8, i8, i8, i8)")
def multiply_by_blocks(
    n_x: int, x: int, place: int, n_parts: int, out: int, function: int, box: int, n_threads: int
) -> int:
    """Call `multiply_blocks` with vectors, table, `out` and mailbox given by their addresses; return its result."""
    table = numba.carray(pointer_to(place, np.int64(0)), (n_parts, N_FIELDS))
    size, n_rows = table[0, N_BLOCKS] * table[0, BLOCK_VALUES], table[-1, FIRST_ROW] + table[-1, PART_ROWS]
    vectors = numba.carray(pointer_to(x, ZERO), (n_x, size))
    products = numba.carray(pointer_to(out, ZERO), (n_x, n_rows))
    mailbox = numba.carray(pointer_to(box, np.int64(0)), (MAILBOX,))
    return multiply_blocks(vectors, table, products, function, mailbox, n_threads)


@compile_loop("void(i8, i8, i8, f4[::1])")
def dequantize(form: int, rows: int, n_blocks: int, out: np.ndarray) -> None:
    """Write the values of `n_blocks` blocks that begin at the address `rows` into `out`."""
    if n_blocks > 0:
        write_dequantized(form, rows, out.ctypes.data, n_blocks)
