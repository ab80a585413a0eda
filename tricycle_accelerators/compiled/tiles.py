"""Small matrix products inside Numba loops: packed operands and register tiles.

A tile of the result stays in the processor's registers while the product runs along it: ROWS rows of some whole
registers, each step a register of the right matrix, times a number of the left one. All operands are 2-D:

- left (M, K), any strides, so that a transposed view is as good; right (K, N) and the result (M, N), C order.
- of float32; or left and right of pairs, uint32: two bfloat16 that follow each other along K, the first in the lower
  bits. The processor multiplies and adds two pairs at once, and its sums are float32. Where it has no such instruction,
  or a slow one, bfloat16 become float32.
- or float32 as parts for AMX, int32: pairs of three bfloat16 whose sum is the number. Rows of the first part are the
  array, and each is followed by that of the other two, so that its stride is three times its size.

`pack_left`, `pack_right` and `pack_right_transposed` make operands from parts of larger arrays, where a bfloat16 is
represented by its bits (uint16).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from tricycle_accelerators import processor
from tricycle_accelerators.compiled import amx_pairs, amx_tiles
from tricycle_accelerators.compiled.jit import (
    HAS_AMX,
    LINE,
    contiguous_row,
    emitted_intrinsic,
    inner_function,
    overload_by_types,
    pointer_to,
    prefer_512_bit_registers,
    to_bfloat16_bits,
    to_float32,
)
from tricycle_accelerators.compiled.jit import HAS_BFLOAT as HAS_BFLOAT
from tricycle_accelerators.compiled.registers import (
    INDEX,
    INSTRUCTION_SET,
    LANES,
    PAIR,
    VECTOR,
    build_product_sums,
    load,
    offset_address,
    prefetch_line,
    store,
    transpose,
)

ROWS, VECTORS = INSTRUCTION_SET.tile_rows, INSTRUCTION_SET.tile_vectors  # of a tile; a vector is a register of columns
HAS_PAIRS = HAS_AMX or (HAS_BFLOAT and not processor.is_intel())
PAIR_ROWS = amx_pairs.TILE_ROWS if HAS_AMX else ROWS  # of a tile of products of pairs


# -------------------------------------------------------------------- a tile
def _tile(n_vectors: int, pairs: bool) -> Any:
    """Return the intrinsic that writes or adds ROWS rows of a left operand times `n_vectors` registers of columns.

    Its arguments are addresses and strides, in bytes: (left, from row to row, from step to step, right, from step to
    step, result, from row to row, number of steps, whether the sums are added to what is there).
    """

    @emitted_intrinsic(types.void(*[types.intp] * 8, types.boolean))
    def tile(builder: Any, *arguments: Any) -> None:
        *operands, result, result_down, n_steps, add = arguments
        zeros = [ir.Constant(VECTOR, [0.0] * LANES)] * (ROWS * n_vectors)
        sums = build_product_sums(builder, (ROWS, n_vectors), pairs, operands, n_steps, zeros)
        places = [
            builder.add(offset_address(builder, result, result_down, row), INDEX(4 * LANES * column))
            for row in range(ROWS)
            for column in range(n_vectors)
        ]
        with builder.if_else(add) as (adds, writes):
            with adds:
                for place, value in zip(places, sums):
                    store(builder, builder.fadd(load(builder, place, VECTOR), value), place)
            with writes:
                for place, value in zip(places, sums):
                    store(builder, value, place)

    return tile


def _make_tiles(pairs: bool) -> list[Any]:
    """Return tiles of float32, or of bfloat16 pairs, with 1 to VECTORS registers of columns."""
    return [_tile(n, pairs) for n in range(1, VECTORS + 1)]


def _make_multiply(tiles: list[Any], tile_rows: int) -> Any:
    """Return a Numba function for products of packed operands at addresses by the n-th of up to four tiles.

    Args:
        tiles: functions with the arguments of `_tile`, of 1, 2, ... registers of columns.
        tile_rows: of each.
    """
    width = len(tiles)
    one, two, three, four = (*tiles, *tiles[-1:] * 3)[:4]

    @inner_function()
    def product(
        left: int,
        down: int,
        along: int,
        right: int,
        right_along: int,
        result: int,
        result_down: int,
        n_rows: int,
        n_columns: int,
        n_steps: int,
        add: bool,
    ) -> None:
        for column in range(0, n_columns, width * LANES):
            n_vectors = min(width, (n_columns - column) // LANES)
            b = right + 4 * column
            for row in range(0, n_rows, tile_rows):
                a = left + row * down
                c = result + row * result_down + 4 * column
                if n_vectors == 4:
                    four(a, down, along, b, right_along, c, result_down, n_steps, add)
                elif n_vectors == 3:
                    three(a, down, along, b, right_along, c, result_down, n_steps, add)
                elif n_vectors == 2:
                    two(a, down, along, b, right_along, c, result_down, n_steps, add)
                else:
                    one(a, down, along, b, right_along, c, result_down, n_steps, add)

    return product


_multiply_float32 = _make_multiply(_make_tiles(False), ROWS)
_multiply_pairs = _make_multiply(amx_pairs.PAIR_TILES if HAS_AMX else _make_tiles(HAS_BFLOAT), PAIR_ROWS)
_multiply_parts = _make_multiply(amx_pairs.PART_TILES, PAIR_ROWS)


@overload_by_types
def multiply(left: Any, right: Any, out: Any, add: Any) -> Any:
    """Write left (M, K) times right (K, N), packed operands of one dtype, into `out`; add it there if `add`.

    M is a multiple of ROWS, or of PAIR_ROWS, N of LANES, and there is at least one step. Products of pairs and of parts
    are made between `begin_products` and `end_products`; by AMX with rows of a left operand in one piece.
    """
    by_dtype = {types.float32: _multiply_float32, types.uint32: _multiply_pairs, types.int32: _multiply_parts}
    product = by_dtype[left.dtype]

    def call(left: Any, right: Any, out: Any, add: Any) -> None:
        product(
            left.ctypes.data,
            left.strides[0],
            left.strides[1],
            right.ctypes.data,
            right.strides[0],
            out.ctypes.data,
            out.strides[0],
            out.shape[0],
            out.shape[1],
            right.shape[0],
            add,
        )

    return call


@overload_by_types
def begin_products(like: Any) -> Any:
    """Prepare this thread for products of operands of the dtype of `like`: by AMX they are made in its tiles."""
    if like.dtype != types.float32 and HAS_AMX:
        return lambda like: amx_pairs.begin_tiles()
    return lambda like: None


@overload_by_types
def end_products(like: Any) -> Any:
    """End what `begin_products` has begun, so that the system does not store tiles when it switches threads."""
    if like.dtype != types.float32 and HAS_AMX:
        return lambda like: amx_pairs.release_tiles()
    return lambda like: None


# -------------------------------------------------------------------- operands
@inner_function()
def prefetch_rows(x: np.ndarray) -> None:
    """Prefetch rows (N, K) into the cache."""
    for i in range(x.shape[0]):
        start = x.ctypes.data + i * x.strides[0]
        for place in range(start, start + x.shape[1] * x.itemsize, 4 * LINE):
            prefetch_line(place)


@inner_function()
def aligned_zeros(n_rows: int, n_columns: int, like: np.ndarray) -> np.ndarray:
    """Allocate zeros (n_rows, n_columns) in the dtype of `like`, which has 4 bytes, aligned to a cache line."""
    flat = np.zeros(n_rows * n_columns + LINE, like.dtype)
    skip = -(flat.ctypes.data // 4) % LINE
    return flat[skip : skip + n_rows * n_columns].reshape(n_rows, n_columns)


@overload_by_types
def n_parts(like: Any) -> Any:
    """Return the parts of an operand of the dtype of `like`: three of int32, else one."""
    count = amx_tiles.N_PARTS if like.dtype == types.int32 else 1
    return lambda like: count


@overload_by_types
def _first_part(operand: Any) -> Any:
    """Return the first part of an operand, whose rows those of the others follow."""
    if operand.dtype == types.int32:
        return lambda operand: operand[:, : operand.shape[1] // amx_tiles.N_PARTS]
    return lambda operand: operand


@inner_function()
def take_zeros(memory: np.ndarray, n_rows: int, n_columns: int, like: np.ndarray) -> np.ndarray:
    """Return zeros as `aligned_zeros`, of all parts, in memory that nothing has taken yet.

    Views of an array in `memory` cost nothing; each of a new array counts references, which takes a while.

    Args:
        memory: (n,) int64, of which the first is the number of bytes taken; the caller keeps it.

    Raises:
        MemoryError: too few bytes are left.
    """
    width = n_columns * n_parts(like)
    start = round_up(memory.ctypes.data + memory[0], 4 * LINE)
    end = start + n_rows * width * like.itemsize
    if end > memory.ctypes.data + memory.nbytes:
        raise MemoryError("too little memory for the operands of products")
    memory[0] = end - memory.ctypes.data
    array = numba.carray(pointer_to(start, like), (n_rows, width))
    array[:] = 0
    return _first_part(array)


@numba.njit(inline="always")
def round_up(n: int, step: int) -> int:
    """Round n up to a multiple of `step`."""
    return (n + step - 1) // step * step


@numba.njit(inline="always")
def round_up_to_lanes(n: int) -> int:
    """Round n up to a multiple of the vector register's lanes."""
    return round_up(n, LANES)


@overload_by_types
def n_inner_steps(n: Any, like: Any) -> Any:
    """Return the inner steps of a product over n numbers: n, or n / 2 rounded up if operands are of pairs."""
    if like.dtype != types.float32:
        return lambda n, like: (n + 1) // 2
    return lambda n, like: n


@inner_function()
def copy_rows(x: np.ndarray, out: np.ndarray) -> None:
    """Write x into the top left corner of `out`, converted to float32."""
    for i in range(x.shape[0]):
        row, new = contiguous_row(x, i), contiguous_row(out, i)
        for j in range(len(row)):
            new[j] = to_float32(row[j])


@inner_function()
def _split_rows(x: np.ndarray, out: np.ndarray) -> None:
    """Write float32 rows x (N, K) into the top left corner of parts `out`, as pairs along K."""
    between = out.strides[0] // n_parts(out)
    for i in range(x.shape[0]):
        source, result = x.ctypes.data + i * x.strides[0], out.ctypes.data + i * out.strides[0]
        for j in range(0, x.shape[1], amx_tiles.TILE_PAIRS):
            amx_pairs.split_row(source + 4 * j, min(amx_tiles.TILE_PAIRS, x.shape[1] - j), result + 2 * j, between)


@inner_function()
def _split_row_pairs(x: np.ndarray, out: np.ndarray) -> None:
    """Write float32 rows x (K, N) into the top left corner of parts `out`, as pairs of rows 2i and 2i + 1."""
    between = out.strides[0] // n_parts(out)
    for i in range((x.shape[0] + 1) // 2):
        source, result = x.ctypes.data + 2 * i * x.strides[0], out.ctypes.data + i * out.strides[0]
        has_second = 2 * i + 1 < x.shape[0]
        for j in range(0, x.shape[1], amx_tiles.TILE_PAIRS):
            n, first = min(amx_tiles.TILE_PAIRS, x.shape[1] - j), source + 4 * j
            amx_pairs.split_rows(first, first + x.strides[0], n, n * has_second, result + 4 * j, between)


@overload_by_types
def pack_left(x: Any, out: Any) -> Any:
    """Write rows x (N, K) into the top left corner of `out` as float32, or as bfloat16 pairs or parts along K.

    If K is odd, the rest of `out` must be 0.
    """
    if out.dtype == types.uint32:

        def pairs(x: Any, out: Any) -> None:
            bits = out.view(np.uint16)
            for i in range(x.shape[0]):
                row, new = contiguous_row(x, i), contiguous_row(bits, i)
                for j in range(len(row)):
                    new[j] = to_bfloat16_bits(row[j])

        return pairs
    if out.dtype == types.int32:
        return lambda x, out: _split_rows(x, out)
    return lambda x, out: copy_rows(x, out)


@overload_by_types
def pack_right(x: Any, out: Any) -> Any:
    """Write x (K, N) to the top left corner of `out` as float32, or as pairs or parts of rows 2i, 2i + 1."""
    if out.dtype == types.uint32:

        def pairs(x: Any, out: Any) -> None:
            prefer_512_bit_registers()
            for i in range(x.shape[0] // 2):
                first, second, new = contiguous_row(x, 2 * i), contiguous_row(x, 2 * i + 1), contiguous_row(out, i)
                for j in range(len(first)):
                    new[j] = np.uint32(to_bfloat16_bits(first[j])) | (
                        np.uint32(to_bfloat16_bits(second[j])) << np.uint32(16)
                    )
            if x.shape[0] % 2:
                last, new = contiguous_row(x, x.shape[0] - 1), contiguous_row(out, x.shape[0] // 2)
                for j in range(len(last)):
                    new[j] = np.uint32(to_bfloat16_bits(last[j]))

        return pairs
    if out.dtype == types.int32:
        return lambda x, out: _split_row_pairs(x, out)
    return lambda x, out: copy_rows(x, out)


@emitted_intrinsic(types.void(*[types.intp] * 4))
def transpose_tile(builder: Any, source: Any, down: Any, result: Any, result_down: Any) -> None:
    """Write the transpose of a square of LANES x LANES numbers of 4 bytes (addresses, and bytes between rows)."""
    kind, places = ir.VectorType(PAIR, LANES), range(LANES)
    rows = [load(builder, offset_address(builder, source, down, i), kind) for i in places]
    for i, row in enumerate(transpose(builder, rows)):
        store(builder, row, offset_address(builder, result, result_down, i))


@inner_function()
def transpose_tiles(x: np.ndarray, out: np.ndarray) -> None:
    """Write the transpose of x (M, N), of 4-byte numbers, of all parts; M and N are multiples of LANES."""
    between, out_between = x.strides[0] // n_parts(x), out.strides[0] // n_parts(out)
    for part in range(n_parts(x)):
        for row in range(0, x.shape[0], LANES):
            for column in range(0, x.shape[1], LANES):
                source = x.ctypes.data + part * between + row * x.strides[0] + 4 * column
                place = out.ctypes.data + part * out_between + column * out.strides[0] + 4 * row
                transpose_tile(source, x.strides[0], place, out.strides[0])


@inner_function()
def pack_right_transposed(x: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Write the transpose of rows x (N, K) into `out` as right operand, LANES rows at a time by way of `scratch`.

    Args:
        scratch: zeros (LANES, steps in whole registers), of which only what rows fill is written.
    """
    for start in range(0, x.shape[0], LANES):
        pack_left(x[start : start + LANES], scratch)
        transpose_tiles(scratch, out[:, start : start + LANES])


@overload_by_types
def left_operand(x: Any, out: Any) -> Any:
    """Return float32 rows (N, K) as a left operand: unchanged, or packed in `out` if that has another dtype."""
    if out.dtype == types.float32:
        return lambda x, out: x

    def packed(x: Any, out: Any) -> Any:
        pack_left(x, out)
        return out

    return packed


@overload_by_types
def right_operand(x: Any, out: Any) -> Any:
    """Return float32 rows (K, N) as a right operand: unchanged, or packed in `out` if that has another dtype."""
    if out.dtype == types.float32:
        return lambda x, out: x

    def packed(x: Any, out: Any) -> Any:
        pack_right(x, out)
        return out

    return packed


@overload_by_types
def pack_transposed(x: Any, scratch: Any, out: Any) -> Any:
    """Write the transpose of rows x (K, M) into `out` as a left operand of pairs or parts; do nothing for float32.

    Args:
        scratch, out: zeros (steps, M) and (M, steps), both in whole registers.
    """
    if out.dtype == types.float32:
        return lambda x, scratch, out: None

    def pack(x: Any, scratch: Any, out: Any) -> None:
        pack_right(x, scratch)
        transpose_tiles(scratch, out)

    return pack


@overload_by_types
def transposed_left(left: Any, packed: Any) -> Any:
    """Return the transpose of float32 rows that are packed as `left`: a view, or what `pack_transposed` has written."""
    return (lambda left, packed: left.T) if left.dtype == types.float32 else (lambda left, packed: packed)


@overload_by_types
def left_elements(left: Any, numbers: Any) -> Any:
    """Return where a left operand is written row by row: float32, bits of bfloat16, or `numbers` (M, K) for parts."""
    if left.dtype == types.uint32:
        return lambda left, numbers: left.view(np.uint16)
    return (lambda left, numbers: numbers) if left.dtype == types.int32 else (lambda left, numbers: left)


@overload_by_types
def finish_left(left: Any, numbers: Any) -> Any:
    """Pack rows of `numbers` into a left operand of parts; others have been written to `left_elements`."""
    if left.dtype == types.int32:
        return lambda left, numbers: pack_left(numbers, left)
    return lambda left, numbers: None
