"""Products of packed bfloat16 pairs by AMX tiles, for loops that pack their operands as `tiles` says.

Shapes: a left operand (M, P) and a right one (P, N) of pairs; M and N are multiples of TILE_ROWS. Operands of float32
have N_PARTS such parts, of which each row is N_PARTS times as far from the next, and is followed by those of the other
parts: see `amx_tiles.py`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from tricycle_accelerators.compiled.amx_tiles import (
    BYTE,
    FLOATS,
    N_PARTS,
    PAIRS,
    ROW_BYTES,
    TILE_BYTES,
    TILE_PAIRS,
    TILE_ROWS,
    emit_tile_instruction,
    parts_of,
    pointer_to,
)
from tricycle_accelerators.compiled.amx_tiles import begin_tiles as begin_tiles
from tricycle_accelerators.compiled.amx_tiles import release_tiles as release_tiles
from tricycle_accelerators.compiled.jit import emitted_intrinsic, inner_function
from tricycle_accelerators.compiled.registers import INDEX, PAIR, call, offset_address, store

N_AT_ONCE = 4  # tiles of sums beside each other
LEFT, RIGHT = (4, 5, 6), 7  # registers of the operands: of each part of the left one
SCRATCH_ROW = N_AT_ONCE * ROW_BYTES
FLAGS, MASK_BITS = ir.VectorType(ir.IntType(1), TILE_PAIRS), ir.IntType(TILE_PAIRS)


# -------------------------------------------------------------------- up to 16 numbers
def _mask(builder: Any, n: Any) -> Any:
    """Emit the flags of the first n of 16 lanes; n is from 0 to 16."""
    some = builder.sub(builder.shl(PAIR(1), builder.trunc(n, PAIR)), PAIR(1))
    return builder.bitcast(builder.trunc(some, MASK_BITS), FLAGS)


def _load_some(builder: Any, address: Any, kind: Any, mask: Any) -> Any:
    """Emit the load of a register of 4-byte numbers, those without a flag 0."""
    name, zero = ("f32", 0.0) if kind == FLOATS else ("i32", 0)
    place, zeros = builder.inttoptr(address, kind.as_pointer()), ir.Constant(kind, [zero] * TILE_PAIRS)
    return call(builder, f"llvm.masked.load.v16{name}.p0", kind, place, PAIR(4), mask, zeros)


def _store_some(builder: Any, value: Any, address: Any, mask: Any) -> None:
    """Emit the store of the lanes of a register, of 2 or 4 bytes each, that have a flag."""
    place = builder.inttoptr(address, value.type.as_pointer())
    call(builder, f"llvm.masked.store.v16i{value.type.element.width}.p0", ir.VoidType(), value, place, PAIR(2), mask)


@emitted_intrinsic(types.void(*[types.intp] * 4))
def split_row(builder: Any, source: Any, n: Any, result: Any, between: Any) -> None:
    """Write the bfloat16 parts of n numbers, up to 16, of float32: addresses, and bytes between parts."""
    mask = _mask(builder, n)
    for part, bits in enumerate(parts_of(builder, _load_some(builder, source, FLOATS, mask), N_PARTS)):
        _store_some(builder, bits, offset_address(builder, result, between, part), mask)


@emitted_intrinsic(types.void(*[types.intp] * 6))
def split_rows(builder: Any, first: Any, second: Any, n: Any, n_second: Any, result: Any, between: Any) -> None:
    """Write the pairs of bfloat16 parts of n numbers of a row and `n_second` below them, as `split_row`."""
    masks = _mask(builder, n), _mask(builder, n_second)
    parts = [
        parts_of(builder, _load_some(builder, source, FLOATS, mask), N_PARTS)
        for source, mask in zip((first, second), masks)
    ]
    for part, bits in enumerate(zip(*parts)):
        low, high = (builder.zext(half, PAIRS) for half in bits)
        pairs = builder.or_(low, builder.shl(high, ir.Constant(PAIRS, [16] * TILE_PAIRS)))
        _store_some(builder, pairs, offset_address(builder, result, between, part), masks[0])


# -------------------------------------------------------------------- operands that are not whole tiles
def _scratch(n_parts: int) -> Any:
    """Return the intrinsic that returns the address of memory in the caller's stack for a step of both operands.

    For each part it has 16 rows of ROW_BYTES bytes, and then for each part 16 rows of SCRATCH_ROW bytes.
    """

    @emitted_intrinsic(types.intp())
    def scratch(builder: Any) -> Any:
        size = n_parts * TILE_ROWS * (ROW_BYTES + SCRATCH_ROW)
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(BYTE, size))  # Numba's would be filled with 0
        memory.align = ROW_BYTES
        return builder.ptrtoint(memory, INDEX)

    return scratch


@emitted_intrinsic(types.void(*[types.intp] * 6))
def _copy(builder: Any, source: Any, down: Any, n_rows: Any, n_pairs: Any, result: Any, result_down: Any) -> None:
    """Copy up to 16 rows of up to 16 pairs, and fill up with zeros (Numba intrinsic).

    Its arguments are addresses, bytes and numbers: (source, from row to row, rows, pairs, result, from row to row).
    """
    for row in range(TILE_ROWS):
        n = builder.select(builder.icmp_signed(">", n_rows, INDEX(row)), n_pairs, INDEX(0))
        pairs = _load_some(builder, offset_address(builder, source, down, row), PAIRS, _mask(builder, n))
        store(builder, pairs, offset_address(builder, result, result_down, row))


# -------------------------------------------------------------------- products
def _move_sums(n_tiles: int, name: str) -> Any:
    """Return the intrinsic that loads or stores `n_tiles` tiles of sums: an address, and bytes between rows."""

    @emitted_intrinsic(types.void(types.intp, types.intp))
    def move(builder: Any, place: Any, down: Any) -> None:
        for tile in range(n_tiles):
            address = pointer_to(builder, builder.add(place, INDEX(ROW_BYTES * tile)))
            emit_tile_instruction(builder, name, BYTE(tile), address, down)

    return move


def _clear_sums(n_tiles: int) -> Any:
    """Return the intrinsic that sets `n_tiles` tiles of sums to 0."""

    @emitted_intrinsic(types.void())
    def clear(builder: Any) -> None:
        for tile in range(n_tiles):
            emit_tile_instruction(builder, "tilezero", BYTE(tile))

    return clear


def _add_products(n_tiles: int, n_parts: int) -> Any:
    """Return the intrinsic that adds products of a tile and `n_tiles` beside each other, of all parts, to the sums.

    Its arguments are addresses and bytes: (left, between rows, between parts, right, between rows, between parts).
    """

    @emitted_intrinsic(types.void(*[types.intp] * 6))
    def add_products(
        builder: Any, left: Any, down: Any, between: Any, right: Any, right_down: Any, right_between: Any
    ) -> None:
        for part in range(n_parts):
            address = pointer_to(builder, offset_address(builder, left, between, part))
            emit_tile_instruction(builder, "tileloadd64", BYTE(LEFT[part]), address, down)
        for part in range(n_parts):
            of_part = offset_address(builder, right, right_between, part)
            for tile in range(n_tiles):
                address = pointer_to(builder, builder.add(of_part, INDEX(ROW_BYTES * tile)))
                emit_tile_instruction(builder, "tileloadd64", BYTE(RIGHT), address, right_down)
                for register in LEFT[: n_parts - part]:  # the products of amx_tiles.FLOAT32_PRODUCTS in another order
                    emit_tile_instruction(builder, "tdpbf16ps", BYTE(tile), BYTE(register), BYTE(RIGHT))

    return add_products


def _make_tile(n_tiles: int, n_parts: int) -> Any:
    """Return a Numba function for 16 rows times `n_tiles` tiles of columns, with the arguments of a tile in `tiles.py`.

    `along`, between the pairs of a left operand, is always 4.
    """
    load_sums, store_sums = _move_sums(n_tiles, "tileloadd64"), _move_sums(n_tiles, "tilestored64")
    clear_sums, add_products, scratch = _clear_sums(n_tiles), _add_products(n_tiles, n_parts), _scratch(n_parts)

    @inner_function()
    def multiply_rows(
        left: int,
        down: int,
        along: int,
        right: int,
        right_down: int,
        result: int,
        result_down: int,
        n_steps: int,
        add: bool,
    ) -> None:
        between, right_between = down // n_parts, right_down // n_parts
        if add:
            load_sums(result, result_down)
        else:
            clear_sums()
        for step in range(0, n_steps, TILE_PAIRS):
            n = min(TILE_PAIRS, n_steps - step)
            a, b = left + 4 * step, right + step * right_down
            if n == TILE_PAIRS:
                add_products(a, down, between, b, right_down, right_between)
                continue
            of_left = scratch()
            of_right = of_left + n_parts * TILE_BYTES
            for part in range(n_parts):
                _copy(a + part * between, down, TILE_ROWS, n, of_left + part * TILE_BYTES, ROW_BYTES)
                for tile in range(n_tiles):
                    source = b + part * right_between + ROW_BYTES * tile
                    place = of_right + part * TILE_ROWS * SCRATCH_ROW + ROW_BYTES * tile
                    _copy(source, right_down, n, TILE_PAIRS, place, SCRATCH_ROW)
            add_products(of_left, ROW_BYTES, TILE_BYTES, of_right, SCRATCH_ROW, TILE_ROWS * SCRATCH_ROW)
        store_sums(result, result_down)

    return multiply_rows


PAIR_TILES, PART_TILES = ([_make_tile(n, n_parts) for n in range(1, N_AT_ONCE + 1)] for n_parts in (1, N_PARTS))
