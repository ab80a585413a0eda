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
from numba import types

from tricycle_accelerators.compiled.jit import (
    ANY_ORDER,
    ONE,
    ZERO,
    compile_loop,
    contiguous_row,
    convert_for,
    copy_row,
    emitted_intrinsic,
    exp_underflowing_to_zero,
    inner_function,
    to_float32,
)
from tricycle_accelerators.compiled.registers import FLOAT, INDEX, VECTOR, call, load
from tricycle_accelerators.compiled.tiles import (
    LANES,
    begin_products,
    end_products,
    finish_left,
    left_elements,
    left_operand,
    multiply,
    n_inner_steps,
    pack_left,
    pack_right,
    pack_right_transposed,
    pack_transposed,
    prefetch_rows,
    right_operand,
    round_up,
    round_up_to_lanes,
    take_zeros,
    transpose_tiles,
    transposed_left,
)
from tricycle_accelerators.libraries import release_memory

QUERIES, KEYS = 64, 64  # of a block
QUERY_BATCH = 8 * QUERIES  # these meet each block of keys, values and their gradients together: it comes from afar once
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


@numba.njit(inline="always")
def _batch_size(n_queries: int) -> int:
    """Return the number of queries that are packed at a time: whole blocks."""
    return min(QUERY_BATCH, round_up(n_queries, QUERIES))


@inner_function()
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


@inner_function()
def transposition_scratch(memory: np.ndarray, n_inner: int, like: np.ndarray) -> np.ndarray:
    """Return zeros (LANES, `n_inner` rounded up to LANES) in `like`'s dtype, the scratch of `pack_right_transposed`."""
    return take_zeros(memory, LANES, round_up_to_lanes(n_inner), like)


@numba.njit(inline="always")
def key_block(operands: np.ndarray, block: int, scratch: np.ndarray) -> np.ndarray:
    """Return the packed operand of one block of keys that `_pack_key_blocks` has written."""
    n_steps = scratch.shape[1]
    return operands[block * n_steps : (block + 1) * n_steps]


@inner_function()
def _prefetch_head(x: np.ndarray, h: int, rows: slice) -> None:
    """Prefetch some rows of one head of an array (H, T, D); do nothing if there is no such head."""
    if h < len(x):
        prefetch_rows(x[h, rows])


@inner_function()
def _prefetch_heads(q: np.ndarray, k: np.ndarray, v: np.ndarray, h: int, rows: slice) -> None:
    """Prefetch rows of a query head and of the key and value head that it uses."""
    key_head = h // (len(q) // len(k))
    _prefetch_head(q, h, rows)
    _prefetch_head(k, key_head, rows)
    _prefetch_head(v, key_head, rows)


@inner_function()
def _pack_key_blocks(x: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Write the transposes of all key blocks of rows x (S, D) into `out`, packed as right operands, one per block."""
    n_steps = scratch.shape[1]
    for start in range(0, len(x), KEYS):
        first = start // KEYS * n_steps
        pack_right_transposed(x[start : start + KEYS], scratch, out[first : first + n_steps])


def memory_bytes(n_keys: int, size: int, value_size: int) -> int:
    """Return the bytes of memory that the loops need for operands, most of all parts in the backward pass, and sums."""
    sizes, n_rows = round_up_to_lanes(size) + round_up_to_lanes(value_size), n_key_blocks(n_keys) * KEYS
    numbers = sizes * (3 * n_rows + 4 * QUERY_BATCH + LANES + KEYS) + 7 * QUERIES * KEYS + 4 * QUERY_BATCH
    return 6 * numbers  # of float32 they have 4, of parts 6


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


@inner_function()
def _multiply_visible(left, right, out, shape, ends):  # type: ignore[no-untyped-def]
    """Write left @ right (queries and keys) into `out` (QUERIES, KEYS), without keys that a group does not see."""
    n_queries, n_keys = shape
    step = _rows_per_call(n_queries, shape, ends)
    for first in range(0, n_queries, step):
        rows = slice(first, first + step)
        columns = round_up_to_lanes(_n_visible(first + step - 1, n_keys, ends[0]))
        if columns:
            multiply(left[rows], right[:, :columns], out[rows, :columns], False)


@inner_function()
def _add_by_queries(left, right, out, shape, ends):  # type: ignore[no-untyped-def]
    """Add left @ right (weights and rows of keys) to `out` (QUERIES, N), without keys that a group does not see."""
    n_queries, n_keys = shape
    step = _rows_per_call(n_queries, shape, ends)
    for first in range(0, n_queries, step):
        rows = slice(first, first + step)
        n_inner = n_inner_steps(_n_visible(first + step - 1, n_keys, ends[0]), left)
        if n_inner:
            multiply(left[rows], right[:n_inner], out[rows], True)


@inner_function()
def _add_by_keys(left, right, out, shape, ends):  # type: ignore[no-untyped-def]
    """Add left @ right (transposed rows of queries and weights) to `out` (N, KEYS), without queries that see none."""
    n_queries, n_keys = shape
    step = _rows_per_call(n_keys, shape, ends)
    for first in range(0, n_keys, step):
        keys = slice(first, first + step)
        before = max(0, first + 1 - ends[0])  # queries that see none of these
        some = slice(n_inner_steps(before // 2 * 2, left), n_inner_steps(n_queries, left))
        if some.start < some.stop:
            multiply(left[:, some], right[some, keys], out[:, keys], True)


@inner_function()
def _mask_scores(scores: np.ndarray, shape: tuple[int, int], ends: tuple[int, int], value: np.float32) -> None:
    """Write `value` into scores (QUERIES, KEYS) where a query does not see the key, or where there is no key."""
    (n_queries, n_keys), (end, window) = shape, ends
    for t in range(n_queries):
        row, stop = scores[t], _n_visible(t, n_keys, end)
        row[stop:] = value
        if window:
            row[: max(0, min(stop, end + t - window))] = value


@inner_function()
def _multiply_masked(left, right, out, shape, ends, value):  # type: ignore[no-untyped-def]
    """Write left @ right (queries and keys) into `out` (QUERIES, KEYS), and `value` for keys that a query can't see."""
    _multiply_visible(left, right, out, shape, ends)
    if not _all_visible(shape, ends):
        _mask_scores(out, shape, ends, value)


# -------------------------------------------------------------------- forward
@emitted_intrinsic(types.float32(types.intp))
def _largest(builder: Any, place: Any) -> Any:
    """Return the largest of the KEYS float32 numbers at an address (Numba intrinsic)."""
    addresses = [builder.add(place, INDEX(4 * i)) for i in range(0, KEYS, VECTOR.count)]
    registers = [load(builder, address, VECTOR) for address in addresses]
    while len(registers) > 1:
        half = len(registers) // 2
        pairs = zip(registers[:half], registers[half:])
        registers = [builder.select(builder.fcmp_ordered(">", a, b), a, b) for a, b in pairs]
    name = f"llvm.vector.reduce.fmax.v{VECTOR.count}f32"
    return call(builder, name, FLOAT, *registers, fastmath=("nnan", "nsz"))


@inner_function(fastmath=ANY_ORDER)
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


@inner_function(fastmath=ANY_ORDER)
def _copy_converted(rows: np.ndarray, out: np.ndarray) -> Any:
    """Write float32 rows into `out`, converted to its dtype; return NaN if a number is not finite, else 0."""
    broken = ZERO
    for t in range(len(out)):
        row, new = contiguous_row(rows, t), contiguous_row(out, t)
        for d in range(len(new)):
            new[d] = convert_for(new, row[d])
            broken += row[d] * ZERO
    return broken


def _attention(q, k, v, scale, last, window, off_by_one, out, shifts, totals, like, memory):  # type: ignore[no-untyped-def]
    """Write attention outputs (H, T, E) into `out`; each row's scaled maximum and exponential sum into shifts, totals.

    Returns whether all outputs are finite.

    Args:
        q: (H, T, D). k: (K, S, D). v: (K, S, E); float32, or the bits of bfloat16.
        scale: above 0.
        off_by_one: whether a row may attend to nothing: a sum begins with e^0.
        like: of the dtype of operands of products, see `tiles`.
        memory: for operands, as of `take_zeros`.
    """
    memory[0] = memory.itemsize
    n_heads, n_queries, size = q.shape
    n_key_heads, n_keys, value_size = v.shape
    n_sharing = n_heads // n_key_heads
    scratch = transposition_scratch(memory, n_inner_steps(size, like), like)
    keys = take_zeros(memory, n_key_blocks(n_keys) * scratch.shape[1], KEYS, like)
    values = take_zeros(memory, n_inner_steps(n_keys, like), round_up_to_lanes(value_size), like)
    n_inner = n_inner_steps(size, like)
    queries = take_zeros(memory, _batch_size(n_queries), n_inner, like)
    scores = take_zeros(memory, QUERIES, KEYS, shifts)
    weights = take_zeros(memory, QUERIES, n_inner_steps(KEYS, like), like)
    numbers = take_zeros(memory, QUERIES, KEYS, shifts)
    mixed = take_zeros(memory, _batch_size(n_queries), round_up_to_lanes(value_size), shifts)
    of_rows = take_zeros(memory, 2, QUERY_BATCH, shifts)
    highest, sums = of_rows[0], of_rows[1]
    broken = ZERO
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
                _multiply_masked(queries[here], key_block(keys, block, scratch)[:n_inner], scores, shape, ends, -np.inf)
                new = left_elements(weights, numbers)
                _exponentials(scores, new, mixed[here], highest[here], sums[here], scale, shape[0])
                finish_left(weights, numbers[: shape[0]])
                _add_by_queries(weights, values[n_inner_steps(block * KEYS, like) :], mixed[here], shape, ends)
            for t in range(some.stop - first):
                share = ONE / sums[t]
                row = mixed[t]
                for e in range(len(row)):
                    row[e] *= share
                shifts[h, first + t] = highest[t] * scale
                totals[h, first + t] = sums[t]
            broken += _copy_converted(mixed[: some.stop - first, :value_size], out[h, some])
    end_products(like)
    return broken == 0


# -------------------------------------------------------------------- backward
@inner_function(fastmath=ANY_ORDER)
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


@inner_function(fastmath=ANY_ORDER)
def _row_dot_products(grads, out, sums):  # type: ignore[no-untyped-def]
    """Write into `sums` (T,) the dot product of each row of results `out` (T, E) with that of its gradients.

    Of bfloat16 they are as rounded as in the products from which the sums are subtracted.
    """
    for t in range(len(out)):
        row, a = contiguous_row(out, t), contiguous_row(grads, t)
        total = ZERO
        for e in range(len(row)):
            total += to_float32(a[e]) * to_float32(row[e])
        sums[t] = total


@inner_function()
def _copy_transposed(blocks: np.ndarray, rows: np.ndarray, out: np.ndarray) -> Any:
    """Write transposed blocks (n N, KEYS) of gradients into `out` (S, D) by way of `rows` (KEYS, N), D of N numbers.

    Returns NaN if a number is not finite, else 0.
    """
    broken, size = ZERO, rows.shape[1]
    for block in range(n_key_blocks(len(out))):
        some = slice(block * KEYS, min(len(out), (block + 1) * KEYS))
        transpose_tiles(blocks[block * size : (block + 1) * size], rows)
        broken += _copy_converted(rows[: some.stop - some.start, : out.shape[1]], out[some])
    return broken


@inner_function()
def _allocate_for_keys(memory, n_keys, size, like):  # type: ignore[no-untyped-def]
    """Return zeros for keys or values and their gradients.

    For their transposes as operands in blocks, of `_pack_key_blocks`, and its scratch; for the gradients as
    `_copy_transposed` takes them, and for its rows.
    """
    numbers, n_blocks, wide = np.zeros(1, np.float32), n_key_blocks(n_keys), round_up_to_lanes(size)
    scratch = transposition_scratch(memory, n_inner_steps(size, like), like)
    operands = take_zeros(memory, n_blocks * scratch.shape[1], KEYS, like)
    gradients = take_zeros(memory, n_blocks * wide, KEYS, numbers)
    return operands, scratch, gradients, take_zeros(memory, KEYS, wide, numbers)


@inner_function()
def _allocate_for_queries(memory, n_queries, size, like):  # type: ignore[no-untyped-def]
    """Return zeros for a batch of queries as left operand, and for the transposes of its blocks, and scratch."""
    wide, n_steps = round_up_to_lanes(size), n_inner_steps(QUERIES, like)
    n_batch = _batch_size(n_queries)
    left = take_zeros(memory, n_batch, round_up_to_lanes(n_inner_steps(size, like)), like)
    across = take_zeros(memory, n_batch // QUERIES * wide, n_steps, like)
    return left, across, take_zeros(memory, n_steps, wide, like)


@inner_function()
def _pack_queries(x, operands):  # type: ignore[no-untyped-def]
    """Pack rows of queries x (T, D) as `_allocate_for_queries` has made room for them."""
    left, across, scratch = operands
    pack_left(x, left)
    wide = scratch.shape[1]
    for start in range(0, len(x), QUERIES):
        first = start // QUERIES * wide
        pack_transposed(x[start : start + QUERIES], scratch, across[first : first + wide])


@inner_function()
def _add_gradients(operands, here, weights, right, blocks, block, shape, ends):  # type: ignore[no-untyped-def]
    """Add to a block of keys' gradients the products of weights (QUERIES, KEYS) with queries packed in `operands`.

    Args:
        right: memory for the weights as right operand. blocks: as of `_copy_transposed`.
    """
    left, across, scratch = operands
    wide = scratch.shape[1]
    first = here.start // QUERIES * wide
    transposed = transposed_left(left[here], across[first : first + wide])
    out = blocks[block * wide : (block + 1) * wide]
    _add_by_keys(transposed, right_operand(weights[: shape[0]], right), out, shape, ends)


def _attention_backward(grad, q, k, v, out, logs, scale, last, window, dq, dk, dv, like, memory):  # type: ignore[no-untyped-def]
    """Write the gradients of some heads into dq, dk and dv; weights are recomputed from the logsumexps `logs`.

    Returns whether all gradients are finite.

    Args:
        grad, out: (H, T, E), the latter of `_attention`, as is logs; the others as of `_attention`.
        dq, dk, dv: like q, k and v.
    """
    memory[0] = memory.itemsize
    (n_heads, n_queries, size), (n_key_heads, n_keys, value_size) = q.shape, v.shape
    n_sharing = n_heads // n_key_heads
    n_inner, n_inner_values = n_inner_steps(size, like), n_inner_steps(value_size, like)
    keys, scratch, d_keys, rows = _allocate_for_keys(memory, n_keys, size, like)
    values, value_scratch, d_values, value_rows = _allocate_for_keys(memory, n_keys, value_size, like)
    key_rows = take_zeros(memory, n_inner_steps(n_keys, like), rows.shape[1], like)
    queries = _allocate_for_queries(memory, n_queries, size, like)
    grads = _allocate_for_queries(memory, n_queries, value_size, like)
    scores, slopes = take_zeros(memory, QUERIES, KEYS, logs), take_zeros(memory, QUERIES, KEYS, logs)
    d_queries = take_zeros(memory, _batch_size(n_queries), rows.shape[1], logs)
    right = take_zeros(memory, n_inner_steps(QUERIES, like), KEYS, like)
    slopes_scratch = take_zeros(memory, QUERIES, n_inner_steps(KEYS, like), like)
    inner, own_logs = take_zeros(memory, 1, QUERY_BATCH, logs)[0], take_zeros(memory, 1, QUERY_BATCH, logs)[0]
    broken = ZERO
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
            _pack_queries(q[h, some], queries)
            _pack_queries(grad[h, some], grads)
            _row_dot_products(left_elements(grads[0], grad[h, some]), out[h, some], inner)
            copy_row(logs[h, some], own_logs[:n])
            d_queries[:] = ZERO
            for block, here, shape, ends in _visible_block_pairs(some, n_keys, last, window):
                keys_here = key_block(keys, block, scratch)[:n_inner]
                values_here = key_block(values, block, value_scratch)[:n_inner_values]
                _multiply_masked(queries[0][here], keys_here, scores, shape, ends, -np.inf)
                _multiply_masked(grads[0][here], values_here, slopes, shape, ends, ZERO)
                _differentiate(scores, slopes, own_logs[here], inner[here], scale, shape[0])
                _add_gradients(grads, here, scores, right, d_values, block, shape, ends)
                _add_gradients(queries, here, slopes, right, d_keys, block, shape, ends)
                rows_here = key_rows[n_inner_steps(block * KEYS, like) :]
                _add_by_queries(left_operand(slopes, slopes_scratch), rows_here, d_queries[here], shape, ends)
            broken += _copy_converted(d_queries[:n, :size], dq[h, some])
        if (h + 1) % n_sharing == 0:
            broken += _copy_transposed(d_keys, rows, dk[h // n_sharing])
            broken += _copy_transposed(d_values, value_rows, dv[h // n_sharing])
    end_products(like)
    return broken == 0


# -------------------------------------------------------------------- compiled where they are asked for
# Each kind separately: compiling takes seconds, and no program needs all of them.
def _heads_signature(narrow: bool) -> str:
    """Return Numba's type of a 3-D array: bfloat16 bits (uint16) if `narrow`, else float32."""
    return "u2[:, :, :]" if narrow else "f4[:, :, :]"


# Cache: valid for the life of the process: compiled for this processor.
@cache
def compile_attention(operands: str, narrow: bool, narrow_results: bool) -> Any:
    """Return the forward loop for operands of a dtype, such as "f4", given as the argument `like`.

    Queries, keys and values are bfloat16 bits if `narrow`, results if `narrow_results`, else float32.
    """
    x, y = _heads_signature(narrow), _heads_signature(narrow_results)
    signature = f"b1({x}, {x}, {x}, f4, i8, i8, b1, {y}, f4[:, :], f4[:, :], {operands}[::1], i8[::1])"
    return _compile_later(signature, _attention)


# Cache: valid for the life of the process: compiled for this processor.
@cache
def compile_attention_backward(operands: str, narrow: bool, narrow_results: bool) -> Any:
    """Return the backward loop for operands of a dtype; q, k, v are bfloat16 bits if `narrow`, others as results."""
    x, y = _heads_signature(narrow), _heads_signature(narrow_results)
    others = f"f4[:, :], f4, i8, i8, {y}, {y}, {y}, {operands}[::1], i8[::1]"
    return _compile_later(f"b1({y}, {x}, {x}, {x}, {y}, {others})", _attention_backward)


def _compile_later(signature: str, loop: Any) -> Any:
    """Compile a loop, or load its code, and release the memory that this took, as `load_loops` does."""
    compiled = compile_loop(signature)(loop)
    release_memory()
    return compiled
