"""Products of packed bfloat16 pairs by AMX tiles, for loops that pack their operands as `tiles` says.

Shapes: a left operand (M, P) and a right one (P, N) of pairs; M and N are multiples of TILE_ROWS.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tricycle_accelerators.compiled.amx_tiles import (
    BYTE,
    PAIRS,
    ROW_BYTES,
    TILE_PAIRS,
    TILE_ROWS,
    emit_tile_instruction,
    pointer_to,
)
from tricycle_accelerators.compiled.amx_tiles import begin_tiles as begin_tiles
from tricycle_accelerators.compiled.amx_tiles import release_tiles as release_tiles
from tricycle_accelerators.compiled.jit import OPTIONS, intrinsic
from tricycle_accelerators.compiled.registers import INDEX, PAIR, offset_address, store, transpose

N_AT_ONCE = 4  # tiles of sums beside each other
LEFT, RIGHT = 4, (5, 6)  # registers of the operands
SCRATCH_ROW = N_AT_ONCE * ROW_BYTES


# -------------------------------------------------------------------- operands that are not whole tiles
@intrinsic
def _scratch(context: Any) -> Any:
    """Return the address of 2 x 16 rows of SCRATCH_ROW bytes in the caller's stack (Numba intrinsic)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(BYTE, 2 * TILE_ROWS * SCRATCH_ROW))  # Numba's would be filled with 0
        memory.align = ROW_BYTES
        return builder.ptrtoint(memory, INDEX)

    return types.intp(), code


def _copy_tile(transposed: bool) -> Any:
    """Return the intrinsic that copies up to 16 rows of up to 16 pairs to rows of scratch, and fills up with zeros.

    Its arguments are addresses, bytes and numbers: (source, from row to row, rows, pairs, result).
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, down, n_rows, n_pairs, result = arguments
        flags, bits = ir.VectorType(ir.IntType(1), TILE_PAIRS), ir.IntType(TILE_PAIRS)
        kind = ir.FunctionType(PAIRS, [PAIRS.as_pointer(), PAIR, flags, PAIRS])
        masked = cgutils.get_or_insert_function(builder.module, kind, "llvm.masked.load.v16i32.p0")
        some = builder.sub(builder.shl(PAIR(1), builder.trunc(n_pairs, PAIR)), PAIR(1))
        zeros, rows = ir.Constant(PAIRS, [0] * TILE_PAIRS), []
        for row in range(TILE_ROWS):
            seen = builder.select(builder.icmp_signed(">", n_rows, INDEX(row)), some, PAIR(0))
            place = builder.inttoptr(offset_address(builder, source, down, row), PAIRS.as_pointer())
            rows.append(
                builder.call(masked, [place, PAIR(4), builder.bitcast(builder.trunc(seen, bits), flags), zeros])
            )
        for row, pairs in enumerate(transpose(builder, rows) if transposed else rows):
            store(builder, pairs, builder.add(result, INDEX(SCRATCH_ROW * row)))
        return context.get_dummy_value()

    @intrinsic
    def copy_tile(context: Any, source: Any, down: Any, n_rows: Any, n_pairs: Any, result: Any) -> Any:
        return types.void(*[types.intp] * 5), code

    return copy_tile


_copy, _copy_transposed = _copy_tile(False), _copy_tile(True)


# -------------------------------------------------------------------- products
def _move_sums(n_tiles: int, name: str) -> Any:
    """Return the intrinsic that loads or stores `n_tiles` tiles of sums: an address, and bytes between rows."""

    @intrinsic
    def move(context: Any, place: Any, down: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            for tile in range(n_tiles):
                address = pointer_to(builder, builder.add(arguments[0], INDEX(ROW_BYTES * tile)))
                emit_tile_instruction(builder, name, BYTE(tile), address, arguments[1])
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), code

    return move


def _clear_sums(n_tiles: int) -> Any:
    """Return the intrinsic that sets `n_tiles` tiles of sums to 0."""

    @intrinsic
    def clear(context: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            for tile in range(n_tiles):
                emit_tile_instruction(builder, "tilezero", BYTE(tile))
            return context.get_dummy_value()

        return types.void(), code

    return clear


def _add_products(n_tiles: int) -> Any:
    """Return the intrinsic that adds products of a tile and `n_tiles` beside each other to the sums.

    Its arguments are addresses and bytes: (left, between rows, right, between rows).
    """

    @intrinsic
    def add_products(context: Any, left: Any, down: Any, right: Any, right_down: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            left, down, right, right_down = arguments
            emit_tile_instruction(builder, "tileloadd64", BYTE(LEFT), pointer_to(builder, left), down)
            for tile in range(n_tiles):
                operand = RIGHT[tile % 2]
                address = pointer_to(builder, builder.add(right, INDEX(ROW_BYTES * tile)))
                emit_tile_instruction(builder, "tileloadd64", BYTE(operand), address, right_down)
                emit_tile_instruction(builder, "tdpbf16ps", BYTE(tile), BYTE(LEFT), BYTE(operand))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), code

    return add_products


def _make_multiply_rows(n_tiles: int) -> Any:
    """Return a Numba function for 16 rows times `n_tiles` tiles of columns, with the arguments of `multiply_pairs`."""
    load_sums, store_sums = _move_sums(n_tiles, "tileloadd64"), _move_sums(n_tiles, "tilestored64")
    clear_sums, add_products = _clear_sums(n_tiles), _add_products(n_tiles)

    @numba.njit(**OPTIONS)
    def multiply_rows(
        left: int,
        down: int,
        along: int,
        right: int,
        right_along: int,
        result: int,
        result_down: int,
        n_steps: int,
        add: bool,
    ) -> None:
        of_left = _scratch()
        of_right = of_left + TILE_ROWS * SCRATCH_ROW
        if add:
            load_sums(result, result_down)
        else:
            clear_sums()
        for step in range(0, n_steps, TILE_PAIRS):
            n = min(TILE_PAIRS, n_steps - step)
            a, a_down = left + step * along, down
            b, b_down = right + step * right_along, right_along
            if along != 4:
                _copy_transposed(a, along, n, TILE_ROWS, of_left)
                a, a_down = of_left, SCRATCH_ROW
            elif n < TILE_PAIRS:
                _copy(a, down, TILE_ROWS, n, of_left)
                a, a_down = of_left, SCRATCH_ROW
            if n < TILE_PAIRS:
                for tile in range(n_tiles):
                    _copy(b + ROW_BYTES * tile, right_along, n, TILE_PAIRS, of_right + ROW_BYTES * tile)
                b, b_down = of_right, SCRATCH_ROW
            add_products(a, a_down, b, b_down)
        store_sums(result, result_down)

    return multiply_rows


_one, _two, _three, _four = (_make_multiply_rows(n) for n in range(1, N_AT_ONCE + 1))


@numba.njit(**OPTIONS)
def multiply_pairs(
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
    """Write or add a left operand times a right one, given by addresses and bytes between rows and between steps.

    A left operand that is the transpose of rows has `along` other than 4, and `down` of 4.
    """
    for column in range(0, n_columns, N_AT_ONCE * TILE_PAIRS):
        n_tiles = min(N_AT_ONCE, (n_columns - column) // TILE_PAIRS)
        b = right + 4 * column
        for row in range(0, n_rows, TILE_ROWS):
            a, c = left + row * down, result + row * result_down + 4 * column
            if n_tiles == 4:
                _four(a, down, along, b, right_along, c, result_down, n_steps, add)
            elif n_tiles == 3:
                _three(a, down, along, b, right_along, c, result_down, n_steps, add)
            elif n_tiles == 2:
                _two(a, down, along, b, right_along, c, result_down, n_steps, add)
            else:
                _one(a, down, along, b, right_along, c, result_down, n_steps, add)
