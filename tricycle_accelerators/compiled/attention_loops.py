"""Attention forward and backward loops compiled by Numba, for some heads of one batch item per call.

Some queries and some keys at a time, so that their scores stay in a core's cache. A row's exponentials are shifted by
the largest of its scores so far, and sums of earlier blocks are made smaller when a larger one comes; the backward
pass makes the weights again from the logs of the sums. Products are of `tiles`, and where some queries of a block see
less of it than others, GROUP of them are multiplied at a time, by what the last of these sees.

Shapes: H heads of queries, K heads of keys, T queries, S keys, D and E sizes of a query and of a value. Query t sees
the keys up to t + last, and of these the last `window`; 0 for all. Of a block, query t sees the keys before end + t.

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tricycle_accelerators.compiled.jit import (
    ANY_ORDER,
    ONE,
    OPTIONS,
    ZERO,
    compile_loop,
    contiguous_row,
    convert_for,
    exp_underflowing_to_zero,
    intrinsic,
    to_float32,
)
from tricycle_accelerators.compiled.registers import INDEX, VECTOR, load
from tricycle_accelerators.compiled.tiles import (
    LANES,
    begin_products,
    end_products,
    left_elements,
    left_operand,
    left_to_right,
    multiply,
    n_inner_steps,
    operand_prototype,
    pack_left,
    pack_right,
    pack_right_transposed,
    prefetch_rows,
    round_up_to_lanes,
    take_zeros,
    transposed_left,
)
from tricycle_accelerators.libraries import release_memory

QUERIES, KEYS = 64, 64  # of a block
QUERY_BATCH = 4 * QUERIES  # these meet each block of keys, values and their gradients together: it comes from afar once
GROUP = 16  # queries, or keys, that are multiplied at a time where not all of a block is seen
LOWEST = np.float32(-3e38)  # below all scores but minus infinity, which is as far below this


@numba.njit(inline="always")
def _visible_key_range(first: int, n_queries: int, n_keys: int, last: int, window: int) -> tuple[int, int]:
    """Return (first key block, end of the keys) that any of these queries sees: a block number and a key index."""
    stop = min(n_keys, first + n_queries + last)
    start = max(0, first + last + 1 - window) // KEYS if window else 0
    return start, stop


@numba.njit(inline="always")
def n_key_blocks(n_keys: int) -> int:
    """Return the number of blocks of KEYS keys that cover `n_keys` keys."""
    return (n_keys + KEYS - 1) // KEYS


@numba.njit(**OPTIONS)
def _visible_block_pairs(queries: slice, n_keys: int, last: int, window: int):  # type: ignore[no-untyped-def]
    """Yield (key block, query slice, shape, ends) for each key block and each query block that sees some of it.

    Numbers of the former, places of the latter among these queries, and shape and ends of both.
    """
    start, stop = _visible_key_range(queries.start, queries.stop - queries.start, n_keys, last, window)
    for block in range(start, n_key_blocks(stop)):
        place = block * KEYS
        for first in range(queries.start, queries.stop, QUERIES):
            n = min(QUERIES, queries.stop - first)
            start, stop = _visible_key_range(first, n, n_keys, last, window)
            if start <= block < n_key_blocks(stop):
                here = slice(first - queries.start, first - queries.start + QUERIES)
                yield block, here, (n, min(KEYS, stop - place)), (first + last + 1 - place, window)


@numba.njit(**OPTIONS)
def transposition_scratch(memory: np.ndarray, n_inner: int, like: np.ndarray) -> np.ndarray:
    """Return zeros (LANES, `n_inner` rounded up to LANES) in `like`'s dtype, the scratch of `pack_right_transposed`."""
    return take_zeros(memory, LANES, round_up_to_lanes(n_inner), like)


@numba.njit(inline="always")
def key_block(operands: np.ndarray, block: int, scratch: np.ndarray) -> np.ndarray:
    """Return the packed operand of one block of keys that `_pack_key_blocks` has written."""
    n_steps = scratch.shape[1]
    return operands[block * n_steps : (block + 1) * n_steps]


@numba.njit(**OPTIONS)
def _prefetch_head(x: np.ndarray, h: int, rows: slice) -> None:
    """Prefetch some rows of one head of an array (H, T, D); do nothing if there is no such head."""
    if h < len(x):
        prefetch_rows(x[h, rows])


@numba.njit(**OPTIONS)
def _prefetch_heads(q: np.ndarray, k: np.ndarray, v: np.ndarray, h: int, rows: slice) -> None:
    """Prefetch rows of a query head and of the key and value head that it uses."""
    key_head = h // (len(q) // len(k))
    _prefetch_head(q, h, rows)
    _prefetch_head(k, key_head, rows)
    _prefetch_head(v, key_head, rows)


@numba.njit(**OPTIONS)
def _pack_key_blocks(x: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Write the transposes of all key blocks of rows x (S, D) into `out`, packed as right operands, one per block."""
    n_steps = scratch.shape[1]
    for start in range(0, len(x), KEYS):
        first = start // KEYS * n_steps
        pack_right_transposed(x[start : start + KEYS], scratch, out[first : first + n_steps])


def memory_bytes(n_keys: int, size: int, value_size: int) -> int:
    """Return the bytes of memory that the loops need for operands of float32, in the backward pass, and sums."""
    sizes, n_rows = round_up_to_lanes(size) + round_up_to_lanes(value_size), n_key_blocks(n_keys) * KEYS
    return 4 * (3 * sizes * n_rows + 3 * sizes * QUERY_BATCH + 6 * QUERIES * KEYS + LANES * sizes + 4 * QUERY_BATCH)


# -------------------------------------------------------------------- the visible part of a block
# shape: how many queries and keys a block has. ends: the key after the last that its first query sees; the window or 0.
@numba.njit(inline="always")
def _n_visible(t: int, n_keys: int, end: int) -> int:
    """Return how many keys of a block come before the end of the keys that query t sees."""
    return max(0, min(n_keys, end + t))


@numba.njit(inline="always")
def _all_visible(shape: tuple[int, int], ends: tuple[int, int]) -> bool:
    """Return whether every query sees all KEYS keys of the block."""
    (n_queries, n_keys), (end, window) = shape, ends
    return n_keys == KEYS and end >= KEYS and (window == 0 or end + n_queries - 1 <= window)


@numba.njit(inline="always")
def _rows_per_call(n: int, shape: tuple[int, int], ends: tuple[int, int]) -> int:
    """Return how many of n rows to multiply at a time: all, rounded up, if all keys are visible, else GROUP."""
    return (n + GROUP - 1) // GROUP * GROUP if _all_visible(shape, ends) else GROUP


@numba.njit(**OPTIONS)
def _multiply_visible(left, right, out, shape, ends):  # type: ignore[no-untyped-def]
    """Write left @ right (queries and keys) into `out` (QUERIES, KEYS), without keys that a group does not see."""
    n_queries, n_keys = shape
    step = _rows_per_call(n_queries, shape, ends)
    for first in range(0, n_queries, step):
        rows = slice(first, first + step)
        columns = round_up_to_lanes(_n_visible(first + step - 1, n_keys, ends[0]))
        if columns:
            multiply(left[rows], right[:, :columns], out[rows, :columns], False)


@numba.njit(**OPTIONS)
def _add_by_queries(left, right, out, shape, ends):  # type: ignore[no-untyped-def]
    """Add left @ right (weights and rows of keys) to `out` (QUERIES, N), without keys that a group does not see."""
    n_queries, n_keys = shape
    step = _rows_per_call(n_queries, shape, ends)
    for first in range(0, n_queries, step):
        rows = slice(first, first + step)
        n_inner = n_inner_steps(_n_visible(first + step - 1, n_keys, ends[0]), left)
        if n_inner:
            multiply(left[rows], right[:n_inner], out[rows], True)


@numba.njit(**OPTIONS)
def _add_by_keys(left, right, out, shape, ends):  # type: ignore[no-untyped-def]
    """Add left @ right (transposed weights and rows of queries) to `out` (KEYS, N), without queries that see none."""
    n_queries, n_keys = shape
    step = _rows_per_call(n_keys, shape, ends)
    for first in range(0, n_keys, step):
        keys = slice(first, first + step)
        before = max(0, first + 1 - ends[0])  # queries that see none of these
        some = slice(n_inner_steps(before // 2 * 2, left), n_inner_steps(n_queries, left))
        if some.start < some.stop:
            multiply(left[keys, some], right[some], out[keys], True)


@numba.njit(**OPTIONS)
def _mask_scores(scores: np.ndarray, shape: tuple[int, int], ends: tuple[int, int], value: np.float32) -> None:
    """Write `value` into scores (QUERIES, KEYS) where a query does not see the key, or where there is no key."""
    (n_queries, n_keys), (end, window) = shape, ends
    for t in range(n_queries):
        row, stop = scores[t], _n_visible(t, n_keys, end)
        row[stop:] = value
        if window:
            row[: max(0, min(stop, end + t - window))] = value


# -------------------------------------------------------------------- forward
@intrinsic
def _largest(context: Any, place: Any) -> Any:
    """Return the largest of the KEYS float32 numbers at an address (Numba intrinsic)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addresses = [builder.add(arguments[0], INDEX(4 * i)) for i in range(0, KEYS, VECTOR.count)]
        registers = [load(builder, address, VECTOR) for address in addresses]
        while len(registers) > 1:
            half = len(registers) // 2
            pairs = zip(registers[:half], registers[half:])
            registers = [builder.select(builder.fcmp_ordered(">", a, b), a, b) for a, b in pairs]
        kind = ir.FunctionType(ir.FloatType(), [VECTOR])
        name = f"llvm.vector.reduce.fmax.v{VECTOR.count}f32"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, registers, fastmath=("nnan", "nsz"))

    return types.float32(types.intp), code


@numba.njit(fastmath=ANY_ORDER, **OPTIONS)
def _exponentials(scores, weights, mixed, shifts, totals, scale, n_queries):  # type: ignore[no-untyped-def]
    """Write a block's weights, e^(scale (score - shift)); update shifts, totals and `mixed` (online softmax).

    Args:
        scores: (QUERIES, KEYS). weights: the same shape, float32 or the bits of bfloat16.
        mixed: (QUERIES, E), sums of values so far, made smaller where a shift grows, as totals are.
        shifts, totals: (QUERIES,), the largest scores and the sums of exponentials so far.
    """
    for t in range(n_queries):
        row, new = contiguous_row(scores, t), contiguous_row(weights, t)
        largest = _largest(scores.ctypes.data + t * scores.strides[0])
        if largest > shifts[t]:
            share = exp_underflowing_to_zero(scale * (shifts[t] - largest))
            totals[t] *= share
            sums = contiguous_row(mixed, t)
            for e in range(len(sums)):
                sums[e] *= share
            shifts[t] = largest
        shift, total = shifts[t], ZERO
        for s in range(KEYS):
            weight = exp_underflowing_to_zero(scale * (row[s] - shift))
            new[s] = convert_for(new, weight)
            total += weight
        totals[t] += total


def _attention(q, k, v, scale, last, window, off_by_one, out, shifts, totals, memory):  # type: ignore[no-untyped-def]
    """Write attention outputs (H, T, E) into `out`; each row's scaled maximum and exponential sum into shifts, totals.

    Args:
        q: (H, T, D). k: (K, S, D). v: (K, S, E); float32, or the bits of bfloat16.
        scale: above 0.
        off_by_one: whether a row may attend to nothing: a sum begins with e^0.
        memory: for operands, as of `take_zeros`.
    """
    like = operand_prototype(q)
    n_heads, n_queries, size = q.shape
    n_key_heads, n_keys, value_size = v.shape
    n_sharing = n_heads // n_key_heads
    scratch = transposition_scratch(memory, n_inner_steps(size, like), like)
    keys = take_zeros(memory, n_key_blocks(n_keys) * scratch.shape[1], KEYS, like)
    values = take_zeros(memory, n_inner_steps(n_keys, like), round_up_to_lanes(value_size), like)
    n_inner = n_inner_steps(size, like)
    queries = take_zeros(memory, QUERY_BATCH, n_inner, like)
    scores = take_zeros(memory, QUERIES, KEYS, shifts)
    weights = take_zeros(memory, QUERIES, n_inner_steps(KEYS, like), like)
    mixed = take_zeros(memory, QUERY_BATCH, round_up_to_lanes(value_size), shifts)
    of_rows = take_zeros(memory, 2, QUERY_BATCH, shifts)
    highest, sums = of_rows[0], of_rows[1]
    begin_products(like)
    for h in range(n_heads):
        if h % n_sharing == 0:
            _pack_key_blocks(k[h // n_sharing], scratch, keys)
            pack_right(v[h // n_sharing], values)
        for first in range(0, n_queries, QUERY_BATCH):
            some = slice(first, min(n_queries, first + QUERY_BATCH))
            _prefetch_heads(q, k, v, h + 1, some)
            pack_left(q[h, some], queries)
            mixed[:] = ZERO
            sums[:] = ONE if off_by_one else ZERO
            highest[:] = ZERO if off_by_one else LOWEST
            for block, here, shape, ends in _visible_block_pairs(some, n_keys, last, window):
                _multiply_visible(queries[here], key_block(keys, block, scratch)[:n_inner], scores, shape, ends)
                if not _all_visible(shape, ends):
                    _mask_scores(scores, shape, ends, -np.inf)
                _exponentials(scores, left_elements(weights), mixed[here], highest[here], sums[here], scale, shape[0])
                _add_by_queries(weights, values[n_inner_steps(block * KEYS, like) :], mixed[here], shape, ends)
            for t in range(some.stop - first):
                share = ONE / sums[t]
                row, new = mixed[t], contiguous_row(out[h], first + t)
                for e in range(len(new)):
                    new[e] = convert_for(new, row[e] * share)
                shifts[h, first + t] = highest[t] * scale
                totals[h, first + t] = sums[t]
    end_products(like)


# -------------------------------------------------------------------- backward
@numba.njit(fastmath=ANY_ORDER, **OPTIONS)
def _differentiate(scores, slopes, logs, inner, scale, n_queries):  # type: ignore[no-untyped-def]
    """Turn scores into weights, and `slopes` (gradients of weights) into gradients of products, in place.

    Args:
        scores, slopes: (QUERIES, KEYS), minus infinity and 0 where nothing is seen.
        logs, inner: (T,), of sums of exponentials, and the products of results and their gradients.
    """
    for t in range(n_queries):
        row, slope = contiguous_row(scores, t), contiguous_row(slopes, t)
        log, mean = logs[t], inner[t]
        for s in range(KEYS):
            weight = exp_underflowing_to_zero(row[s] * scale - log)
            row[s] = weight
            slope[s] = weight * (slope[s] - mean) * scale


@numba.njit(fastmath=ANY_ORDER, **OPTIONS)
def _row_dot_products(grads, out, sums):  # type: ignore[no-untyped-def]
    """Write into `sums` (T,) the dot product of each row of results `out` (T, E) with that of its gradients."""
    numbers = left_elements(grads)
    for t in range(len(out)):
        row, a = contiguous_row(out, t), contiguous_row(numbers, t)
        total = ZERO
        for e in range(len(row)):
            total += to_float32(a[e]) * to_float32(row[e])
        sums[t] = total


@numba.njit(**OPTIONS)
def _copy_converted(rows: np.ndarray, out: np.ndarray) -> None:
    """Write rows into `out`, which may have fewer, converted to its dtype."""
    for t in range(len(out)):
        row, new = contiguous_row(rows, t), contiguous_row(out, t)
        for d in range(len(new)):
            new[d] = convert_for(new, row[d])


@numba.njit(**OPTIONS)
def _allocate_for_keys(memory, n_keys, size, scratch, like):  # type: ignore[no-untyped-def]
    """Return zeros for the transposed operands of keys or values, in blocks, and float32 zeros for their gradients."""
    n_blocks = n_key_blocks(n_keys)
    gradients = take_zeros(memory, n_blocks * KEYS, round_up_to_lanes(size), np.zeros(1, np.float32))
    return take_zeros(memory, n_blocks * scratch.shape[1], KEYS, like), gradients


@numba.njit(**OPTIONS)
def _allocate_for_queries(memory, size, like):  # type: ignore[no-untyped-def]
    """Return zeros for a left and a right operand of a batch of queries, or of the gradients of their results."""
    left = take_zeros(memory, QUERY_BATCH, round_up_to_lanes(n_inner_steps(size, like)), like)
    return left, take_zeros(memory, n_inner_steps(QUERY_BATCH, like), round_up_to_lanes(size), like)


def _attention_backward(grad, q, k, v, out, logs, scale, last, window, dq, dk, dv, memory):  # type: ignore[no-untyped-def]
    """Write the gradients of some heads into dq, dk and dv; weights are recomputed from the logsumexps `logs`.

    Args:
        grad, out: (H, T, E), the latter of `_attention`, as is logs; the others as of `_attention`.
        dq, dk, dv: like q, k and v.
        memory: for operands, as of `take_zeros`.
    """
    like, (n_heads, n_queries, size), (n_key_heads, n_keys, value_size) = operand_prototype(q), q.shape, v.shape
    n_sharing = n_heads // n_key_heads
    n_inner, n_inner_values = n_inner_steps(size, like), n_inner_steps(value_size, like)
    scratch, value_scratch = (
        transposition_scratch(memory, n_inner, like),
        transposition_scratch(memory, n_inner_values, like),
    )
    keys, d_keys = _allocate_for_keys(memory, n_keys, size, scratch, like)
    values, d_values = _allocate_for_keys(memory, n_keys, value_size, value_scratch, like)
    key_rows = take_zeros(memory, n_inner_steps(n_keys, like), round_up_to_lanes(size), like)
    queries, query_rows = _allocate_for_queries(memory, size, like)
    grads, grad_rows = _allocate_for_queries(memory, value_size, like)
    scores, slopes = take_zeros(memory, QUERIES, KEYS, logs), take_zeros(memory, QUERIES, KEYS, logs)
    d_queries = take_zeros(memory, QUERY_BATCH, round_up_to_lanes(size), logs)
    left = take_zeros(memory, n_inner_steps(QUERIES, like), KEYS, like)
    slopes_scratch = take_zeros(memory, QUERIES, n_inner_steps(KEYS, like), like)
    of_rows = take_zeros(memory, 2, QUERY_BATCH, logs)
    inner, own_logs = of_rows[0], of_rows[1]
    begin_products(like)
    for h in range(n_heads):
        if h % n_sharing == 0:
            _pack_key_blocks(k[h // n_sharing], scratch, keys)
            _pack_key_blocks(v[h // n_sharing], value_scratch, values)
            pack_right(k[h // n_sharing], key_rows)
            d_keys[:] = ZERO
            d_values[:] = ZERO
        for first in range(0, n_queries, QUERY_BATCH):
            some = slice(first, min(n_queries, first + QUERY_BATCH))
            n = some.stop - first
            _prefetch_heads(q, k, v, h + 1, some)
            _prefetch_head(grad, h + 1, some)
            _prefetch_head(out, h + 1, some)
            pack_left(q[h, some], queries)
            pack_left(grad[h, some], grads)
            queries_right = left_to_right(queries, (n, size), query_rows)[: n_inner_steps(n, like)]
            grads_right = left_to_right(grads, (n, value_size), grad_rows)[: n_inner_steps(n, like)]
            _row_dot_products(grads, out[h, some], inner)
            own_logs[:n] = logs[h, some]
            d_queries[:] = ZERO
            for block, here, shape, ends in _visible_block_pairs(some, n_keys, last, window):
                seen, steps = slice(block * KEYS, (block + 1) * KEYS), slice(n_inner_steps(here.start, like), None)
                keys_here = key_block(keys, block, scratch)[:n_inner]
                values_here = key_block(values, block, value_scratch)[:n_inner_values]
                _multiply_visible(queries[here], keys_here, scores, shape, ends)
                _multiply_visible(grads[here], values_here, slopes, shape, ends)
                if not _all_visible(shape, ends):
                    _mask_scores(scores, shape, ends, -np.inf)
                    _mask_scores(slopes, shape, ends, ZERO)
                _differentiate(scores, slopes, own_logs[here], inner[here], scale, shape[0])
                _add_by_keys(transposed_left(scores, shape[0], left), grads_right[steps], d_values[seen], shape, ends)
                _add_by_keys(transposed_left(slopes, shape[0], left), queries_right[steps], d_keys[seen], shape, ends)
                slopes_left = left_operand(slopes, slopes_scratch)
                _add_by_queries(slopes_left, key_rows[n_inner_steps(seen.start, like) :], d_queries[here], shape, ends)
            _copy_converted(d_queries[:n, :size], dq[h, some])
        if (h + 1) % n_sharing == 0:
            _copy_converted(d_keys[:n_keys, :size], dk[h // n_sharing])
            _copy_converted(d_values[:n_keys, :value_size], dv[h // n_sharing])
    end_products(like)


# -------------------------------------------------------------------- compiled where they are asked for
# Each kind separately: compiling takes seconds, and no program needs all of them.
def _heads_signature(narrow: bool) -> str:
    """Return Numba's type of a 3-D array: bfloat16 bits (uint16) if `narrow`, else float32."""
    return "u2[:, :, :]" if narrow else "f4[:, :, :]"


# Cache: valid for the life of the process: compiled for this processor.
@cache
def compile_attention(narrow: bool, narrow_results: bool) -> Any:
    """Return the forward loop; operands are bfloat16 bits if `narrow`, results if `narrow_results`, else float32."""
    x, y = _heads_signature(narrow), _heads_signature(narrow_results)
    return _compile_later(f"void({x}, {x}, {x}, f4, i8, i8, b1, {y}, f4[:, :], f4[:, :], i8[::1])", _attention)


# Cache: valid for the life of the process: compiled for this processor.
@cache
def compile_attention_backward(narrow: bool, narrow_results: bool) -> Any:
    """Return the backward loop; q, k, v are bfloat16 bits if `narrow`, others if `narrow_results`, else float32."""
    x, y = _heads_signature(narrow), _heads_signature(narrow_results)
    return _compile_later(
        f"void({y}, {x}, {x}, {x}, {y}, f4[:, :], f4, i8, i8, {y}, {y}, {y}, i8[::1])", _attention_backward
    )


def _compile_later(signature: str, loop: Any) -> Any:
    """Compile a loop, or load its code, and release the memory that this took, as `load_loops` does."""
    compiled = compile_loop(signature)(loop)
    release_memory()
    return compiled
