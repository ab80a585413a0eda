"""Dot products of vectors with rows of quantized blocks of GGUF files, and dequantization of such rows, in registers.

A vector is quantized to int8 in blocks of 32 numbers, each with its own scale, and multiplied with the integers of the
file's blocks: the processor adds up the products of four pairs of bytes in one instruction. What the blocks look like:
ggml's `ggml-common.h` (https://github.com/ggml-org/ggml).

A block is read as parts of 32 values: unsigned integers of 8 bits, minus a constant of the format, times a scale for
all of them or for each 16, plus (in some formats) a minimum. ROWS rows are multiplied at once, which share the loads of
the vector. Registers are 256 bits wide, on every processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tricycle_accelerators.compiled.jit import FEATURES, IS_ARM64, emitted_intrinsic
from tricycle_accelerators.compiled.registers import (
    CONTRACT,
    FLOAT,
    INDEX,
    LANES,
    PAIR,
    broadcast,
    build_loop,
    call,
    prefetch,
    store,
    sum_lanes,
)

PART = 32  # numbers that are multiplied at once, and have one scale in a vector
ROWS = 4  # rows of blocks that are multiplied at once
BYTE, HALF = ir.IntType(8), ir.HalfType()
BYTES, WORDS, FLOATS = ir.VectorType(BYTE, PART), ir.VectorType(PAIR, 8), ir.VectorType(FLOAT, 8)
SHORTS = ir.VectorType(ir.IntType(16), 16)

HAS_VNNI = bool(FEATURES.get("avxvnni") or (FEATURES.get("avx512vnni") and FEATURES.get("avx512vl")))
HAS_DOTPROD = bool(IS_ARM64 and FEATURES.get("dotprod"))
HAS_AVX2 = bool(FEATURES.get("avx2") and FEATURES.get("f16c"))
HAS_BLOCKS = HAS_AVX2 or HAS_DOTPROD
WIDEST = 4 if IS_ARM64 else 16 if HAS_VNNI and LANES == 16 else 8  # int32 in a register of sums of products of bytes
MOST_INT8 = 127.0
SMALLEST_BITS, INFINITY_BITS = PAIR(0x0DA24260), PAIR(0x7F800000)  # of float32: 1e-30, as part's maximum; infinity
AHEAD = 8192  # bytes that are asked for before they are needed: about the time that memory takes to answer


class Block(NamedTuple):
    """LLVM values of a block: parts, each <32 x i8>, a vector of scales, and one of the parts' minima, or None.

    Each scale is that of an equal share of the block's values, in order.
    """

    parts: list[Any]
    scales: Any
    minima: Any = None


Reader = Callable[[Any, Any], Block]  # called with a builder and the address of a block


class BlockFormat(NamedTuple):
    """The layout of a block: its numbers of values and bytes, the constant to subtract, the functions that read it.

    `read(builder, address)` emits the code that reads a block. The integers of a `signed` format are int8. A part has
    one scale or (`n_scales`) two, each for an equal share of its values. `read_pair` reads two blocks of 32 as two
    parts, the first half of both blocks and the second, with the scale of each block.
    """

    n_values: int
    n_bytes: int
    offset: int
    read: Reader
    signed: bool = False
    has_minima: bool = False
    n_scales: int = 1
    read_pair: Reader | None = None


# -------------------------------------------------------------------- pieces of code
def load_unaligned(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """Emit an unaligned load of a type from an address plus `offset` bytes."""
    place = builder.add(address, INDEX(offset)) if offset else address
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def _constant(kind: Any, value: float) -> Any:
    """Return an LLVM vector constant of type `kind`, all elements `value`."""
    return ir.Constant(kind, [value] * kind.count)


def _shuffle(builder: Any, a: Any, b: Any, places: Sequence[int]) -> Any:
    """Return LLVM's shuffle of vectors a and b; places from the length of a on are in b."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(PAIR, len(places)), list(places)))


def _half(builder: Any, address: Any, offset: int, number: int = 0) -> Any:
    """Load four float16, and return one of them as a <1 x float>: this takes fewer instructions than one alone."""
    halves = load_unaligned(builder, address, offset, ir.VectorType(HALF, 4))
    floats = builder.fpext(halves, ir.VectorType(FLOAT, 4))
    return _shuffle(builder, floats, floats, [number])


def _spread(builder: Any, vector: Any, count: int) -> Any:
    """Emit a vector of `count` elements, in which each element of `vector` is repeated equally often."""
    return _shuffle(builder, vector, vector, [i * vector.type.count // count for i in range(count)])


def _nibbles(builder: Any, address: Any, offset: int) -> Any:
    """Load 16 bytes as 32 integers: the lower 4 bits of each byte, then the upper ones."""
    packed = load_unaligned(builder, address, offset, ir.VectorType(BYTE, 16))
    words = builder.bitcast(_shuffle(builder, packed, packed, [*range(16)] * 2), WORDS)
    shifted = builder.lshr(words, ir.Constant(WORDS, [0] * 4 + [4] * 4))  # bits from other bytes are cleared next
    return builder.and_(builder.bitcast(shifted, BYTES), _constant(BYTES, 15))


def _fifth_bits(builder: Any, address: Any, offset: int) -> Any:
    """Load 32 bits as 32 integers of 0 or 16."""
    bits = builder.bitcast(load_unaligned(builder, address, offset, PAIR), ir.VectorType(ir.IntType(1), PART))
    return builder.select(bits, _constant(BYTES, 16), _constant(BYTES, 0))


# -------------------------------------------------------------------- formats with blocks of 32
def _q8_0(builder: Any, address: Any) -> Block:
    """Emit code that reads a Q8_0 block of one part: 32 signed integers, or unsigned for VNNI."""
    integers = load_unaligned(builder, address, 2, BYTES)
    if HAS_VNNI:
        integers = builder.xor(integers, _constant(BYTES, 128))
    return Block([integers], _half(builder, address, 0))


def _q4_0(builder: Any, address: Any) -> Block:
    """Emit code that reads a Q4_0 block: a part of 32 integers from 0 to 15 (8 not subtracted), and its scale."""
    return Block([_nibbles(builder, address, 2)], _half(builder, address, 0))


def _q4_0_pair(builder: Any, address: Any) -> Block:
    """Emit code that reads two Q4_0 blocks as the lower 4 bits of all bytes, the upper ones, and both scales."""
    first, second = (load_unaligned(builder, address, offset, ir.VectorType(BYTE, 16)) for offset in (2, 20))
    packed = _shuffle(builder, first, second, range(PART))
    parts = [builder.and_(packed, _constant(BYTES, 15)), builder.lshr(packed, _constant(BYTES, 4))]
    first, second = (_half(builder, address, offset) for offset in (0, 18))
    return Block(parts, _shuffle(builder, first, second, range(2)))


def _q4_1(builder: Any, address: Any) -> Block:
    """Emit code that reads a Q4_1 block of one part: 32 unsigned integers, with a minimum."""
    return Block([_nibbles(builder, address, 4)], _half(builder, address, 0), _half(builder, address, 2))


def _q5_0(builder: Any, address: Any) -> Block:
    """Emit code that reads a Q5_0 block: one part of 32 integers from 0 to 31 (no 16 subtracted), and its scale."""
    integers = builder.or_(_nibbles(builder, address, 6), _fifth_bits(builder, address, 2))
    return Block([integers], _half(builder, address, 0))


def _q5_1(builder: Any, address: Any) -> Block:
    """Emit code that reads a Q5_1 block of one part: 32 unsigned integers, with a minimum."""
    integers = builder.or_(_nibbles(builder, address, 8), _fifth_bits(builder, address, 4))
    return Block([integers], _half(builder, address, 0), _half(builder, address, 2))


MXFP4_TABLE = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0]  # twice the number, plus 12


def _mxfp4(builder: Any, address: Any) -> Block:
    """Emit code that reads an MXFP4 block of one part: 32 integers from a table, with a power of two as the scale."""
    exponent = builder.zext(load_unaligned(builder, address, 0, BYTE), PAIR)
    subnormal = builder.shl(PAIR(0x00200000), exponent)
    normal = builder.shl(builder.sub(exponent, PAIR(1)), PAIR(23))
    scale = builder.select(builder.icmp_unsigned("<", exponent, PAIR(2)), subnormal, normal)
    integers = _look_up(builder, _nibbles(builder, address, 1))
    return Block([integers], broadcast(builder, builder.bitcast(scale, FLOAT), 1))


def _look_up(builder: Any, places: Any) -> Any:
    """Emit the bytes of MXFP4_TABLE at 32 places."""
    kind = ir.VectorType(BYTE, 16)
    table = ir.Constant(kind, MXFP4_TABLE)
    if not IS_ARM64:
        doubled = ir.Constant(BYTES, MXFP4_TABLE * 2)
        return call(builder, "llvm.x86.avx2.pshuf.b", BYTES, doubled, places)
    halves = [_shuffle(builder, places, places, range(start, start + 16)) for start in (0, 16)]
    first, second = (call(builder, "llvm.aarch64.neon.tbl1.v16i8", kind, table, half) for half in halves)
    return _shuffle(builder, first, second, range(PART))


# -------------------------------------------------------------------- formats with blocks of 256
def _q4_k(builder: Any, address: Any) -> Block:
    """Emit code that reads a Q4_K block of 8 parts with a scale and a minimum each."""
    return _k_block(builder, address, _four_bits(builder, address, 16))


def _q5_k(builder: Any, address: Any) -> Block:
    """Emit code that reads a Q5_K block of 8 parts with a scale and a minimum each."""
    fifth = load_unaligned(builder, address, 16, BYTES)
    parts = []
    for number, integers in enumerate(_four_bits(builder, address, 48)):
        bit = builder.and_(builder.lshr(fifth, _constant(BYTES, number)), _constant(BYTES, 1))
        parts.append(builder.or_(integers, builder.shl(bit, _constant(BYTES, 4))))
    return _k_block(builder, address, parts)


def _four_bits(builder: Any, address: Any, offset: int) -> list[Any]:
    """Load 128 bytes as 8 parts: of each 32 bytes, first the lower 4 bits, then the upper ones."""
    parts = []
    for start in range(offset, offset + 128, PART):
        packed = load_unaligned(builder, address, start, BYTES)
        parts += [builder.and_(packed, _constant(BYTES, 15)), builder.lshr(packed, _constant(BYTES, 4))]
    return parts


def _k_block(builder: Any, address: Any, parts: list[Any]) -> Block:
    """Return a block with the scales and minima of Q4_K and Q5_K: 8 of 6 bits each in 12 bytes, times two float16."""
    first, second, third = (load_unaligned(builder, address, offset, PAIR) for offset in (4, 8, 12))
    bits = lambda word, shift, mask: builder.and_(builder.lshr(word, PAIR(shift)), PAIR(mask * 0x01010101))
    upper = lambda word: builder.shl(bits(word, 6, 3), PAIR(4))
    scales = [bits(first, 0, 63), builder.or_(bits(third, 0, 15), upper(first))]
    minima = [bits(second, 0, 63), builder.or_(bits(third, 4, 15), upper(second))]
    pair = ir.VectorType(PAIR, 2)

    def floats(words: list[Any], factor: Any) -> Any:
        joined = builder.insert_element(ir.Constant(pair, [0, 0]), words[0], PAIR(0))
        joined = builder.insert_element(joined, words[1], PAIR(1))
        numbers = builder.zext(builder.bitcast(joined, ir.VectorType(BYTE, 8)), WORDS)
        return builder.fmul(builder.uitofp(numbers, FLOATS), _spread(builder, factor, 8))

    halves = _half(builder, address, 0), builder.fneg(_half(builder, address, 2))
    return Block(parts, floats(scales, halves[0]), floats(minima, halves[1]))


def _q6_k(builder: Any, address: Any) -> Block:
    """Emit code that reads a Q6_K block of 8 parts with a scale for each 16 integers."""
    scales = builder.sitofp(
        builder.sext(load_unaligned(builder, address, 192, ir.VectorType(BYTE, 16)), ir.VectorType(PAIR, 16)),
        ir.VectorType(FLOAT, 16),
    )
    scales = builder.fmul(scales, _spread(builder, _half(builder, address, 202, 3), 16))  # the scale is at 208
    parts = []
    for half in range(2):
        lower = [load_unaligned(builder, address, 64 * half + PART * i, BYTES) for i in range(2)]
        upper = load_unaligned(builder, address, 128 + PART * half, BYTES)
        for number in range(4):
            low = builder.lshr(lower[number % 2], _constant(BYTES, 4 * (number // 2)))
            two = builder.and_(builder.lshr(upper, _constant(BYTES, 2 * number)), _constant(BYTES, 3))
            low = builder.and_(low, _constant(BYTES, 15))
            parts.append(builder.or_(low, builder.shl(two, _constant(BYTES, 4))))
    return Block(parts, scales)


FORMATS = {
    "Q8_0": BlockFormat(32, 34, 128 if HAS_VNNI else 0, _q8_0, signed=not HAS_VNNI),
    "Q4_0": BlockFormat(32, 18, 8, _q4_0, read_pair=_q4_0_pair),
    "Q4_1": BlockFormat(32, 20, 0, _q4_1, has_minima=True),
    "Q5_0": BlockFormat(32, 22, 16, _q5_0),
    "Q5_1": BlockFormat(32, 24, 0, _q5_1, has_minima=True),
    "Q4_K": BlockFormat(256, 144, 0, _q4_k, has_minima=True),
    "Q5_K": BlockFormat(256, 176, 0, _q5_k, has_minima=True),
    "Q6_K": BlockFormat(256, 210, 32, _q6_k, n_scales=2),
    "MXFP4": BlockFormat(32, 17, 12, _mxfp4),
}


# -------------------------------------------------------------------- products
def add_products_of_four(builder: Any, sums: Any, integers: Any, x: Any, signed: bool) -> Any:
    """Add to each int32 of `sums` the products of four integers (unsigned, or `signed`) and four int8 of x."""
    count = sums.type.count
    if count > WIDEST:
        halves = lambda vector, n: [_shuffle(builder, vector, vector, range(start, start + n)) for start in (0, n)]
        groups = zip(halves(sums, count // 2), halves(integers, 2 * count), halves(x, 2 * count))
        first, second = (add_products_of_four(builder, *group, signed) for group in groups)
        return _shuffle(builder, first, second, range(count))
    if IS_ARM64:
        return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, integers, x)
    if HAS_VNNI:
        words = [builder.bitcast(each, sums.type) for each in (integers, x)]
        return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * count}", sums.type, sums, *words)
    if signed:  # the instruction takes bytes without a sign on its left
        x = call(builder, "llvm.x86.avx2.psign.b", BYTES, x, integers)
        below = builder.icmp_signed("<", integers, _constant(BYTES, 0))
        integers = builder.select(below, builder.sub(_constant(BYTES, 0), integers), integers)
    pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, integers, x)
    return builder.add(sums, call(builder, "llvm.x86.avx2.pmadd.wd", WORDS, pairs, _constant(SHORTS, 1)))


def _emit_dot(builder: Any, form: BlockFormat, arguments: Sequence[Any]) -> Any:
    """Emit the dot products of a quantized vector and ROWS rows of blocks; see `dot_blocks` for the arguments."""
    by_block = partial(_emit_dot_by_block, builder, form, arguments)
    if form.read_pair is None:
        return by_block()
    by_pair = partial(_emit_dot_by_pair, builder, form, form.read_pair, arguments)
    return build_switch(builder, builder.and_(arguments[4], INDEX(1)), [by_pair, by_block])  # by whether it is odd


def _prefetch_ahead(builder: Any, rows: Sequence[Any], step: Any, n_bytes: int) -> None:
    """Emit prefetches of the blocks after those of a step, of `n_bytes` bytes in each row."""
    ahead = builder.add(rows[-1], builder.mul(step, INDEX(ROWS * n_bytes)))
    for line in range(0, ROWS * n_bytes, 64):
        prefetch(builder, builder.add(ahead, INDEX(AHEAD + line)))


def _emit_dot_by_block(builder: Any, form: BlockFormat, arguments: Sequence[Any]) -> Any:
    """Emit `_emit_dot` for any number of blocks, one after the other."""
    x, starts, scales, sums, n_blocks, *rows = arguments
    n_parts = form.n_values // PART
    by_part = ir.VectorType(FLOAT, n_parts)

    def add_block(step: Any, totals: list[Any]) -> list[Any]:
        at = lambda array, size: builder.add(array, builder.mul(step, INDEX(n_parts * size)))
        _prefetch_ahead(builder, rows, step, form.n_bytes)
        x_scales, x_sums = (load_unaligned(builder, at(array, 4), 0, by_part) for array in (scales, sums))
        blocks = [form.read(builder, builder.add(row, builder.mul(step, INDEX(form.n_bytes)))) for row in rows]
        factors = [builder.fmul(each.scales, _spread(builder, x_scales, each.scales.type.count)) for each in blocks]
        totals = list(totals)
        for part in range(n_parts):
            start = load_unaligned(builder, at(starts, PART), PART * part, WORDS)
            numbers = load_unaligned(builder, at(x, PART), PART * part, BYTES)
            for row, block in enumerate(blocks):
                products = add_products_of_four(builder, start, block.parts[part], numbers, form.signed)
                totals[row] = _add_scaled(
                    builder, totals[row], products, _of_part(builder, factors[row], part, n_parts, 8)
                )
        for row, block in enumerate(blocks):
            if block.minima is not None:
                product = builder.fmul(block.minima, x_sums, flags=CONTRACT)
                totals[ROWS + row] = builder.fadd(totals[ROWS + row], product, flags=CONTRACT)
        return totals

    initial = [_constant(FLOATS, 0.0)] * ROWS + [_constant(by_part, 0.0)] * ROWS
    sums_by_row = [sum_lanes(builder, total) for total in build_loop(builder, n_blocks, initial, add_block)]
    totals = [builder.fadd(*pair) for pair in zip(sums_by_row[:ROWS], sums_by_row[ROWS:])]
    return cgutils.pack_array(builder, totals)


def _emit_dot_by_pair(builder: Any, form: BlockFormat, read_pair: Reader, arguments: Sequence[Any]) -> Any:
    """Emit `_emit_dot` for an even number of blocks, by pairs; a register of sums then has four of each block."""
    x, starts, scales, _, n_blocks, *rows = arguments
    words, numbers_of_two = ir.VectorType(PAIR, 16), ir.VectorType(BYTE, 2 * PART)

    def add_pair(step: Any, totals: list[Any]) -> list[Any]:
        at = lambda array, size: builder.add(array, builder.mul(step, INDEX(2 * size)))
        _prefetch_ahead(builder, rows, step, 2 * form.n_bytes)
        x_scales = load_unaligned(builder, at(scales, 4), 0, ir.VectorType(FLOAT, 2))
        start = builder.add(*_halves_of_two(builder, load_unaligned(builder, at(starts, PART), 0, words)))
        numbers = _halves_of_two(builder, load_unaligned(builder, at(x, PART), 0, numbers_of_two))
        new = []
        for row, total in zip(rows, totals):
            pair = read_pair(builder, at(row, form.n_bytes))
            products = start
            for part, half in zip(pair.parts, numbers):
                products = add_products_of_four(builder, products, part, half, form.signed)
            new.append(_add_scaled(builder, total, products, _spread(builder, builder.fmul(pair.scales, x_scales), 8)))
        return new

    n_pairs = builder.lshr(n_blocks, INDEX(1))
    totals = build_loop(builder, n_pairs, [_constant(FLOATS, 0.0)] * ROWS, add_pair)
    return cgutils.pack_array(builder, [sum_lanes(builder, total) for total in totals])


def _halves_of_two(builder: Any, vector: Any) -> list[Any]:
    """Emit two vectors: of each half of `vector`, its first half, and of each half its second half."""
    n = vector.type.count // 4
    return [_shuffle(builder, vector, vector, [*range(i, i + n), *range(i + 2 * n, i + 3 * n)]) for i in (0, n)]


def _add_scaled(builder: Any, total: Any, products: Any, factor: Any) -> Any:
    """Emit total + products * factor, of <8 x float>, of int32 products."""
    scaled = builder.fmul(builder.sitofp(products, FLOATS), factor, flags=CONTRACT)
    return builder.fadd(total, scaled, flags=CONTRACT)


def _of_part(builder: Any, scales: Any, part: int, n_parts: int, count: int) -> Any:
    """Emit a vector of the scales of one part of a block, in which each is repeated equally often."""
    n = scales.type.count
    return _shuffle(builder, scales, scales, [(part * count + i) * n // (n_parts * count) for i in range(count)])


def _emit_dequantize(builder: Any, form: BlockFormat, row: Any, out: Any, n_blocks: Any) -> None:
    """Emit code that writes the values of n_blocks blocks as float32 to an address."""

    def write_block(step: Any, _: list[Any]) -> list[Any]:
        block = form.read(builder, builder.add(row, builder.mul(step, INDEX(form.n_bytes))))
        place = builder.add(out, builder.mul(step, INDEX(4 * form.n_values)))
        n_parts = len(block.parts)
        for number, part in enumerate(block.parts):
            words = (builder.sext if form.signed else builder.zext)(part, ir.VectorType(PAIR, PART))
            words = builder.sub(words, _constant(words.type, form.offset))
            scales = _of_part(builder, block.scales, number, n_parts, PART)
            values = builder.fmul(builder.sitofp(words, ir.VectorType(FLOAT, PART)), scales)
            if block.minima is not None:
                values = builder.fadd(values, _of_part(builder, block.minima, number, n_parts, PART))
            target = builder.add(place, INDEX(4 * PART * number))
            builder.store(values, builder.inttoptr(target, values.type.as_pointer()), align=4)
        return []

    build_loop(builder, n_blocks, [], write_block)


def build_switch(builder: Any, number: Any, emits: Sequence[Callable[[], Any]]) -> Any:
    """Emit a switch with the code of `emits[number]`; return the chosen code's result, or None if it has none."""
    done = builder.append_basic_block("done")
    switch = builder.switch(number, done)
    default, results = builder.block, []
    for i, emit in enumerate(emits):
        case = builder.append_basic_block("case")
        switch.add_case(INDEX(i), case)
        builder.position_at_end(case)
        results.append((emit(), builder.block))
        builder.branch(done)
    builder.position_at_end(done)
    if results[0][0] is None:
        return None
    kind = results[0][0].type
    result = builder.phi(kind)
    for value, block in [(ir.Constant(kind, None), default), *results]:
        result.add_incoming(value, block)
    return result


def by_format(builder: Any, number: Any, emit: Callable[[BlockFormat], Any]) -> Any:
    """Emit a switch over the formats, numbered in the order of FORMATS; return the result of the chosen code."""
    return build_switch(builder, number, [partial(emit, form) for form in FORMATS.values()])


@emitted_intrinsic(types.boolean(*[types.intp] * 6))
def quantize_vector(builder: Any, x: Any, integers: Any, fours: Any, scales: Any, sums: Any, n_parts: Any) -> Any:
    """Quantize each part of a float32 vector to int8; return whether all numbers are finite (Numba intrinsic).

    Args:
        x: address of the numbers; next are the addresses where the integers, their sums by four (int32), and each
            part's scale and sum times the scale (float32) are written.
    """
    numbers, words = ir.VectorType(FLOAT, PART), ir.VectorType(PAIR, PART)

    def quantize_part(step: Any, registers: list[Any]) -> list[Any]:
        values = load_unaligned(builder, builder.add(x, builder.mul(step, INDEX(4 * PART))), 0, numbers)
        absolute = builder.and_(builder.bitcast(values, words), _constant(words, 0x7FFFFFFF))
        largest_bits = call(builder, "llvm.vector.reduce.umax.v32i32", PAIR, absolute)
        above = builder.icmp_unsigned(">", largest_bits, SMALLEST_BITS)
        largest = builder.bitcast(builder.select(above, largest_bits, SMALLEST_BITS), FLOAT)
        factor = broadcast(builder, builder.fdiv(ir.Constant(FLOAT, MOST_INT8), largest), PART)
        rounded = call(builder, "llvm.rint.v32f32", numbers, builder.fmul(values, factor))
        part = builder.trunc(builder.fptosi(rounded, words), BYTES)
        fours_of_part = add_products_of_four(builder, _constant(WORDS, 0), _constant(BYTES, 1), part, False)
        total = builder.sitofp(call(builder, "llvm.vector.reduce.add.v8i32", PAIR, fours_of_part), FLOAT)
        scale = builder.fmul(largest, ir.Constant(FLOAT, 1 / MOST_INT8))
        bytes_before, part_before = builder.mul(step, INDEX(PART)), builder.mul(step, INDEX(4))
        store(builder, part, builder.add(integers, bytes_before))
        store(builder, fours_of_part, builder.add(fours, bytes_before))
        store(builder, scale, builder.add(scales, part_before))
        store(builder, builder.fmul(scale, total), builder.add(sums, part_before))
        more = builder.icmp_unsigned(">", largest_bits, registers[0])
        return [builder.select(more, largest_bits, registers[0])]

    (largest_bits,) = build_loop(builder, n_parts, [PAIR(0)], quantize_part)
    return builder.icmp_unsigned("<", largest_bits, INFINITY_BITS)


@emitted_intrinsic(types.UniTuple(types.float32, ROWS)(*[types.intp] * 9))
def dot_blocks(
    builder: Any, form: Any, x: Any, starts: Any, scales: Any, sums: Any, n_blocks: Any, row: Any, stride: Any, n: Any
) -> Any:
    """Compute the dot products of a quantized vector and 1 to ROWS rows of blocks (Numba intrinsic); return a tuple.

    Args:
        form: the number of the format in FORMATS.
        x: address of the vector's integers, K int8; next are the addresses of what their products are added to (K / 4
            int32), of the scales (K / 32 float32) and of the sums times scales (K / 32 float32).
        row: address of the first row's blocks. stride: bytes from row to row.
        n: the number of rows; further elements of the result repeat the last.
    """
    rows, last = [row], builder.sub(n, INDEX(1))
    for number in range(1, ROWS):
        is_there = builder.icmp_signed("<=", INDEX(number), last)
        place = builder.select(is_there, INDEX(number), last)
        rows.append(builder.add(row, builder.mul(place, stride)))
    arguments = x, starts, scales, sums, n_blocks, *rows
    return by_format(builder, form, lambda chosen: _emit_dot(builder, chosen, arguments))


@emitted_intrinsic(types.void(*[types.intp] * 4))
def write_dequantized(builder: Any, form: Any, row: Any, out: Any, n_blocks: Any) -> None:
    """Write the values of blocks from an address as float32 to another (Numba intrinsic)."""
    by_format(builder, form, lambda chosen: _emit_dequantize(builder, chosen, row, out, n_blocks))
