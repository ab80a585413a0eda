"""Attention that Numba compiles: forward and backward of some heads of one item, in one call each.

Some queries and some keys at a time, so that their scores stay in a core's cache. A row's exponentials are shifted by
the largest of its scores so far, and sums of earlier blocks are made smaller when a larger one comes; the backward
pass makes the weights again from the logs of the sums. Products are of `tiles`.

Shapes: H heads of queries, K heads of keys, T queries, S keys, D and E sizes of a query and of a value. Query t sees
the keys up to t + last, and of these the last `window`; 0 for all.

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention".
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numba
import numpy as np

from tricycle_accelerators.compiled.jit import (
    ANY_ORDER,
    ONE,
    OPTIONS,
    ZERO,
    at,
    compiled,
    exp,
    larger,
    number_of,
    rounded_for,
)
from tricycle_accelerators.compiled.tiles import (
    HAS_PAIRS as HAS_PAIRS,
)
from tricycle_accelerators.compiled.tiles import (
    LANES,
    as_left,
    as_right,
    as_right_turned,
    fetch,
    multiply,
    n_steps,
    narrowed_like,
    numbers_of,
    operands_of,
    right_again,
    room,
    turned_like,
    whole_registers,
)

QUERIES, KEYS = 64, 64  # of a block


@numba.njit(inline="always")
def _seen(row: np.ndarray, n_keys: int, end: int, window: int) -> np.ndarray:
    """The part of a row of so many keys before `end` and, where there is a window, in it; the rest becomes 0.

    A loop over the indices of an array, unlike one from start to stop, is known to stay in it: that is what lets the
    compiler take many numbers at a time.
    """
    stop = max(0, min(n_keys, end))
    start = max(0, min(stop, end - window)) if window else 0
    row[:start] = 0
    row[stop:] = 0
    return row[start:stop]


@numba.njit(inline="always")
def _keys_seen(first: int, n_queries: int, n_keys: int, last: int, window: int) -> tuple[int, int]:
    """The first block of keys that any of these queries sees, and the key after the last."""
    stop = min(n_keys, first + n_queries + last)
    start = max(0, first + last + 1 - window) // KEYS if window else 0
    return start, stop


@numba.njit(inline="always")
def whole_blocks(n_keys: int) -> int:
    return (n_keys + KEYS - 1) // KEYS


@numba.njit(**OPTIONS)
def scratch_for(n_inner: int, like: np.ndarray) -> np.ndarray:
    """What `as_right_turned` needs for so many steps."""
    return room(LANES, whole_registers(n_inner), like)


@numba.njit(inline="always")
def block_of(operands: np.ndarray, block: int, scratch: np.ndarray) -> np.ndarray:
    """One of the blocks that `_by_blocks` has written."""
    n_steps = scratch.shape[1]
    return operands[block * n_steps : (block + 1) * n_steps]


@numba.njit(**OPTIONS)
def _fetch_head(x: np.ndarray, h: int, rows: slice) -> None:
    """Ask for some rows of (H, T, D) while others are worked on: those of a head lie far apart. Of no head: nothing."""
    if h < len(x):
        fetch(x[h, rows])


@numba.njit(**OPTIONS)
def _fetch_heads(q: np.ndarray, k: np.ndarray, v: np.ndarray, h: int, rows: slice) -> None:
    """The same of a head of queries and of those of keys and values that it uses."""
    key_head = h // (len(q) // len(k))
    _fetch_head(q, h, rows)
    _fetch_head(k, key_head, rows)
    _fetch_head(v, key_head, rows)


@numba.njit(**OPTIONS)
def _by_blocks(x: np.ndarray, scratch: np.ndarray, out: np.ndarray) -> None:
    """Write the right operands of x^T for rows x (S, D), one for each block of keys, one below the other."""
    n_steps = scratch.shape[1]
    for start in range(0, len(x), KEYS):
        first = start // KEYS * n_steps
        as_right_turned(x[start : start + KEYS], scratch, out[first : first + n_steps])


@numba.njit(fastmath=ANY_ORDER, **OPTIONS)
def _add_exponentials(
    scores: np.ndarray,
    mixed: np.ndarray,
    shifts: np.ndarray,
    totals: np.ndarray,
    scale: float,
    shape: tuple[int, int, int],
    ends: tuple[int, int],
) -> None:
    """Products of queries and some keys to e^(scale score - shift) in place, 0 where hidden.

    Args:
        scores: (T, S). mixed: (T, E), sums of values so far, made smaller where a shift grows.
        shifts, totals: (T,), the shifts, and the sums of exponentials so far.
        shape: how many rows, columns and keys there are; a column without a key is hidden.
        ends: the key after the last that the first query sees; the window, or 0.
    """
    n_rows, n_columns, n_keys = shape
    end, window = ends
    for t in range(n_rows):
        row = _seen(scores[t][:n_columns], n_keys, end + t, window)
        shift = shifts[t]
        for s in range(len(row)):
            shift = larger(shift, row[s] * scale)
        if shift > shifts[t]:
            smaller = exp(shifts[t] - shift) if totals[t] > ZERO else ZERO
            totals[t] *= smaller
            sums = mixed[t]
            for e in range(len(sums)):
                sums[e] *= smaller
            shifts[t] = shift
        total = ZERO
        for s in range(len(row)):
            row[s] = exp(row[s] * scale - shift)
            total += row[s]
        totals[t] += total


def _attend(q, k, v, scale, last, window, nothing, out, logs):  # type: ignore[no-untyped-def]
    """Write the means of values (H, T, E), and the logs (H, T) of the sums that they were divided by.

    Args:
        q: (H, T, D). k: (K, S, D). v: (K, S, E); float32, or the bits of bfloat16.
        nothing: whether a row may attend to nothing: a sum begins with e^0.
    """
    like = operands_of(q)
    n_heads, n_queries, size = q.shape
    n_key_heads, n_keys, value_size = v.shape
    n_sharing = n_heads // n_key_heads
    turned = scratch_for(n_steps(size, like), like)
    keys = room(whole_blocks(n_keys) * turned.shape[1], KEYS, like)
    values = room(n_steps(n_keys, like), whole_registers(value_size), like)
    n_inner = n_steps(size, like)
    queries = room(QUERIES, n_inner, like)
    weights = room(QUERIES, n_steps(KEYS, like), like)
    scores = room(QUERIES, KEYS, logs)
    mixed = room(QUERIES, whole_registers(value_size), logs)
    shifts, totals = np.empty(QUERIES, np.float32), np.empty(QUERIES, np.float32)
    for h in range(n_heads):
        if h % n_sharing == 0:
            _by_blocks(k[h // n_sharing], turned, keys)
            as_right(v[h // n_sharing], values)
        for first in range(0, n_queries, QUERIES):
            n = min(QUERIES, n_queries - first)
            some = slice(first, first + n)
            _fetch_heads(q, k, v, h + 1, some)
            as_left(q[h, some], queries)
            mixed[:] = ZERO
            shifts[:] = ZERO if nothing else -np.inf
            totals[:] = ONE if nothing else ZERO
            start, stop = _keys_seen(first, n, n_keys, last, window)
            for block in range(start, whole_blocks(stop)):
                place = block * KEYS
                n_seen = min(KEYS, stop - place)
                columns = whole_registers(n_seen)
                multiply(queries, block_of(keys, block, turned)[:n_inner], scores[:, :columns], False)
                ends = first + last + 1 - place, window
                _add_exponentials(scores, mixed, shifts, totals, scale, (n, columns, n_seen), ends)
                left = narrowed_like(scores, weights)
                begin = n_steps(place, like)
                multiply(left, values[begin : begin + n_steps(n_seen, like)], mixed, True)
            for t in range(n):
                share = ONE / totals[t]
                row, new = mixed[t], at(out[h], first + t)
                for e in range(len(new)):
                    new[e] = rounded_for(new, row[e] * share)
                logs[h, first + t] = np.float32(shifts[t] + math.log(totals[t]))


@numba.njit(fastmath=ANY_ORDER, **OPTIONS)
def _differentiate(
    scores: np.ndarray,
    slopes: np.ndarray,
    logs: np.ndarray,
    inner: np.ndarray,
    scale: float,
    shape: tuple[int, int, int],
    ends: tuple[int, int],
) -> None:
    """In place: products of queries and keys to weights, and the gradients of weights to those of the products.

    Args:
        scores, slopes: (T, S). logs, inner: (T,), of `_attend`, and the products of results and their gradients.
        shape, ends: as of `_add_exponentials`.
    """
    n_rows, n_columns, n_keys = shape
    end, window = ends
    for t in range(n_rows):
        row = _seen(scores[t][:n_columns], n_keys, end + t, window)
        slope = _seen(slopes[t][:n_columns], n_keys, end + t, window)
        log, mean = logs[t], inner[t]
        for s in range(len(row)):
            weight = exp(row[s] * scale - log)
            row[s] = weight
            slope[s] = weight * (slope[s] - mean) * scale


@numba.njit(fastmath=ANY_ORDER, **OPTIONS)
def _inner(grads, out, sums):  # type: ignore[no-untyped-def]
    """Write the sums of products of rows (T, E): of gradients as products take them, so that what is equal cancels."""
    numbers = numbers_of(grads)
    for t in range(len(out)):
        row, a = at(out, t), at(numbers, t)
        total = ZERO
        for e in range(len(row)):
            total += number_of(a[e]) * number_of(row[e])
        sums[t] = total


@numba.njit(**OPTIONS)
def _write(rows: np.ndarray, out: np.ndarray) -> None:
    for t in range(len(out)):
        row, new = at(rows, t), at(out, t)
        for d in range(len(new)):
            new[d] = rounded_for(new, row[d])


@numba.njit(**OPTIONS)
def _room_for_keys(n_keys, size, scratch, like):  # type: ignore[no-untyped-def]
    """For right operands of keys, or values, turned block by block; and for sums of their gradients."""
    n_blocks = whole_blocks(n_keys)
    return room(n_blocks * scratch.shape[1], KEYS, like), np.zeros((n_blocks * KEYS, whole_registers(size)), np.float32)


@numba.njit(**OPTIONS)
def _room_for_queries(size, like):  # type: ignore[no-untyped-def]
    """For queries, or gradients of their results, as a left operand and as a right one."""
    left = room(QUERIES, whole_registers(n_steps(size, like)), like)
    return left, room(n_steps(QUERIES, like), whole_registers(size), like)


def _attend_back(grad, q, k, v, out, logs, scale, last, window, dq, dk, dv):  # type: ignore[no-untyped-def]
    """Write the gradients of queries, keys and values.

    Args:
        grad, out: (H, T, E), the latter of `_attend`, as is logs; the others as of `_attend`.
        dq, dk, dv: like q, k and v.
    """
    like, (n_heads, n_queries, size), (n_key_heads, n_keys, value_size) = operands_of(q), q.shape, v.shape
    n_sharing, n_inner, n_inner_values = n_heads // n_key_heads, n_steps(size, like), n_steps(value_size, like)
    turned, turned_values = scratch_for(n_inner, like), scratch_for(n_inner_values, like)
    keys, d_keys = _room_for_keys(n_keys, size, turned, like)
    values, d_values = _room_for_keys(n_keys, value_size, turned_values, like)
    key_rows = room(n_steps(n_keys, like), whole_registers(size), like)
    queries, query_rows = _room_for_queries(size, like)
    grads, grad_rows = _room_for_queries(value_size, like)
    scores, slopes, d_query = room(QUERIES, KEYS, logs), room(QUERIES, KEYS, logs), np.zeros_like(d_keys[:QUERIES])
    left, left_too = room(n_steps(QUERIES, like), KEYS, like), room(QUERIES, n_steps(KEYS, like), like)
    inner = np.empty(QUERIES, np.float32)
    for h in range(n_heads):
        if h % n_sharing == 0:
            _by_blocks(k[h // n_sharing], turned, keys)
            _by_blocks(v[h // n_sharing], turned_values, values)
            as_right(k[h // n_sharing], key_rows)
            d_keys[:] = ZERO
            d_values[:] = ZERO
        for first in range(0, n_queries, QUERIES):
            some = slice(first, min(n_queries, first + QUERIES))
            n = some.stop - first
            _fetch_heads(q, k, v, h + 1, some)
            _fetch_head(grad, h + 1, some)
            _fetch_head(out, h + 1, some)
            as_left(q[h, some], queries)
            as_left(grad[h, some], grads)
            queries_right = right_again(queries, (n, size), query_rows)[: n_steps(n, like)]
            grads_right = right_again(grads, (n, value_size), grad_rows)[: n_steps(n, like)]
            _inner(grads, out[h, some], inner)
            d_query[:] = ZERO
            start, stop = _keys_seen(first, n, n_keys, last, window)
            for block in range(start, whole_blocks(stop)):
                place, n_seen = block * KEYS, min(KEYS, stop - block * KEYS)
                columns = whole_registers(n_seen)
                seen = slice(place, place + columns)
                multiply(queries, block_of(keys, block, turned)[:n_inner], scores[:, :columns], False)
                multiply(grads, block_of(values, block, turned_values)[:n_inner_values], slopes[:, :columns], False)
                shape, ends = (n, columns, n_seen), (first + last + 1 - place, window)
                _differentiate(scores, slopes, logs[h, some], inner, scale, shape, ends)
                multiply(turned_like(scores, n, left)[:columns], grads_right, d_values[seen], True)
                multiply(turned_like(slopes, n, left)[:columns], queries_right, d_keys[seen], True)
                below = slice(n_steps(place, like), n_steps(place + n_seen, like))
                multiply(narrowed_like(slopes, left_too), key_rows[below], d_query, True)
            _write(d_query[:n, :size], dq[h, some])
        if (h + 1) % n_sharing == 0:
            _write(d_keys[:n_keys, :size], dk[h // n_sharing])
            _write(d_values[:n_keys, :value_size], dv[h // n_sharing])


# -------------------------------------------------------------------- compiled where they are asked for
# By themselves for each kind: that takes seconds, and nobody needs all of them.
def _heads(narrow: bool) -> str:
    return "u2[:, :, :]" if narrow else "f4[:, :, :]"


@cache
def attend(narrow: bool, narrow_results: bool) -> Any:
    """`_attend` for operands and for results of bfloat16, or of float32."""
    x, y = _heads(narrow), _heads(narrow_results)
    return compiled(f"void({x}, {x}, {x}, f4, i8, i8, b1, {y}, f4[:, :])")(_attend)


@cache
def attend_back(narrow: bool, narrow_results: bool) -> Any:
    """`_attend_back` for operands, and for results and all gradients, of bfloat16 or of float32."""
    x, y = _heads(narrow), _heads(narrow_results)
    return compiled(f"void({y}, {x}, {x}, {x}, {y}, f4[:, :], f4, i8, i8, {y}, {y}, {y})")(_attend_back)
