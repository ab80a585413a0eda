"""Dot products of a few vectors with matrix rows of float32, float16, bfloat16 or int8, converted in registers.

Where the processor multiplies bytes, int8 are multiplied with a vector of whole numbers of 16 bits instead.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tricycle_accelerators.compiled.jit import (
    FEATURES,
    HAS_FLOAT16,
    LARGEST,
    OFFSET,
    ZERO,
    emitted_intrinsic,
    float16_to_float32,
    inner_function,
    pointer_to,
    to_float32,
)
from tricycle_accelerators.compiled.registers import (
    FLOAT,
    INDEX,
    LANES,
    PAIR,
    VECTOR,
    build_loop,
    call,
    load,
    multiply_add,
    offset_address,
    prefetch,
    sum_lanes,
)

# The fields of a job, by their places in a mailbox.
X, N_X, ROWS, STRIDE, SIZE, N_ROWS, SCALES, SUMS, OUT, KIND, N_PARTS, FUNCTION = range(12)
# BYTES: int8 times x as whole numbers. OTHER: by the function of another module, whose address is in the job.
FLOAT32, FLOAT16, BFLOAT16, INT8, BYTES, OTHER = range(6)
KINDS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8}  # by the names of dtypes
ITEM_SIZES = (4, 2, 2, 1)  # of the numbers, in bytes
UNROLLED = 4  # registers of a row that are multiplied in a step
WHOLE = UNROLLED * LANES
AHEAD = 1024  # bytes that are asked for before they are needed
FIRST_CACHE, TERMS = 2**15, 1024  # bytes; terms of a product that are added at a time if those of six rows are more


def load_numbers(builder: Any, address: Any, kind: int, n_lanes: int = LANES) -> Any:
    """Emit a load of `n_lanes` matrix elements, converted to a vector of float32."""
    floats, whole = ir.VectorType(FLOAT, n_lanes), ir.VectorType(PAIR, n_lanes)
    if kind == FLOAT32:
        return load(builder, address, floats)
    if kind == FLOAT16 and HAS_FLOAT16:  # without the instruction no product is asked for
        return builder.fpext(load(builder, address, ir.VectorType(ir.HalfType(), n_lanes), 1), floats)
    narrow = ir.IntType(8 if kind == INT8 else 16)
    numbers = load(builder, address, ir.VectorType(narrow, n_lanes), 1)
    if kind == INT8:
        return builder.sitofp(builder.sext(numbers, whole), floats)
    return builder.bitcast(builder.shl(builder.zext(numbers, whole), ir.Constant(whole, [16] * n_lanes)), floats)


def _dots(kind: int, n_x: int, n_rows: int) -> Any:
    """Make the intrinsic for the dot products of n_x vectors and n_rows rows, over whole steps of WHOLE numbers.

    Its last argument is how many bytes ahead rows are prefetched. The bits of a product do not depend on n_rows.
    """
    itemsize = ITEM_SIZES[kind]
    n_bytes = WHOLE * itemsize
    n_sums = UNROLLED // n_x  # registers of each vector and row: with 4 and 2 eight in all, of AVX2's sixteen

    @emitted_intrinsic(types.UniTuple(types.float32, n_x * n_rows)(*[types.intp] * 6))
    def dots(builder: Any, x: Any, x_stride: Any, row: Any, row_stride: Any, n_steps: Any, ahead: Any) -> Any:
        def add_products(step: Any, sums: list[Any]) -> list[Any]:
            numbers = builder.add(row, builder.mul(step, INDEX(n_bytes)))
            rows = [offset_address(builder, numbers, row_stride, i) for i in range(n_rows)]
            first = builder.add(x, builder.mul(step, INDEX(4 * WHOLE)))
            vectors = [offset_address(builder, first, x_stride, i) for i in range(n_x)]
            for address in rows:
                for line in range(0, n_bytes, 64):
                    prefetch(builder, builder.add(builder.add(address, ahead), INDEX(line)))
            new = list(sums)
            for i in range(UNROLLED):
                a = [load_numbers(builder, builder.add(address, INDEX(i * LANES * itemsize)), kind) for address in rows]
                for n, vector in enumerate(vectors):
                    b = load(builder, builder.add(vector, INDEX(4 * i * LANES)), VECTOR)
                    for m in range(n_rows):
                        place = (n * n_rows + m) * n_sums + i % n_sums
                        new[place] = multiply_add(builder, new[place], a[m], b)
            return new

        n_pairs = n_x * n_rows
        new = build_loop(builder, n_steps, [ir.Constant(VECTOR, [0.0] * LANES)] * (n_pairs * n_sums), add_products)
        totals = [_add_up(builder, new[n * n_sums : (n + 1) * n_sums]) for n in range(n_pairs)]
        return cgutils.pack_array(builder, totals)

    return dots


def _add_up(builder: Any, registers: list[Any]) -> Any:
    """Emit the sum of all numbers of some registers, a power of two."""
    while len(registers) > 1:
        registers = [builder.fadd(*pair) for pair in zip(registers[::2], registers[1::2])]
    return sum_lanes(builder, registers[0])


@emitted_intrinsic(types.void(*[types.intp] * 4))
def call_function(builder: Any, function: Any, place: Any, start: Any, stop: Any) -> None:
    """Call the compiled function at an address with the address of a mailbox and a range of rows (Numba intrinsic)."""
    kind = ir.FunctionType(ir.VoidType(), [INDEX] * 3)
    builder.call(builder.inttoptr(function, kind.as_pointer()), [place, start, stop])


@emitted_intrinsic(types.int64(*[types.int64] * 9))
def call_multiply(builder: Any, multiply: Any, *arguments: Any) -> Any:
    """Call the compiled product of rows and a matrix at an address with its arguments (Numba intrinsic).

    They are those of `multiply_by_rows`, addresses or numbers; the result is that of a job.
    """
    kind = ir.FunctionType(INDEX, [INDEX] * 8)
    return builder.call(builder.inttoptr(multiply, kind.as_pointer()), arguments)


def _make_write_products(kind: int, n_x: int, n_rows: int) -> Any:
    """Return the Numba function that adds terms to rows n to n + n_x, columns i to i + n_rows of a job's result.

    Its arguments are (box, i, n, ahead, first, last): rows are prefetched by `ahead` bytes, and terms `first` to `last`
    are added; from term 0 on they overwrite the result.
    """
    dots, itemsize = _dots(kind, n_x, n_rows), ITEM_SIZES[kind]
    number, zeros = (np.float32(0), np.uint16(0), np.uint16(0), np.int8(0))[kind], (ZERO,) * (n_x * n_rows)
    convert = float16_to_float32 if kind == FLOAT16 else to_float32

    @inner_function(fastmath={"contract"})
    def write_products(box: Any, i: int, n: int, ahead: int, first: int, last: int) -> None:
        size, stride = box[SIZE], box[STRIDE]
        row, n_steps = box[ROWS] + i * stride, (last - first) // WHOLE
        vectors = numba.carray(pointer_to(box[X], ZERO), (box[N_X], size))
        out = numba.carray(pointer_to(box[OUT], ZERO), (box[N_X], box[N_ROWS]))
        totals = zeros
        if n_steps:
            of_terms = vectors[n].ctypes.data + 4 * first
            totals = dots(of_terms, 4 * size, row + itemsize * first, stride, n_steps, ahead)
        for m in range(n_rows):
            rest = numba.carray(pointer_to(row + m * stride, number), (size,))
            for k in range(n_x):
                total = totals[k * n_rows + m]
                for j in range(first + n_steps * WHOLE, last):
                    total += vectors[n + k, j] * np.float32(convert(rest[j]))
                out[n + k, i + m] = total + out[n + k, i + m] if first else total

    return write_products


def _make_multiply_rows(kind: int) -> Any:
    """Return the Numba function (box, start, stop) that computes columns of a job's result for matrices of a kind.

    Four rows multiply two columns at a time, so that each number of a row is loaded once for both. The first four read
    the columns from memory; the others, which find them in a cache, prefetch the columns that follow. If these six do
    not fit into a processor's first cache, at most TERMS of their terms are added at a time.
    """
    itemsize = ITEM_SIZES[kind]
    write_one, write_two, write_four, write_four_by_two = (
        _make_write_products(kind, *sizes) for sizes in ((1, 1), (2, 1), (4, 1), (4, 2))
    )

    @inner_function()
    def multiply_rows(box: Any, start: int, stop: int) -> None:
        n_x, stride, size = box[N_X], box[STRIDE], box[SIZE]
        step = size
        if (4 * 4 + 2 * itemsize) * size > FIRST_CACHE:
            n_blocks = 1 + (size - 1) // TERMS
            step = (size // n_blocks + WHOLE - 1) // WHOLE * WHOLE
        for n in range(0, n_x - 3, 4):
            ahead = stride * (2 if n == 0 else stop - start)
            for first in range(0, size, step):
                last = min(size, first + step)
                for i in range(start, stop - 1, 2):
                    write_four_by_two(box, i, n, ahead, first, last)
                if (stop - start) & 1:
                    write_four(box, stop - 1, n, ahead, first, last)
        for i in range(start, stop):
            if n_x & 2:
                write_two(box, i, n_x & ~3, AHEAD, 0, size)
            if n_x & 1:
                write_one(box, i, n_x - 1, AHEAD, 0, size)
        if box[SCALES]:
            scales = numba.carray(pointer_to(box[SCALES], ZERO), (box[N_ROWS],))
            out = numba.carray(pointer_to(box[OUT], ZERO), (n_x, box[N_ROWS]))
            for n in range(n_x):
                for i in range(start, stop):
                    out[n, i] *= scales[i]

    return multiply_rows


multiply_float32_rows, multiply_float16_rows, multiply_bfloat16_rows, multiply_int8_rows = (
    _make_multiply_rows(kind) for kind in (FLOAT32, FLOAT16, BFLOAT16, INT8)
)


# -------------------------------------------------------------------- rows of int8 times whole numbers
# A number of x is 256 times its upper byte and its lower one, both from 0 to 255 for 32,768 was added. The processor
# adds up the products of four such bytes and four int8 in one instruction.
HAS_BYTES = bool((LANES == 16 and FEATURES.get("avx512vnni")) or (LANES == 8 and FEATURES.get("avxvnni")))
MIDDLE = np.int32(128)  # of a byte


@emitted_intrinsic(types.float32(*[types.intp] * 4, types.int32, types.float32))
def _dot_bytes(builder: Any, upper: Any, lower: Any, row: Any, n_steps: Any, shift: Any, scale: Any) -> Any:
    """Compute the dot product of x, split into bytes, and an int8 row, over whole registers.

    `shift` is what the offset of the bytes (128) adds to the product.
    """
    vector, name = ir.VectorType(PAIR, LANES), f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"

    def add_products(step: Any, sums: list[Any]) -> list[Any]:
        offset = builder.mul(step, INDEX(4 * LANES))
        place = builder.add(row, offset)
        prefetch(builder, builder.add(place, INDEX(AHEAD)))
        numbers = load(builder, place, vector)
        parts = [load(builder, builder.add(x, offset), vector) for x in (upper, lower)]
        return [call(builder, name, vector, total, part, numbers) for total, part in zip(sums, parts)]

    new = build_loop(builder, n_steps, [ir.Constant(vector, [0] * LANES)] * 2, add_products)
    totals = [builder.sub(call(builder, f"llvm.vector.reduce.add.v{LANES}i32", PAIR, total), shift) for total in new]
    high, low = (builder.fmul(builder.sitofp(total, FLOAT), scale) for total in totals)
    return builder.fadd(builder.fmul(high, ir.Constant(FLOAT, 256.0)), low)


@inner_function()
def _multiply_int8_rows_by_bytes(box: Any, start: int, stop: int) -> None:
    """Compute result rows start to stop of a job in a mailbox, for x split into bytes and an int8 matrix."""
    size, stride, x = box[SIZE], box[STRIDE], box[X]
    n_rows, n_steps = box[N_ROWS], size // (4 * LANES)
    out = numba.carray(pointer_to(box[OUT], ZERO), (n_rows,))
    scales = numba.carray(pointer_to(box[SCALES], ZERO), (n_rows,))
    sums = numba.carray(pointer_to(box[SUMS], np.int32(0)), (n_rows,))
    for i in range(start, stop):
        out[i] = _dot_bytes(x, x + size, box[ROWS] + i * stride, n_steps, MIDDLE * sums[i], scales[i])


# Elsewhere no compiler knows the instruction.
multiply_int8_rows_by_bytes = _multiply_int8_rows_by_bytes if HAS_BYTES else multiply_int8_rows


@inner_function(fastmath=False)
def split_into_bytes(x: np.ndarray, largest: np.float32, out: np.ndarray) -> np.float32:
    """Quantize a float32 row to 16 bits as high, low bytes in `out` (2, K); return the step.

    It is compiled without ANY_ORDER, because a row is rounded alike only if all callers round in the same order.

    Args:
        largest: the largest absolute value of the row, not 0.
    """
    factor = LARGEST / largest
    for j in range(len(x)):
        whole = np.int32(x[j] * factor + OFFSET)
        out[0, j] = np.uint8(whole >> 8)
        out[1, j] = np.uint8(whole & 255)
    return largest / LARGEST
