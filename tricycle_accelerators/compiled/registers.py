"""Code generation (LLVM IR) for sums of products that stay in vector registers, used by the matrix loops.

A core multiplies at its full rate where all the sums that it works on stay in registers, as many as there are. The
compiler would not find that by itself, so this innermost loop is written in the compiler's own language, with vectors
as wide as this processor's; how wide and how many is all that differs between processors.

Source: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tricycle_accelerators.compiled.jit import FEATURES, IS_ARM64, BFloat, emitted_intrinsic
from tricycle_accelerators.instruction_sets import widest_instruction_set

INSTRUCTION_SET = widest_instruction_set(
    ["neon"] if IS_ARM64 else [name for name, is_there in FEATURES.items() if is_there]
)
LANES, N_REGISTERS = INSTRUCTION_SET.lanes, INSTRUCTION_SET.n_registers
INDEX, PAIR, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
CONTRACT = ("contract",)  # a product and a sum may be one instruction


def load(builder: Any, address: Any, kind: Any, alignment: int = 4) -> Any:
    """Emit a load of a value of LLVM type `kind` from an integer address (a pointer is invalid), aligned in bytes."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=alignment)


def store(builder: Any, value: Any, address: Any) -> None:
    """Emit a store of a value to an address (4-byte alignment)."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def offset_address(builder: Any, address: Any, stride: Any, n: int) -> Any:
    """Emit the address that is n strides after an address."""
    return builder.add(address, builder.mul(stride, INDEX(n)))


def transpose(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Emit the transpose of n registers of n numbers of one type, n a power of two; return the registers."""
    n = len(rows)
    zipped = [n * (i % 2) + i // 2 for i in range(2 * n)]
    halves = [ir.Constant(ir.VectorType(PAIR, n), part) for part in (zipped[:n], zipped[n:])]
    # each time rows i and i + n/2 become rows 2i and 2i + 1, one number of each in turn
    for _ in range(n.bit_length() - 1):
        pairs = zip(rows[: n // 2], rows[n // 2 :])
        rows = [builder.shuffle_vector(a, b, half) for a, b in pairs for half in halves]
    return list(rows)


def build_loop(
    builder: Any, n_steps: Any, initial: Sequence[Any], step: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit an LLVM loop of 1 or more steps; `step(number, registers)` returns the next registers; return the last.

    Args:
        n_steps: 1 or more.
        initial: the registers before the first step.
        step: writes a step; called with its number, from 0, and the registers before it, and returns the new ones.
    """
    entry, body, done = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    number, registers = builder.phi(INDEX), [builder.phi(value.type) for value in initial]
    new = step(number, registers)
    following = builder.add(number, INDEX(1))
    for register, before, value in zip([number, *registers], [INDEX(0), *initial], [following, *new]):
        register.add_incoming(before, entry)
        register.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", following, n_steps), body, done)
    builder.position_at_end(done)
    return new


def call(builder: Any, name: str, result: Any, *arguments: Any, fastmath: tuple[str, ...] = ()) -> Any:
    """Emit a call of an LLVM function or intrinsic, declared by its result and the arguments' types."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments, fastmath=fastmath)


def prefetch(builder: Any, address: Any) -> None:
    """Emit a prefetch of one cache line into the second-level cache; invalid addresses are ignored."""
    place = builder.inttoptr(address, ir.IntType(8).as_pointer())
    to_read, near, data = PAIR(0), PAIR(2), PAIR(1)
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, to_read, near, data)


@emitted_intrinsic(types.void(types.intp))
def prefetch_line(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address into the second-level cache (Numba intrinsic)."""
    prefetch(builder, address)


def build_product_sums(
    builder: Any,
    tile_shape: tuple[int, int],
    bfloat16_pairs: bool,
    addresses_and_strides: Sequence[Any],
    n_steps: Any,
    initial_sums: Sequence[Any],
) -> list[Any]:
    """Emit LLVM for a tile's sums of products, each from its initial sum; return sum registers, row by row.

    Args:
        tile_shape: rows of the left matrix; registers of columns of the right one.
        bfloat16_pairs: each step is of two bfloat16 that follow each other, not of a float32.
        addresses_and_strides: left, and bytes from row to row and step to step; right, and bytes from step to step.
        n_steps: 1 or more.
        initial_sums: a register for each sum, row by row.
    """
    n_rows, n_vectors = tile_shape
    left, down, along, right, right_along = addresses_and_strides
    rows = [offset_address(builder, left, down, row) for row in range(n_rows)]
    kind = PAIR if bfloat16_pairs else FLOAT

    def add_products(step: Any, sums: list[Any]) -> list[Any]:
        start, offset = builder.add(right, builder.mul(step, right_along)), builder.mul(step, along)
        columns = [
            load(builder, builder.add(start, INDEX(4 * LANES * column)), ir.VectorType(kind, LANES))
            for column in range(n_vectors)
        ]
        new = []
        for row in range(n_rows):
            number = broadcast(builder, load(builder, builder.add(rows[row], offset), kind))
            for column in range(n_vectors):
                new.append(
                    multiply_add(builder, sums[row * n_vectors + column], number, columns[column], bfloat16_pairs)
                )
        return new

    return build_loop(builder, n_steps, initial_sums, add_products)


def broadcast(builder: Any, number: Any, n_lanes: int = LANES) -> Any:
    """Emit a vector register filled with one number."""
    undefined = ir.Constant(ir.VectorType(number.type, n_lanes), ir.Undefined)
    alone = builder.insert_element(undefined, number, PAIR(0))
    return builder.shuffle_vector(alone, undefined, ir.Constant(ir.VectorType(PAIR, n_lanes), [0] * n_lanes))


def sum_lanes(builder: Any, vector: Any) -> Any:
    """Emit the sum of a vector's floats, in an order that only the processor decides, and return it."""
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    return call(builder, name, FLOAT, ir.Constant(FLOAT, 0.0), vector, fastmath=("reassoc",))


def multiply_add(builder: Any, sums: Any, a: Any, b: Any, pairs: bool = False) -> Any:
    """Emit sums + a * b, or if `pairs` sums of products of bfloat16 pairs; return them."""
    if not pairs:
        return builder.fadd(sums, builder.fmul(a, b, flags=CONTRACT), flags=CONTRACT)
    narrow = ir.VectorType(BFloat(), 2 * LANES)
    a, b = builder.bitcast(a, narrow), builder.bitcast(b, narrow)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, sums, a, b)
