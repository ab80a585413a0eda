"""Products of several quantized vectors with rows of blocks, in tiles that stay in vector registers.

LANES rows of blocks are unpacked to integers of 8 bits, and interleaved: a register contains four integers of each row.
Such a register times four integers of one vector, repeated, adds four products to the sum of each row. So the blocks
are unpacked once for all vectors, and no sum has to be added up across a register.

Source: the layout of the operands of `vpdpbusd` in oneDNN (https://github.com/uxlfoundation/oneDNN), the tiles of Goto
and van de Geijn 2008.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from tricycle_accelerators.compiled.block_rows import (
    BYTE,
    FORMATS,
    PART,
    BlockFormat,
    add_products_of_four,
    build_switch,
    by_format,
    load_unaligned,
)
from tricycle_accelerators.compiled.jit import emitted_intrinsic
from tricycle_accelerators.compiled.registers import (
    CONTRACT,
    FLOAT,
    INDEX,
    LANES,
    N_REGISTERS,
    PAIR,
    VECTOR,
    broadcast,
    build_loop,
    load,
    offset_address,
    store,
)

TILE_VECTORS = N_REGISTERS // 4  # vectors of a tile: each has a register of integer sums and one of float32 sums
FOURS = PART // 4
REGISTER = 4 * LANES  # bytes
INTEGERS = ir.VectorType(BYTE, REGISTER)
# The kinds of formats that a tile distinguishes, and the kind of each format, in their order.
KINDS = sorted({(form.n_scales, form.has_minima, form.signed) for form in FORMATS.values()})
KIND_OF_FORMAT = tuple(KINDS.index((form.n_scales, form.has_minima, form.signed)) for form in FORMATS.values())


def _emit_unpack(builder: Any, form: BlockFormat, arguments: Sequence[Any]) -> None:
    """Emit code that writes the integers, the scales and the minima of n_blocks blocks to three addresses."""
    row, integers, scales, minima, n_blocks = arguments
    n_parts = form.n_values // PART

    def unpack_block(step: Any, _: list[Any]) -> list[Any]:
        block = form.read(builder, offset_address(builder, row, step, form.n_bytes))
        place = offset_address(builder, integers, step, form.n_values)
        for number, part in enumerate(block.parts):
            store(builder, part, builder.add(place, INDEX(PART * number)))
        store(builder, block.scales, offset_address(builder, scales, step, 4 * n_parts * form.n_scales))
        if block.minima is not None:
            store(builder, block.minima, offset_address(builder, minima, step, 4 * n_parts))
        return []

    build_loop(builder, n_blocks, [], unpack_block)


@emitted_intrinsic(types.void(*[types.intp] * 6))
def unpack_blocks(builder: Any, form: Any, row: Any, integers: Any, scales: Any, minima: Any, n_blocks: Any) -> None:
    """Write blocks' integers (int8), scales (float32) and, if they have them, minima to addresses (Numba intrinsic)."""
    arguments = row, integers, scales, minima, n_blocks
    by_format(builder, form, lambda chosen: _emit_unpack(builder, chosen, arguments))


def _emit_tile(builder: Any, kind: tuple[int, bool, bool], arguments: Sequence[Any]) -> None:
    """Emit the sums of products of TILE_VECTORS vectors and LANES rows; see `multiply_tile` for the arguments."""
    n_scales, has_minima, signed = kind
    size, x, starts, x_scales, x_sums, integers, scales, minima, out, n_parts = arguments
    vectors = range(TILE_VECTORS)
    rows = [offset_address(builder, x, size, i) for i in vectors]
    starts_of = [offset_address(builder, starts, size, i) for i in vectors]
    by_part = builder.udiv(size, INDEX(PART // 4))  # bytes of a row with a float32 for each part
    scales_of = [offset_address(builder, x_scales, by_part, i) for i in vectors]
    sums_of = [offset_address(builder, x_sums, by_part, i) for i in vectors]
    places = [builder.add(out, INDEX(REGISTER * i)) for i in vectors]

    def repeated(address: Any, kind: Any) -> Any:
        return broadcast(builder, load_unaligned(builder, address, 0, kind))

    def add_part(step: Any, totals: list[Any]) -> list[Any]:
        totals = list(totals)
        part = offset_address(builder, integers, step, REGISTER * FOURS)
        x_offset, offset = builder.mul(step, INDEX(PART)), builder.mul(step, INDEX(4))
        factors = [repeated(builder.add(each, offset), FLOAT) for each in scales_of]
        for share in range(n_scales):
            start = builder.add(builder.mul(offset, INDEX(n_scales)), INDEX(4 * share))
            products = [repeated(builder.add(each, start), PAIR) for each in starts_of]
            for four in range(share * FOURS // n_scales, (share + 1) * FOURS // n_scales):
                column = load(builder, builder.add(part, INDEX(REGISTER * four)), INTEGERS)
                place = builder.add(x_offset, INDEX(4 * four))
                for i in vectors:
                    numbers = builder.bitcast(repeated(builder.add(rows[i], place), PAIR), INTEGERS)
                    products[i] = add_products_of_four(builder, products[i], column, numbers, signed)
            scale = load(builder, builder.add(scales, builder.mul(start, INDEX(LANES))), VECTOR)
            for i in vectors:
                product = builder.fmul(
                    builder.sitofp(products[i], VECTOR), builder.fmul(scale, factors[i]), flags=CONTRACT
                )
                totals[i] = builder.fadd(totals[i], product, flags=CONTRACT)
        if has_minima:
            minimum = load(builder, builder.add(minima, builder.mul(offset, INDEX(LANES))), VECTOR)
            for i in vectors:
                product = builder.fmul(minimum, repeated(builder.add(sums_of[i], offset), FLOAT), flags=CONTRACT)
                totals[i] = builder.fadd(totals[i], product, flags=CONTRACT)
        return totals

    totals = build_loop(builder, n_parts, [load(builder, place, VECTOR) for place in places], add_part)
    for place, total in zip(places, totals):
        store(builder, total, place)


@emitted_intrinsic(types.void(*[types.intp] * 11))
def multiply_tile(builder: Any, kind: Any, *arguments: Any) -> None:
    """Add the products of TILE_VECTORS vectors and LANES rows of unpacked blocks to float32 sums (Numba intrinsic).

    Args:
        kind: the number of the format's kind in KINDS.
        size: bytes from vector to vector; those of `x_scales` and `x_sums` follow each other at an eighth of this.
        x: address of the vectors' integers, int8; next are the addresses of what the products of each share of a part
            are added to (int32), of each part's scale, and of its sum times the scale (float32).
        integers: address of the unpacked integers, (K / 4, LANES, 4); next are those of the scales (K / 32 or K / 16,
            LANES) and minima (K / 32, LANES), float32.
        out: address of the sums (TILE_VECTORS, LANES).
        n_parts: how many parts of 32 values are multiplied.
    """
    build_switch(builder, kind, [partial(_emit_tile, builder, each, arguments) for each in KINDS])
