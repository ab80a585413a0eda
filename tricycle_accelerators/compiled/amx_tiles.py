"""Code generation (LLVM IR) for products of bfloat16 tiles by AMX, and for the layout of their operands.

AMX has eight registers, tiles, of 16 rows of 64 bytes. One instruction adds the product of 16 x 32 and 32 x 16 bfloat16
to 16 x 16 sums of float32; the right operand's tile holds 16 rows of 16 pairs, which follow each other along K.

A float32 operand is split into N_PARTS = 3 bfloat16 (8 bits of precision each), the first the nearest bfloat16, the
next that of what remains. Of the nine products of parts six are added up. The other three together are below 2^-23 of
the product and have a root mean square of 2^-27, where a rounding error of float32 is up to 2^-24 and has 2^-25; and an
instruction rounds its 32 terms to the sums once. So products of float32 have half the errors of those of AVX-512, in
less time, though each takes six of bfloat16. AMX takes denormal numbers for 0, so numbers below 2^-110 lose bits.

Sources: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3; Henry, Tang and Heinecke
2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations" (arXiv:1904.06376).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from tricycle_accelerators.compiled.jit import BFloat, emitted_intrinsic, inner_function
from tricycle_accelerators.compiled.registers import (
    INDEX,
    build_loop,
    call,
    load,
    offset_address,
    store,
    sum_lanes,
    transpose,
)

TILE_ROWS, TILE_PAIRS = 16, 16  # pairs of bfloat16 in a row of 64 bytes
STEP = 2 * TILE_PAIRS  # terms of the sums that one instruction adds up
BLOCK = 2 * TILE_ROWS  # rows, and columns, of the sums that four tiles hold
ROW_BYTES, TILE_BYTES = 64, 1024
N_PARTS = 3  # of a float32
BYTE, BITS = ir.IntType(8), ir.IntType(16)
NARROW = ir.VectorType(BFloat(), TILE_PAIRS)
FLOATS, PAIRS = ir.VectorType(ir.FloatType(), TILE_PAIRS), ir.VectorType(ir.IntType(32), TILE_PAIRS)
ZEROS = ir.Constant(FLOATS, [0.0] * TILE_PAIRS)
SUMS, LEFT, RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)  # registers: the sums of left i and right j are in 2 i + j
LOAD, LOAD_PAST_FIRST_CACHE = "tileloadd64", "tileloaddt164"
# Parts of the left and the right operand whose products are added: each shares one with the one before.
FLOAT32_PRODUCTS = ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0))
BFLOAT16_PRODUCTS = ((0, 0),)


def emit_tile_instruction(builder: Any, name: str, *arguments: Any) -> None:
    """Emit a call of an AMX instruction by LLVM's name without a result."""
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def pointer_to(builder: Any, address: Any) -> Any:
    """Emit the conversion of an integer address to a pointer to bytes."""
    return builder.inttoptr(address, BYTE.as_pointer())


# -------------------------------------------------------------------- the tiles of a thread
@emitted_intrinsic(types.void(types.intp))
def _configure_tiles(builder: Any, configuration: Any) -> None:
    """Make this thread's tiles usable, as 64 bytes at an address say (Numba intrinsic)."""
    emit_tile_instruction(builder, "ldtilecfg", pointer_to(builder, configuration))


@emitted_intrinsic(types.void())
def release_tiles(builder: Any) -> None:
    """Give this thread's tiles back, so that the system does not save them when it switches (Numba intrinsic)."""
    emit_tile_instruction(builder, "tilerelease")


@inner_function()
def begin_tiles() -> None:
    """Make this thread's tiles 16 rows of 64 bytes each, until `release_tiles`."""
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1  # the only palette
    for tile in range(8):
        configuration[16 + 2 * tile] = ROW_BYTES
        configuration[48 + tile] = TILE_ROWS
    _configure_tiles(configuration.ctypes.data)


# -------------------------------------------------------------------- operands
def parts_of(builder: Any, x: Any, n_parts: int) -> list[Any]:
    """Emit the bits of the bfloat16 parts of registers `x`: of float32, or of bfloat16 bits, which are one part."""
    if n_parts == 1:
        return [x]
    bits = ir.VectorType(BITS, TILE_PAIRS)
    parts = []
    for part in range(n_parts):
        nearest = builder.fptrunc(x, NARROW)
        parts.append(builder.bitcast(nearest, bits))
        if part < n_parts - 1:
            x = builder.fsub(x, builder.fpext(nearest, FLOATS))
    return parts


def _pack_tile(n_parts: int, interleave: bool, transposed: bool) -> Any:
    """Return the intrinsic that writes a tile of each part from lines of float32, or bfloat16 bits if `n_parts` is 1.

    Its arguments are addresses and bytes: (lines, from line to line, result, from part to part).

    Args:
        interleave: whether the 32 lines lie along N or M, 16 numbers each, and two of them make a row of pairs; else
            each of 16 lines lies along K.
        transposed: whether rows of pairs become columns.
    """
    size = 2 if n_parts == 1 else 4
    half = ir.VectorType(BITS if n_parts == 1 else ir.FloatType(), TILE_PAIRS)
    order = [i // 2 + TILE_PAIRS * (i % 2) if interleave else i for i in range(STEP)]

    @emitted_intrinsic(types.void(*[types.intp] * 4))
    def pack_tile(builder: Any, lines: Any, down: Any, result: Any, between: Any) -> None:
        rows: list[list[Any]] = [[] for _ in range(n_parts)]
        for row in range(TILE_ROWS):
            if interleave:
                places = [offset_address(builder, lines, down, 2 * row + i) for i in (0, 1)]
            else:
                line = offset_address(builder, lines, down, row)
                places = [line, builder.add(line, INDEX(size * TILE_PAIRS))]
            halves = [parts_of(builder, load(builder, place, half, size), n_parts) for place in places]
            for part, (first, second) in enumerate(zip(*halves)):
                both = builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(ir.IntType(32), STEP), order))
                rows[part].append(builder.bitcast(both, PAIRS))
        for part in range(n_parts):
            of_part = transpose(builder, rows[part]) if transposed else rows[part]
            for row, pairs in enumerate(of_part):
                place = builder.add(offset_address(builder, result, between, part), INDEX(ROW_BYTES * row))
                store(builder, pairs, place)

    return pack_tile


# By dtype: tiles of lines along K, not transposed and transposed; and of lines across K.
PACK_TILE = {
    n_parts: {
        (interleave, transposed): _pack_tile(n_parts, interleave, transposed)
        for interleave in (False, True)
        for transposed in (False, True)
    }
    for n_parts in (1, N_PARTS)
}


# -------------------------------------------------------------------- products
def _multiply_block(n_parts: int) -> Any:
    """Return the intrinsic that writes or adds the BLOCK x BLOCK sums of products of two packed operands.

    Its arguments are addresses, a number and a choice: (left, right, sums so far, sums, steps, whether there are sums
    so far). Of each step an operand has its parts, and of each part two tiles.
    """
    products: tuple[tuple[int, int], ...] = BFLOAT16_PRODUCTS if n_parts == 1 else FLOAT32_PRODUCTS
    step_bytes = 2 * n_parts * TILE_BYTES
    # A right operand in the first cache displaces the left one, which is read again soon. For float32, whose first
    # right part is loaded twice in a step, products of a training step took 1.03 of the time when loaded like bfloat16.
    loads = (LOAD, LEFT), (LOAD_PAST_FIRST_CACHE if n_parts == 1 else LOAD, RIGHT)

    @emitted_intrinsic(types.void(*[types.intp] * 5, types.boolean))
    def multiply_block(builder: Any, left: Any, right: Any, before: Any, sums: Any, n_steps: Any, add: Any) -> None:
        down = INDEX(ROW_BYTES)

        def move_sums(name: str, start: Any) -> None:
            for tile in SUMS:
                place = builder.add(start, INDEX(4 * BLOCK * TILE_ROWS * (tile // 2) + ROW_BYTES * (tile % 2)))
                emit_tile_instruction(builder, name, BYTE(tile), pointer_to(builder, place), INDEX(4 * BLOCK))

        def add_products(step: Any, _: list[Any]) -> list[Any]:
            operands = [builder.add(operand, builder.mul(step, INDEX(step_bytes))) for operand in (left, right)]

            def load_tile(which: int, i: int, part: int) -> None:
                place = builder.add(operands[which], INDEX((2 * part + i) * TILE_BYTES))
                name, registers = loads[which]
                emit_tile_instruction(builder, name, BYTE(registers[i]), pointer_to(builder, place), down)

            for which, i in ((1, 0), (0, 0), (0, 1), (1, 1)):
                load_tile(which, i, products[0][which])
            for parts, following in zip(products, (*products[1:], None)):
                changed = 0 if following and following[0] != parts[0] else 1
                for i, j in product((0, 1), repeat=2):
                    row, column = (i, j) if changed == 0 else (j, i)
                    sums_tile = SUMS[2 * row + column]
                    emit_tile_instruction(builder, "tdpbf16ps", BYTE(sums_tile), BYTE(LEFT[row]), BYTE(RIGHT[column]))
                    if following and j == 1:  # as soon as the tile of the part before is free
                        load_tile(changed, i, following[changed])
            return []

        with builder.if_else(add) as (adds, begins):
            with adds:
                move_sums(LOAD, before)
            with begins:
                for tile in SUMS:
                    emit_tile_instruction(builder, "tilezero", BYTE(tile))
        build_loop(builder, n_steps, [], add_products)
        move_sums("tilestored64", sums)

    return multiply_block


multiply_block_float32, multiply_block_bfloat16 = _multiply_block(N_PARTS), _multiply_block(1)


@emitted_intrinsic(types.void(*[types.intp] * 5))
def multiply_rows_float32(builder: Any, left: Any, right: Any, between: Any, sums: Any, n_steps: Any) -> None:
    """Write the products of TILE_ROWS rows and two groups of BLOCK columns of float32 to sums (2, BLOCK, BLOCK).

    Its arguments are addresses, bytes and a number: (left, right, from its first group to the next, sums, steps). Of a
    group of sums only the first TILE_ROWS rows are written (Numba intrinsic).
    """
    *of_left, of_right = *LEFT, *RIGHT

    def load_tile(register: int, place: Any, tile: int) -> None:
        address = pointer_to(builder, builder.add(place, INDEX(tile * TILE_BYTES)))
        emit_tile_instruction(builder, LOAD, BYTE(register), address, INDEX(ROW_BYTES))

    def add_products(step: Any, _: list[Any]) -> list[Any]:
        offset = builder.mul(step, INDEX(2 * N_PARTS * TILE_BYTES))
        rows, columns = builder.add(left, offset), builder.add(right, offset)
        groups = columns, builder.add(columns, between)
        for part in range(N_PARTS):
            load_tile(of_left[part], rows, 2 * part)
        for part, tile in product(range(N_PARTS), SUMS):
            load_tile(of_right, groups[tile // 2], 2 * part + tile % 2)
            for of_rows in of_left[: N_PARTS - part]:  # the products of FLOAT32_PRODUCTS in another order
                emit_tile_instruction(builder, "tdpbf16ps", BYTE(tile), BYTE(of_rows), BYTE(of_right))
        return []

    for tile in SUMS:
        emit_tile_instruction(builder, "tilezero", BYTE(tile))
    build_loop(builder, n_steps, [], add_products)
    for tile in SUMS:
        offset = 4 * BLOCK * BLOCK * (tile // 2) + ROW_BYTES * (tile % 2)
        place = pointer_to(builder, builder.add(sums, INDEX(offset)))
        emit_tile_instruction(builder, "tilestored64", BYTE(tile), place, INDEX(4 * BLOCK))


def _write_rows(narrow: bool) -> Any:
    """Return the intrinsic that writes BLOCK columns of sums plus others as float32, or as bfloat16 if `narrow`.

    Its arguments are addresses and numbers: (sums, others, bytes between rows of others, out, bytes between rows of
    out, rows). It returns the sum of 0 times each result: NaN if one is not finite, else 0.
    """

    @emitted_intrinsic(types.float32(*[types.intp] * 6))
    def write_rows(builder: Any, sums: Any, others: Any, others_down: Any, out: Any, down: Any, n_rows: Any) -> Any:
        def write_row(row: Any, broken: list[Any]) -> list[Any]:
            new = []
            for half, before in enumerate(broken):
                place = builder.add(sums, builder.add(builder.mul(row, INDEX(4 * BLOCK)), INDEX(ROW_BYTES * half)))
                other = builder.add(others, builder.add(builder.mul(row, others_down), INDEX(ROW_BYTES * half)))
                value = builder.fadd(load(builder, place, FLOATS), load(builder, other, FLOATS))
                new.append(builder.fadd(before, builder.fmul(value, ZEROS)))
                if narrow:
                    value = builder.bitcast(builder.fptrunc(value, NARROW), ir.VectorType(BITS, TILE_PAIRS))
                line = builder.add(out, builder.mul(row, down))
                store(builder, value, builder.add(line, INDEX(half * (ROW_BYTES // 2 if narrow else ROW_BYTES))))
            return new

        first, second = build_loop(builder, n_rows, [ZEROS, ZEROS], write_row)
        return sum_lanes(builder, builder.fadd(first, second))

    return write_rows


write_float32_rows, write_bfloat16_rows = _write_rows(False), _write_rows(True)
