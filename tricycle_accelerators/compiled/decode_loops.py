"""Numba loops for the attention of queries to KV caches, shared by spinning threads. The import compiles them.

Each query has its own cache, such as those of the texts of a batch, which is read once for it: attention takes the time
in which the caches come from memory. Memory is fastest where it is read in order, so a few tokens at a time are copied,
as float32, before they are used in another order. Threads attend to units of UNIT tokens each; their results are added
with the weights of the units, as softmax over all tokens asks for. Units depend neither on the number of threads nor on
the other queries, so neither do the bits of the result.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".

Shapes: K heads of keys, G heads of queries for each, H = K G, D head size, S tokens so far, N blocks of a head.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from tricycle_accelerators.compiled.jit import (
    ANY_ORDER,
    ZERO,
    bfloat16_to_float32,
    compile_callback,
    compile_loop,
    copy_row,
    emitted_intrinsic,
    exp,
    inner_function,
    maximum,
    pointer_to,
)
from tricycle_accelerators.compiled.loops import widen
from tricycle_accelerators.compiled.registers import (
    INDEX,
    LANES,
    PAIR,
    VECTOR,
    broadcast,
    build_loop,
    build_product_sums,
    load,
    multiply_add,
    offset_address,
    store,
    transpose,
)
from tricycle_accelerators.compiled.vector_loops import run_job
from tricycle_accelerators.compiled.vector_rows import (
    FLOAT16,
    FLOAT32,
    FUNCTION,
    INT8,
    ITEM_SIZES,
    KIND,
    N_PARTS,
    N_ROWS,
    OTHER,
    OUT,
    ROWS,
    SIZE,
    STRIDE,
)
from tricycle_accelerators.compiled.vector_rows import KINDS as KINDS

UNIT = 64  # tokens
COPIED = 16  # tokens whose keys or values are copied at a time: they fit into the first-level cache
FOUR = 4  # tokens whose scores are computed at once
# More fields of a job: the address and length of the table of queries, query heads, key heads, blocks of a head that
# have one scale each, the type of the caches' numbers, and the factor of scores, a float32.
TABLE, N_QUERIES, N_HEADS, N_KEY_HEADS, N_BLOCKS, NUMBERS, FACTOR = range(FUNCTION + 1, FUNCTION + 8)
# The columns of the table: the addresses of the query (H, D), of its keys, values (S, K, D) and their scales (S, K, N),
# the tokens S, and the first of its units.
QUERY, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, N_TOKENS, FIRST_UNIT, N_COLUMNS = range(8)


@inner_function(fastmath=ANY_ORDER)
def _dequantize(numbers: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Write int8 numbers times their block's scale, bfloat16 bits, to `out` as float32."""
    for i in range(len(numbers)):  # two loops, as LLVM checks once whether the arrays of this one overlap
        out[i] = np.float32(numbers[i])
    size = len(numbers) // max(1, len(scales))
    for n in range(len(scales)):
        scale, block = bfloat16_to_float32(scales[n]), out[n * size : (n + 1) * size]
        for i in range(size):
            block[i] *= scale


@inner_function()
def _copy_tokens(kind: int, rows: int, scales: int, n_blocks: int, out: np.ndarray) -> None:
    """Write numbers of a cache to `out` (n, K, D) as float32.

    Args:
        kind: of the numbers. rows: their address.
        scales: the address of the scales of int8, bfloat16 bits, of which a token's head has `n_blocks`.
    """
    numbers = out.reshape(-1)
    if kind == FLOAT32:
        copy_row(numba.carray(pointer_to(rows, ZERO), (out.size,)), numbers)
    elif kind == INT8:
        of_blocks = numba.carray(pointer_to(scales, np.uint16(0)), (out.shape[0] * out.shape[1] * n_blocks,))
        _dequantize(numba.carray(pointer_to(rows, np.int8(0)), (out.size,)), of_blocks, numbers)
    else:
        widen(numba.carray(pointer_to(rows, np.uint16(0)), (out.size,)), kind == FLOAT16, numbers)


@emitted_intrinsic(types.void(*[types.intp] * 4, types.float32, types.intp))
def _write_four_dots(builder: Any, x: Any, rows: Any, stride: Any, n_steps: Any, factor: Any, out: Any) -> None:
    """Write `factor` times the dot products of x and four rows, of whole registers, to `out` (Numba intrinsic).

    `x`, `rows` and `out` are addresses of float32, and `stride` is the number of bytes between rows.
    """
    places = [offset_address(builder, rows, stride, i) for i in range(FOUR)]

    def add_products(step: Any, sums: list[Any]) -> list[Any]:
        offset = builder.mul(step, INDEX(4 * LANES))
        numbers = load(builder, builder.add(x, offset), VECTOR)
        others = [load(builder, builder.add(place, offset), VECTOR) for place in places]
        return [multiply_add(builder, total, numbers, other) for total, other in zip(sums, others)]

    sums = build_loop(builder, n_steps, [ir.Constant(VECTOR, [0.0] * LANES)] * FOUR, add_products)
    first, second, third, last = transpose(builder, [_add_parts(builder, register) for register in sums])
    totals = builder.fadd(builder.fadd(first, second), builder.fadd(third, last))
    store(builder, builder.fmul(totals, broadcast(builder, factor, FOUR)), out)


def _add_parts(builder: Any, register: Any) -> Any:
    """Emit the sum of the parts of FOUR numbers that make up a register."""
    size = LANES
    while size > FOUR:
        size //= 2
        halves = [ir.Constant(ir.VectorType(PAIR, size), list(range(start, start + size))) for start in (0, size)]
        register = builder.fadd(*(builder.shuffle_vector(register, register, half) for half in halves))
    return register


@inner_function(fastmath=ANY_ORDER)
def _write_scores(q: np.ndarray, keys: np.ndarray, factor: float, scores: np.ndarray) -> None:
    """Write `factor` times the dot products (H, n) of queries (H, D) and keys (n, K, D)."""
    n_heads, size = q.shape
    n_tokens, n_key_heads, _ = keys.shape
    group = n_heads // n_key_heads
    n_by_four = 0 if size % LANES else n_tokens // FOUR * FOUR
    for s in range(0, n_by_four, FOUR):
        for k in range(n_key_heads):
            rows = keys.ctypes.data + s * keys.strides[0] + k * keys.strides[1]
            for h in range(k * group, (k + 1) * group):
                x, out = q.ctypes.data + h * q.strides[0], scores.ctypes.data + h * scores.strides[0] + 4 * s
                _write_four_dots(x, rows, keys.strides[0], size // LANES, factor, out)
    for s in range(n_by_four, n_tokens):
        for h in range(n_heads):
            score = ZERO
            for d in range(size):
                score += q[h, d] * keys[s, h // group, d]
            scores[h, s] = score * factor


@inner_function(fastmath=ANY_ORDER)
def _write_weights(scores: np.ndarray, largest: np.ndarray, totals: np.ndarray) -> None:
    """Replace scores (H, n) by exp(score - largest of the row); write the largest and the totals of rows (H,)."""
    for h in range(len(scores)):
        row = scores[h]
        most = row[0]
        for s in range(len(row)):
            most = maximum(most, row[s])
        total = ZERO
        for s in range(len(row)):
            row[s] = exp(row[s] - most)
            total += row[s]
        largest[h], totals[h] = most, total


def _add_weighted_rows(n_registers: int) -> Any:
    """Return the intrinsic that adds the first registers of rows, each times its weight, to numbers.

    Its arguments are addresses of float32, the bytes from row to row, and the number of rows.
    """

    @emitted_intrinsic(types.void(*[types.intp] * 5))
    def add_rows(builder: Any, weights: Any, rows: Any, stride: Any, n_rows: Any, numbers: Any) -> None:
        places = [builder.add(numbers, INDEX(4 * LANES * i)) for i in range(n_registers)]
        sums = [load(builder, place, VECTOR) for place in places]
        operands = weights, INDEX(0), INDEX(4), rows, stride
        for place, value in zip(places, build_product_sums(builder, (1, n_registers), False, operands, n_rows, sums)):
            store(builder, value, place)

    return add_rows


_add_one_register, _add_four_registers, _add_eight_registers = map(_add_weighted_rows, (1, 4, 8))


@inner_function(fastmath=ANY_ORDER)
def _add_weighted_values(weights: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    """Add the products of weights (H, n) and values (n, K, D) to `out` (H, D)."""
    n_heads, size = out.shape
    n_tokens, n_key_heads, _ = values.shape
    group, stride = n_heads // n_key_heads, values.strides[0]
    for h in range(n_heads):
        weight, row = weights.ctypes.data + h * weights.strides[0], out.ctypes.data + h * out.strides[0]
        rows, done = values.ctypes.data + h // group * values.strides[1], 0
        while size - done >= 8 * LANES:
            _add_eight_registers(weight, rows + 4 * done, stride, n_tokens, row + 4 * done)
            done += 8 * LANES
        while size - done >= 4 * LANES:
            _add_four_registers(weight, rows + 4 * done, stride, n_tokens, row + 4 * done)
            done += 4 * LANES
        while size - done >= LANES:
            _add_one_register(weight, rows + 4 * done, stride, n_tokens, row + 4 * done)
            done += LANES
        for i in range(done, size):
            for s in range(n_tokens):
                out[h, i] += weights[h, s] * values[s, h // group, i]


@inner_function(fastmath=ANY_ORDER)
def _attend_to_unit(box: Any, query: Any, unit: int) -> None:
    """Write a unit's part of a job: for each head sums of weighted values (D), the largest score, and the total.

    `query` is the row of the table whose unit it is.
    """
    first, n_heads, n_key_heads, size = (unit - query[FIRST_UNIT]) * UNIT, box[N_HEADS], box[N_KEY_HEADS], box[SIZE]
    n_tokens = min(UNIT, query[N_TOKENS] - first)
    q = numba.carray(pointer_to(query[QUERY], ZERO), (n_heads, size))
    factor = numba.carray(pointer_to(box.ctypes.data + 8 * FACTOR, ZERO), (1,))
    part = numba.carray(pointer_to(box[OUT], ZERO), (unit + 1, n_heads * (size + 2)))[unit]
    sums = part[: n_heads * size].reshape(n_heads, size)
    weights = np.empty((n_heads, n_tokens), np.float32)
    copied = np.empty((COPIED, n_key_heads, size), np.float32)
    for of_values in range(2):
        if of_values:
            _write_weights(weights, part[n_heads * size : n_heads * (size + 1)], part[n_heads * (size + 1) :])
            sums[:] = 0
        address, scales_address = query[VALUES if of_values else KEYS], query[VALUE_SCALES if of_values else KEY_SCALES]
        for start in range(0, n_tokens, COPIED):
            stop, token = min(n_tokens, start + COPIED), first + start
            stored, n_blocks = address + token * n_key_heads * size * ITEM_SIZES[box[NUMBERS]], box[N_BLOCKS]
            rows = copied[: stop - start]
            _copy_tokens(box[NUMBERS], stored, scales_address + 2 * token * n_key_heads * n_blocks, n_blocks, rows)
            if of_values:
                _add_weighted_values(weights[:, start:stop], rows, sums)
            else:
                _write_scores(q, rows, factor[0], weights[:, start:stop])


@compile_callback("void(i8, i8, i8)")
def attend_to_units(place: int, start: int, stop: int) -> None:
    """Write some units' parts of a job; `place` is the address of its mailbox."""
    box = numba.carray(pointer_to(place, np.int64(0)), (FACTOR + 1,))
    table = numba.carray(pointer_to(box[TABLE], np.int64(0)), (box[N_QUERIES], N_COLUMNS))
    n = 0
    for unit in range(start, stop):
        while n + 1 < len(table) and table[n + 1, FIRST_UNIT] <= unit:
            n += 1
        _attend_to_unit(box, table[n], unit)


@inner_function(fastmath=ANY_ORDER)
def _add_units(parts: np.ndarray, off_by_one: bool, out: np.ndarray, logsumexp: np.ndarray) -> None:
    """Write the results (H, D) and the logsumexp (H,) of softmax, or softmax1, over the tokens of all units' parts."""
    n_heads, size = out.shape
    for h in range(n_heads):
        most_at, total_at = n_heads * size + h, n_heads * (size + 1) + h
        most = ZERO if off_by_one else parts[0, most_at]
        for part in parts:
            most = maximum(most, part[most_at])
        total = exp(-most) if off_by_one else ZERO
        out[h] = 0
        for part in parts:
            weight = exp(part[most_at] - most)
            total += weight * part[total_at]
            for i in range(size):
                out[h, i] += weight * part[h * size + i]
        for i in range(size):
            out[h, i] /= total
        logsumexp[h] = most + np.float32(math.log(total))


@compile_loop("i8(i8[:, ::1], i8, i8, i8, f4, b1, f4[:, :, ::1], f4[:, ::1], i8, i8[::1], i8)")
def decode_attention(
    table: np.ndarray,
    n_key_heads: int,
    n_blocks: int,
    numbers: int,
    scale: float,
    off_by_one: bool,
    out: np.ndarray,
    logsumexp: np.ndarray,
    function: int,
    box: np.ndarray,
    n_threads: int,
) -> int:
    """Write attention of N queries to their caches, softmax1 if `off_by_one`, to `out` (N, H, D), `logsumexp` (N, H).

    Args:
        table: (N, N_COLUMNS), see there; FIRST_UNIT is written. The scales of caches that are not int8 are not read.
        n_key_heads, n_blocks: K, and N of the scales.
        numbers: the type of keys and values: FLOAT32, FLOAT16, BFLOAT16 or INT8.
        function: the address of `attend_to_units`.

    Returns:
        As `vector_loops.multiply_vectors`.
    """
    n_queries, n_heads, size = out.shape
    n_units = 0
    for query in table:
        query[FIRST_UNIT] = n_units
        n_units += (query[N_TOKENS] + UNIT - 1) // UNIT
    parts = np.empty((n_units, n_heads * (size + 2)), np.float32)
    n_bytes = 4 if numbers == FLOAT32 else 1 if numbers == INT8 else 2
    box[KIND], box[FUNCTION], box[N_PARTS] = OTHER, function, n_threads
    box[OUT], box[SIZE], box[N_ROWS] = parts.ctypes.data, size, n_units
    box[ROWS], box[STRIDE] = table[0, KEYS], UNIT * n_key_heads * size * n_bytes
    box[TABLE], box[N_QUERIES] = table.ctypes.data, n_queries
    box[N_HEADS], box[N_KEY_HEADS], box[N_BLOCKS], box[NUMBERS] = n_heads, n_key_heads, n_blocks, numbers
    numba.carray(pointer_to(box.ctypes.data + 8 * FACTOR, ZERO), (1,))[0] = scale
    waited = run_job(box)
    for n in range(n_queries):
        stop = table[n + 1, FIRST_UNIT] if n + 1 < n_queries else n_units
        _add_units(parts[table[n, FIRST_UNIT] : stop], off_by_one, out[n], logsumexp[n])
    return waited
