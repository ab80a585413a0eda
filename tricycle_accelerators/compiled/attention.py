"""Attention kernels by Numba: each thread calls the loops of `attention_loops` for some heads of one batch item."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tricycle.kernels import FEW_ROWS, ScoreOptions
from tricycle.kernels.dispatch import is_16_bit, upcast
from tricycle.kernels.quantized_heads import QuantizedHeads
from tricycle.kernels.ranges import queries_with_keys
from tricycle_accelerators import buffers, threads
from tricycle_accelerators.attention_blocks import HeadGroup, head_major, make_head_groups
from tricycle_accelerators.compiled import amx_matmul
from tricycle_accelerators.compiled.elementwise import FLOAT32, float16_decline_reason
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.compiled.vector_matmul import spin_team
from tricycle_accelerators.providers import decline_when

LEAST_QUERIES = 16
LEAST_KEYS_OF_PARTS = 1024  # from which on products of float32 by AMX gain more than splitting the operands costs
MASK_OR_CAP = "a mask or a soft-cap"
INT8 = np.dtype(np.int8)
MIN_SHARED_BYTES = 2**19  # of keys: for fewer, threads gain more by prefetching the next matrix meanwhile


def _many_decline_reason(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, score_options: ScoreOptions, mask: np.ndarray | None
) -> str | None:
    """Return why the loops cannot run (mask, soft-cap, few queries, scale <= 0, dtypes, unseen keys), or None."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    if mask is not None or score_options.softcap is not None:
        return MASK_OR_CAP
    if n_queries < LEAST_QUERIES or not v.size or not q.size:
        return f"fewer than {LEAST_QUERIES} queries, or no keys or heads"
    if not score_options.scale > 0:
        return f"a scale above 0, got {score_options.scale}"
    if not q.dtype == k.dtype == v.dtype or not (q.dtype == np.float32 or is_16_bit(q)):
        return f"one dtype, float32 or of 16 bits, got {q.dtype}, {k.dtype} and {v.dtype}"
    if q.dtype.name == "bfloat16" and (why := amx_matmul.pairs_unavailable_reason()):
        return why
    if queries_with_keys(score_options, n_queries, n_keys) != slice(0, n_queries):
        return "queries that see no key"
    return None


def _few_decline_reason(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, score_options: ScoreOptions, mask: np.ndarray | None, dtype: Any
) -> str | None:
    """Return why the decoding loops cannot attend with the last queries of one text to its cache, or None.

    The caller has seen that they are at most FEW_ROWS.
    """
    n_items, n_queries, n_keys = *q.shape[:2], k.shape[1]
    if mask is not None or score_options.softcap is not None:
        return MASK_OR_CAP
    if n_items != 1 or not n_queries:
        return f"few queries of one text alone, got {n_queries} of {n_items}"
    if score_options.offset is not None and not score_options.offset == n_keys - n_queries >= 0:
        return "few queries that are not at the last keys"
    if (dtype is not None and dtype != FLOAT32) or q.dtype != FLOAT32:
        return f"few queries and their results of float32, got {q.dtype} and {dtype or q.dtype}"
    kept = k.dtype
    if v.dtype != kept or not (kept == FLOAT32 or is_16_bit(k)):
        return f"keys and values of one dtype, float32 or of 16 bits, got {kept} and {v.dtype}"
    if (why := float16_decline_reason(kept)) is not None:
        return why
    if v.shape != k.shape or not k.size:
        return f"keys and values of one size, got {k.shape} and {v.shape}"
    if not (q[0, 0].flags.carray and k[0].flags.carray and v[0].flags.carray):
        return "few queries, keys and values, each in one piece, aligned and not read-only"
    return None


def _attend_few(q: np.ndarray, k: Any, v: Any, score_options: ScoreOptions, off_by_one: bool) -> Any:
    """Return output and logsumexp of texts' few queries, one at a time, so that batching changes no result."""
    seen = [_visible_keys(score_options, t, k.shape[1]) for t in range(q.shape[1])]
    cached = [(k[i, part], v[i, part]) for i in range(len(q)) for part in seen]
    out, logsumexp = _attend_each(q.reshape(-1, *q.shape[2:]), cached, score_options.scale, off_by_one)
    return out.reshape(q.shape), logsumexp.reshape(q.shape[:3]).swapaxes(1, 2)


def _attend_each(q: np.ndarray, cached: Sequence[tuple[Any, Any]], scale: float, off_by_one: bool) -> Any:
    """Return output (N, H, D) and logsumexp (N, H) of queries, each with its own cache; share large caches.

    Args:
        q: (N, H, D), each query in one piece.
        cached: keys and values (S, K, D) of each query, arrays or QuantizedHeads, all of one dtype and size.
    """
    loops, team = load_loops("decode_loops"), spin_team()
    like, queries = cached[0][0], q.ctypes.data
    rows = []
    for n, (keys, values) in enumerate(cached):
        scales = (0, 0)
        if isinstance(keys, QuantizedHeads):
            scales = keys.scales.ctypes.data, values.scales.ctypes.data
            keys, values = keys.values, values.values
        rows.append((queries + n * q.strides[0], keys.ctypes.data, values.ctypes.data, *scales, len(keys), 0))
    numbers = loops.KINDS[like.dtype.name]
    n_blocks = like.scales.shape[2] if isinstance(like, QuantizedHeads) else 0
    out, logsumexp = np.empty(q.shape, np.float32), np.empty(q.shape[:2], np.float32)
    settings = np.array(rows, np.int64), like.shape[1], n_blocks, numbers, scale, off_by_one
    job = partial(loops.decode_attention, *settings, out, logsumexp, loops.attend_to_units.address)
    if sum(keys.nbytes for keys, _ in cached) < MIN_SHARED_BYTES:
        job(team.memory.mailbox, 1)
    else:
        team.run(job)
    return out, logsumexp


def _visible_keys(score_options: ScoreOptions, t: int, n_keys: int) -> slice:
    """Return the slice of the cached keys that query t sees under the causal offset and the window."""
    stop = n_keys if score_options.offset is None else score_options.offset + t + 1
    return slice(0 if score_options.window is None else max(0, stop - score_options.window), stop)


def _quantized_decline_reason(
    q: np.ndarray, k: QuantizedHeads, v: QuantizedHeads, score_options: ScoreOptions, off_by_one: bool
) -> str | None:
    """Return why the loop cannot run: soft-cap, not 1 to FEW_ROWS last queries, shapes, dtypes, memory; else None."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    if score_options.softcap is not None:
        return MASK_OR_CAP
    if not 0 < n_queries <= min(FEW_ROWS, n_keys) or score_options.offset != n_keys - n_queries:
        return f"1 to {FEW_ROWS} queries at the last keys, got {n_queries} and {score_options}"
    fits = q.shape[::3] == k.shape[::3] and v.shape == k.shape and k.values.size and q.shape[2] % k.shape[2] == 0
    if q.dtype != FLOAT32 or not fits:
        return f"float32 queries, and keys and values that fit, got {q.dtype} {q.shape}, {k.shape} and {v.shape}"
    parts = k.values, k.scales, v.values, v.scales
    if not all(item.flags.carray for part in parts for item in part):
        return "keys and values in one piece, aligned and not read-only"
    return None


@decline_when(_quantized_decline_reason)
def quantized_attention(
    q: np.ndarray, k: QuantizedHeads, v: QuantizedHeads, score_options: ScoreOptions, off_by_one: bool
) -> Any:
    """Return attention (B, T, H, D) of a few queries to an int8 cache, converting some keys and values at a time."""
    return _attend_few(np.ascontiguousarray(q), k, v, score_options, off_by_one)[0]


def _ragged_decline_reason(
    q: np.ndarray, keys: Sequence[Any], values: Sequence[Any], score_options: ScoreOptions, off_by_one: bool
) -> str | None:
    """Return why the loops cannot run: soft-cap, shapes, dtypes, memory of queries or of caches; else None."""
    if score_options.softcap is not None:
        return MASK_OR_CAP
    first, held = keys[0], [*keys, *values]
    kind, heads = first.dtype, first.shape[2:]
    is_known = kind == INT8 if isinstance(first, QuantizedHeads) else kind == FLOAT32 or is_16_bit(first)
    if not is_known or any(x.dtype != kind or x.shape[2:] != heads for x in held):
        return "keys and values of one size and dtype, float32, of 16 bits or quantized"
    if (why := float16_decline_reason(kind)) is not None:
        return why
    if q.dtype != FLOAT32 or q.shape[2] != heads[1] or q.shape[1] % heads[0] or not q[0].flags.carray:
        return f"float32 queries in one piece each that fit the keys, got {q.dtype} {q.shape} and {first.shape}"
    arrays = [part for x in held for part in (x.values, x.scales)] if isinstance(first, QuantizedHeads) else held
    is_whole = all(x.flags.carray and x.size for x in arrays)
    if not is_whole or any(k.shape != v.shape for k, v in zip(keys, values)):
        return "as many keys as values, one or more, each in one piece, aligned and not read-only"
    return None


@decline_when(_ragged_decline_reason)
def ragged_attention(
    q: np.ndarray, keys: Sequence[Any], values: Sequence[Any], score_options: ScoreOptions, off_by_one: bool
) -> Any:
    """Return attention (N, H, D) of N queries to the last keys of their texts, in one job for all threads."""
    seen = slice(None if score_options.window is None else -score_options.window, None)
    cached = [(k[0, seen], v[0, seen]) for k, v in zip(keys, values)]
    return _attend_each(q, cached, score_options.scale, off_by_one)[0]


def _prepared(arrays: tuple[np.ndarray, ...], narrow: bool) -> tuple[np.ndarray, ...]:
    """Return arrays as bfloat16 bits if `narrow`, else float32; copied unless aligned, writable, rows contiguous."""
    arrays = tuple(array.view(np.uint16) if narrow else upcast(array) for array in arrays)
    return tuple(array if _have_contiguous_rows(array) else array.copy() for array in arrays)


def _have_contiguous_rows(*arrays: np.ndarray) -> bool:
    """Return whether arrays are aligned, writable, and contiguous along the last axis."""
    return all(array.flags.behaved and array.strides[-1] == array.itemsize for array in arrays)


def _settings(score_options: ScoreOptions, n_queries: int, n_keys: int) -> tuple[float, int, int]:
    """Return scale, last key that query 0 sees (n_keys if all), window (0 if none, not causal or it hides nothing).

    A window that reaches from the last query back to key 0 hides nothing and counts as none. A smaller one counts even
    if it exceeds the number of keys, because the queries may be positioned behind the last key.
    """
    if score_options.offset is None:
        return score_options.scale, n_keys, 0
    window = score_options.window or 0
    return score_options.scale, score_options.offset, window if window < n_queries + score_options.offset else 0


def _attention_decline_reason(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score_options: ScoreOptions,
    off_by_one: bool,
    mask: np.ndarray | None = None,
    dtype: Any = None,
) -> str | None:
    """Return why neither the loops for few queries nor those for many can run, or None if one of them can."""
    if q.shape[1] > FEW_ROWS:
        return _many_decline_reason(q, k, v, score_options, mask)
    why = _few_decline_reason(q, k, v, score_options, mask, dtype)
    return why if why is None or q.shape[1] < LEAST_QUERIES else _many_decline_reason(q, k, v, score_options, mask)


@decline_when(_attention_decline_reason)
def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score_options: ScoreOptions,
    off_by_one: bool,
    mask: np.ndarray | None = None,
    dtype: Any = None,
) -> Any:
    """Return output (B, T, H, D) and float32 logsumexp (B, H, T) by Numba; NotImplemented for a mask or soft-cap."""
    n_queries = q.shape[1]
    if n_queries < LEAST_QUERIES or (
        n_queries <= FEW_ROWS and not _few_decline_reason(q, k, v, score_options, mask, dtype)
    ):
        return _attend_few(q, k, v, score_options, off_by_one)
    dtype = dtype or q.dtype
    narrow = q.dtype.name == "bfloat16"
    narrow_results = narrow and dtype == q.dtype
    out = buffers.empty((*q.shape[:3], v.shape[3]), dtype if narrow_results else np.float32)
    logsumexp = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    totals = np.empty_like(logsumexp)
    settings = _settings(score_options, q.shape[1], k.shape[1])
    groups, _ = make_head_groups(q, k)
    q, k, v = _prepared((q, k, v), narrow)
    (means,) = _prepared((out,), narrow_results)

    def work(group: HeadGroup) -> None:
        item, heads, key_heads = group
        arguments = (
            head_major(q, item, heads),
            head_major(k, item, key_heads),
            head_major(v, item, key_heads),
            *settings,
            off_by_one,
            head_major(means, item, heads),
            logsumexp[item, heads],
            totals[item, heads],
        )
        _run("compile_attention", arguments, narrow, narrow_results, (k.shape[1], q.shape[3], v.shape[3]))

    threads.parallel_for(work, groups, calls_blas=False)
    with np.errstate(all="ignore"):  # of infinity and NaN, which come from outside
        logsumexp += np.log(totals, out=totals)
    return out.astype(dtype, copy=False), logsumexp


def _attention_backward_decline_reason(
    grad: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    logsumexp: np.ndarray,
    score_options: ScoreOptions,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    mask: np.ndarray | None = None,
) -> str | None:
    """Return why the loops cannot run: as for many queries, or dtypes or memory of gradients do not fit; else None."""
    if logsumexp.dtype != np.float32:
        return f"logs of sums of float32, got {logsumexp.dtype}"
    why = _many_decline_reason(q, k, v, score_options, mask)
    if why is not None:
        return why
    dtype = dk.dtype
    if not (dtype == np.float32 or (dtype == q.dtype and dtype.name == "bfloat16")):
        return f"gradients of float32, or with all else of bfloat16, got {dtype} for {q.dtype}"
    if any(array.dtype != dtype for array in (grad, out, dq, dv)):
        return f"results and gradients of one dtype, here {dtype}"
    return None if _have_contiguous_rows(dq, dk, dv) else "places for gradients in one piece, aligned and not read-only"


@decline_when(_attention_backward_decline_reason)
def attention_backward(
    grad: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    logsumexp: np.ndarray,
    score_options: ScoreOptions,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    mask: np.ndarray | None = None,
) -> Any:
    """Write the attention gradients into dq, dk, dv by Numba; NotImplemented for a mask, soft-cap or few queries."""
    dtype = dk.dtype
    narrow = q.dtype.name == "bfloat16"
    narrow_results = narrow and dtype == q.dtype
    settings = _settings(score_options, q.shape[1], k.shape[1])
    groups, in_parts = make_head_groups(q, k)
    sums: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of groups, for keys and values
    q, k, v = _prepared((q, k, v), narrow)
    grad, out, dq, dk, dv = _prepared((grad, out, dq, dk, dv), narrow_results)
    (logsumexp,) = _prepared((logsumexp,), False)

    def work(i: int) -> None:
        item, heads, key_heads = groups[i]
        keys, values = head_major(k, item, key_heads), head_major(v, item, key_heads)
        if in_parts:
            new_keys, new_values = np.empty(keys.shape, dk.dtype), np.empty(values.shape, dk.dtype)
            sums[i] = new_keys, new_values
        else:
            new_keys, new_values = head_major(dk, item, key_heads), head_major(dv, item, key_heads)
        arguments = (
            head_major(grad, item, heads),
            head_major(q, item, heads),
            keys,
            values,
            head_major(out, item, heads),
            logsumexp[item, heads],
            *settings,
            head_major(dq, item, heads),
            new_keys,
            new_values,
        )
        _run("compile_attention_backward", arguments, narrow, narrow_results, (k.shape[1], q.shape[3], v.shape[3]))

    threads.parallel_for(work, range(len(groups)), calls_blas=False)
    if in_parts:
        _add_parts(groups, sums, dk.view(dtype), dv.view(dtype))
    return None


def _run(
    name: str, arguments: tuple[Any, ...], narrow: bool, narrow_results: bool, sizes: tuple[int, int, int]
) -> None:
    """Call a loop of `attention_loops`, once more if parts of float32 gave a result that is not finite.

    Args:
        name: of the function that compiles it.
        sizes: S, D and E: keys, and numbers of a query and of a value.
    """
    loops = load_loops("attention_loops")
    memory = buffers.empty((-(-loops.memory_bytes(*sizes) // 8),), np.int64)  # in large pages where it has a megabyte
    for dtype in operand_dtypes(narrow, sizes[0]):
        loop = getattr(loops, name)(dtype, narrow, narrow_results)
        if loop(*arguments, np.zeros(1, dtype), memory):
            return


def operand_dtypes(narrow: bool, n_keys: int) -> list[str]:
    """Return dtypes of operands of products in the order in which they are tried, the last for all numbers.

    They are "u4" for pairs of bfloat16, "i4" for parts of float32, by AMX alone, which infinity does not have, and
    "f4" for float32, to which bfloat16 are converted where their pairs are not multiplied fast.
    """
    if narrow:
        return ["u4" if load_loops("tiles").HAS_PAIRS else "f4"]
    return ["f4"] if n_keys < LEAST_KEYS_OF_PARTS or amx_matmul.unavailable_reason() else ["i4", "f4"]


def _add_parts(
    groups: list[HeadGroup], sums: dict[int, tuple[np.ndarray, np.ndarray]], dk: np.ndarray, dv: np.ndarray
) -> None:
    """Overwrite dk and dv with sums of the groups' key and value gradients, in group order and in float32."""
    for place, which in ((dk, 0), (dv, 1)):
        total = np.zeros(place.shape, np.float32)
        for i, group in enumerate(groups):
            head_major(total, group.item, group.key_heads)[...] += upcast(sums[i][which].view(place.dtype))
        place[...] = total
