"""Dot products of one vector with matrix rows of float32, bfloat16 or int8, dequantized in vector registers.

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
    ANY_ORDER,
    FEATURES,
    LARGEST,
    OFFSET,
    OPTIONS,
    ZERO,
    intrinsic,
    max_abs_if_finite,
    to_float32,
)
from tricycle_accelerators.compiled.registers import FLOAT, INDEX, LANES, PAIR, VECTOR, build_loop, load, prefetch

# The fields of a job, by their places in a mailbox.
X, ROWS, STRIDE, SIZE, N_ROWS, SCALES, SUMS, OUT, KIND, N_PARTS, FUNCTION = range(11)
# BYTES: int8 times x as whole numbers. OTHER: by the function of another module, whose address is in the job.
FLOAT32, BFLOAT16, INT8, BYTES, OTHER = range(5)
UNROLLED = 4  # registers of sums
AHEAD = 1024  # bytes that are asked for before they are needed


def _numbers(builder: Any, address: Any, kind: int) -> Any:
    """Emit a load of matrix elements, converted to a register of float32."""
    if kind == FLOAT32:
        return load(builder, address, VECTOR)
    narrow = ir.IntType(8 if kind == INT8 else 16)
    vector, whole = ir.VectorType(narrow, LANES), ir.VectorType(PAIR, LANES)
    numbers = builder.load(builder.inttoptr(address, vector.as_pointer()), align=1)
    if kind == INT8:
        return builder.sitofp(builder.sext(numbers, whole), VECTOR)
    return builder.bitcast(builder.shl(builder.zext(numbers, whole), ir.Constant(whole, [16] * LANES)), VECTOR)


def _dot(kind: int) -> Any:
    """Make the intrinsic that computes the dot product of x and a row, over whole steps of UNROLLED registers."""
    itemsize = (4, 2, 1)[kind]
    n_bytes = UNROLLED * LANES * itemsize

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, row, n_steps = arguments

        def add_products(step: Any, sums: list[Any]) -> list[Any]:
            numbers = builder.add(row, builder.mul(step, INDEX(n_bytes)))
            others = builder.add(x, builder.mul(step, INDEX(4 * UNROLLED * LANES)))
            for line in range(0, n_bytes, 64):
                prefetch(builder, builder.add(numbers, INDEX(AHEAD + line)))
            new = []
            for i in range(UNROLLED):
                a = _numbers(builder, builder.add(numbers, INDEX(i * LANES * itemsize)), kind)
                b = load(builder, builder.add(others, INDEX(4 * i * LANES)), VECTOR)
                new.append(builder.fadd(sums[i], builder.fmul(a, b, flags=("contract",)), flags=("contract",)))
            return new

        new = build_loop(builder, n_steps, [ir.Constant(VECTOR, [0.0] * LANES)] * UNROLLED, add_products)
        total = builder.fadd(builder.fadd(new[0], new[1]), builder.fadd(new[2], new[3]))
        reduced = ir.FunctionType(FLOAT, [FLOAT, VECTOR])
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        function = cgutils.get_or_insert_function(builder.module, reduced, name)
        return builder.call(function, [ir.Constant(FLOAT, 0.0), total], fastmath=("reassoc",))

    @intrinsic
    def dot(context: Any, x: Any, row: Any, n_steps: Any) -> Any:
        return types.float32(types.intp, types.intp, types.intp), code

    return dot


@intrinsic
def pointer_to(context: Any, address: Any, like: Any) -> Any:
    """Convert an address to a pointer to numbers of the type of `like`, or of its elements (Numba intrinsic)."""
    pointer = types.CPointer(like.dtype if isinstance(like, types.Array) else like)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.intp, like), code


@intrinsic
def call_function(context: Any, function: Any, place: Any, start: Any, stop: Any) -> Any:
    """Call the compiled function at an address with the address of a mailbox and a range of rows (Numba intrinsic)."""
    kind = ir.FunctionType(ir.VoidType(), [INDEX] * 3)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, *others = arguments
        builder.call(builder.inttoptr(function, kind.as_pointer()), others)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), code


@intrinsic
def call_multiply(
    context: Any, multiply: Any, x: Any, table: Any, n_parts: Any, out: Any, function: Any, box: Any, n_threads: Any
) -> Any:
    """Call the compiled product of a row and a matrix at an address, such as `multiply_row_by_rows` (Numba intrinsic).

    All arguments are addresses or numbers; the result is that of a job.
    """
    kind = ir.FunctionType(INDEX, [INDEX] * 7)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        multiply, *others = arguments
        return builder.call(builder.inttoptr(multiply, kind.as_pointer()), others)

    return types.int64(*[types.int64] * 8), code


def _make_multiply_rows(kind: int) -> Any:
    """Return the Numba function (box, start, stop) that computes rows of a job's result for matrices of a kind."""
    dot = _dot(kind)
    number = (np.float32(0), np.uint16(0), np.int8(0))[kind]
    whole = UNROLLED * LANES

    @numba.njit(fastmath={"contract"}, **OPTIONS)
    def rows_of(box: Any, start: int, stop: int) -> None:
        size, stride, x = box[SIZE], box[STRIDE], box[X]
        out = numba.carray(pointer_to(box[OUT], ZERO), (box[N_ROWS],))
        numbers = numba.carray(pointer_to(x, ZERO), (size,))
        n_steps = size // whole
        for i in range(start, stop):
            row = box[ROWS] + i * stride
            total = ZERO
            if n_steps:
                total = dot(x, row, n_steps)
            if size % whole:
                rest = numba.carray(pointer_to(row, number), (size,))
                for j in range(n_steps * whole, size):
                    total += numbers[j] * np.float32(to_float32(rest[j]))
            out[i] = total
        if box[SCALES]:
            scales = numba.carray(pointer_to(box[SCALES], ZERO), (box[N_ROWS],))
            for i in range(start, stop):
                out[i] *= scales[i]

    return rows_of


multiply_float32_rows, multiply_bfloat16_rows, multiply_int8_rows = (
    _make_multiply_rows(kind) for kind in (FLOAT32, BFLOAT16, INT8)
)


# -------------------------------------------------------------------- rows of int8 times whole numbers
# A number of x is 256 times its upper byte and its lower one, both from 0 to 255 for 32,768 was added. The processor
# adds up the products of four such bytes and four int8 in one instruction.
HAS_BYTES = bool((LANES == 16 and FEATURES.get("avx512vnni")) or (LANES == 8 and FEATURES.get("avxvnni")))
MIDDLE = np.int32(128)  # of a byte


@intrinsic
def _dot_bytes(context: Any, upper: Any, lower: Any, row: Any, n_steps: Any, shift: Any, scale: Any) -> Any:
    """Compute the dot product of x, split into bytes, and an int8 row, over whole registers.

    `shift` is what the offset of the bytes (128) adds to the product.
    """
    vector = ir.VectorType(PAIR, LANES)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *bytes_of_x, row, n_steps, shift, scale = arguments
        kind = ir.FunctionType(vector, [vector] * 3)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * LANES}"
        multiply_add = cgutils.get_or_insert_function(builder.module, kind, name)

        def add_products(step: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(step, INDEX(4 * LANES))
            place = builder.add(row, offset)
            prefetch(builder, builder.add(place, INDEX(AHEAD)))
            numbers = load(builder, place, vector)
            parts = [load(builder, builder.add(x, offset), vector) for x in bytes_of_x]
            return [builder.call(multiply_add, [total, part, numbers]) for total, part in zip(sums, parts)]

        new = build_loop(builder, n_steps, [ir.Constant(vector, [0] * LANES)] * len(bytes_of_x), add_products)
        add = ir.FunctionType(PAIR, [vector])
        function = cgutils.get_or_insert_function(builder.module, add, f"llvm.vector.reduce.add.v{LANES}i32")
        totals = [builder.sub(builder.call(function, [total]), shift) for total in new]
        high, low = (builder.fmul(builder.sitofp(total, FLOAT), scale) for total in totals)
        return builder.fadd(builder.fmul(high, ir.Constant(FLOAT, 256.0)), low)

    return types.float32(*[types.intp] * 4, types.int32, types.float32), code


@numba.njit(**OPTIONS)
def _multiply_int8_rows_by_bytes(box: Any, start: int, stop: int) -> None:
    """Compute result rows start to stop of a job in a mailbox, for x split into bytes and an int8 matrix."""
    size, stride, x = box[SIZE], box[STRIDE], box[X]
    n_rows, n_steps = box[N_ROWS], size // (4 * LANES)
    out = numba.carray(pointer_to(box[OUT], ZERO), (n_rows,))
    scales = numba.carray(pointer_to(box[SCALES], ZERO), (n_rows,))
    sums = numba.carray(pointer_to(box[SUMS], np.int32(0)), (n_rows,))
    for i in range(start, stop):
        out[i] = _dot_bytes(x, x + size, box[ROWS] + i * stride, n_steps, MIDDLE * sums[i], scales[i])


multiply_int8_rows_by_bytes = (
    _multiply_int8_rows_by_bytes if HAS_BYTES else multiply_int8_rows
)  # elsewhere no compiler knows the instruction


@numba.njit(fastmath=ANY_ORDER, **OPTIONS)
def split_into_bytes(x: np.ndarray, out: np.ndarray) -> Any:
    """Quantize a float32 row to 16 bits as high, low bytes in `out` (2, K); return the step, 0 if 0 or not finite."""
    largest = max_abs_if_finite(x)
    if largest == 0:
        return ZERO
    factor = LARGEST / largest
    for j in range(len(x)):
        whole = np.int32(x[j] * factor + OFFSET)
        out[0, j] = np.uint8(whole >> 8)
        out[1, j] = np.uint8(whole & 255)
    return largest / LARGEST
