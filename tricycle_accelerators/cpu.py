"""Faster versions for NumPy arrays: the same names and results as in `reference.py`.

Four ideas do the work. Elementwise chains go through memory in pieces that stay in a core's cache, with results
written into place. Threads share the pieces, the heads and the rows of matrix products; sums over pieces are added
up in order, so results do not change from run to run. Sums along rows are products with ones, which BLAS does at
the speed of memory. And exponentials are not shifted by each row's maximum where one look at a whole block says that
nothing can overflow or vanish.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from functools import cache, cached_property, wraps
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from tricycle.backend import all_at_work, blas_libraries, n_threads, parallel
from tricycle.kernels import reference
from tricycle.kernels.reference import SQRT_2_OVER_PI

PIECE = 262_144  # elements: a few such arrays stay in a third-level cache, and threads seldom meet at Python's lock
QUERY_BLOCK, KEY_BLOCK = 128, 1024
SHORT = 1600  # scores of a head: with fewer, calls for each item cost more than going through memory again
SMALL_PRODUCT = 2**18  # multiplications below which a matrix product is not worth sharing
SAFE_EXPONENT = 50.0  # e^50 and e^-50, and sums of a hundred million such, are far from the ends of float32
MOST = math.exp(SAFE_EXPONENT)


def _pieces(n_rows: int, row_size: int = 1) -> list[slice]:
    step = max(1, PIECE // max(1, row_size))
    return [slice(start, start + step) for start in range(0, n_rows, step)]


def _parts(n_rows: int, least: int) -> list[slice]:
    """Two even parts a thread where they have at least that many rows, else one."""
    n_parts = n_threads() * (2 if n_rows >= 2 * n_threads() * least else 1)
    step = max(1, -(-n_rows // n_parts // 16) * 16)  # BLAS likes even blocks
    return [slice(start, start + step) for start in range(0, n_rows, step)]


def _sum_over(work: Callable[[slice], Any], pieces: list[slice]) -> Any:
    """The sum of what `work` gives for each piece, added up in order, so that it is the same in every run."""
    results: list = [None] * len(pieces)

    def keep(i: int) -> None:
        results[i] = work(pieces[i])

    parallel(keep, range(len(pieces)))
    total = results[0]
    for result in results[1:]:
        total += result
    return total


def _safe_exponent(dtype: np.dtype) -> float:
    """Below it no exponential needs a shift; 16-bit floats reach so little that theirs always do."""
    return SAFE_EXPONENT if dtype.itemsize >= 4 else -math.inf


def _ones(n: int, like: np.ndarray) -> np.ndarray:
    return np.ones(n, like.dtype)


@cache
def onednn() -> tuple[ModuleType | None, str | None]:
    """The kernels that oneDNN makes faster, or why it cannot be used."""
    try:
        from tricycle_accelerators import onednn, onednn_kernels
    except ImportError as error:
        return None, str(error)
    problem = onednn.problem()
    return None if problem else onednn_kernels, problem


def _or_faster(kernel: Callable) -> Callable:
    """oneDNN's kernel of that name, where there is one and it does not answer NotImplemented."""

    @wraps(kernel)
    def run(*arguments: Any) -> Any:
        faster = getattr(onednn()[0], kernel.__name__, None)
        result = faster(*arguments) if faster else NotImplemented
        return kernel(*arguments) if result is NotImplemented else result

    return run


# -------------------------------------------------------------------- matrices
@_or_faster
def operand(x, precision):
    if precision in ("bfloat16", "float16"):
        _say_why(precision)
    return x


@_or_faster
def operand_and_sums(x, precision):
    return operand(x, precision), sum_rows(x)


@cache
def _say_why(precision: str) -> None:
    why = onednn()[1] if precision == "bfloat16" else "a CPU's 16 bits are bfloat16"
    warnings.warn(f"precision {precision}: products are made in float32 here: {why}", stacklevel=2)


@_or_faster
def matmul(a, b, bias=None, out=None, dtype=None, precision="float32"):
    """Threads take some rows or some columns of the result each, or some of the terms that it sums."""
    (n_rows, n_inner), n_columns = a.shape, b.shape[1]
    few = n_rows * n_inner * n_columns < SMALL_PRODUCT
    if few or min(a.itemsize, b.itemsize) == 2 or not blas_libraries() or all_at_work():
        return reference.matmul(a, b, bias, out, dtype)
    if n_inner >= 2 * max(n_rows, n_columns) and out is None:
        terms = _parts(n_inner, n_inner)  # one part a thread, for each has a sum of its own to hold
        return _sum_over(lambda part: a[:, part] @ b[part], terms) + (0 if bias is None else bias)
    out = np.empty((n_rows, n_columns), np.result_type(a, b)) if out is None else out

    def rows(part: slice) -> None:
        np.matmul(a[part], b, out=out[part])
        if bias is not None:
            out[part] += bias

    def columns(part: slice) -> None:
        np.matmul(a, b[:, part], out=out[:, part])
        if bias is not None:
            out[:, part] += bias[part]

    if n_rows >= n_columns:
        parallel(rows, _parts(n_rows, 512))
    else:
        parallel(columns, _parts(n_columns, 512))
    return out


def sum_rows(x):
    if not len(x):
        return reference.sum_rows(x)
    return _sum_over(lambda piece: _ones(len(x[piece]), x) @ x[piece], _pieces(*x.shape))


# -------------------------------------------------------------------- elementwise
@_or_faster
def gelu(x):
    return _gelu(x, None)


@_or_faster
def gelu_with_slope(x):
    slope = np.empty(x.shape, x.dtype)
    return _gelu(x, slope), slope


@_or_faster
def gelu_backward(grad, x, slope):
    if slope is None:
        slope = np.empty(x.shape, x.dtype)
        _gelu(x, slope)
    return multiply(grad, slope)


def _gelu(x: np.ndarray, slope: np.ndarray | None) -> np.ndarray:
    flat = np.ascontiguousarray(x).reshape(-1)
    y = np.empty_like(flat)
    slopes = None if slope is None else slope.reshape(-1)

    def work(piece: slice) -> None:
        a, out = flat[piece], y[piece]
        square = a * a
        gate = square * (0.044715 * SQRT_2_OVER_PI)
        gate += SQRT_2_OVER_PI
        gate *= a
        np.tanh(gate, out=gate)
        gate *= 0.5
        gate += 0.5
        np.multiply(a, gate, out=out)
        if slopes is not None:  # gate (1 + (1 - gate) u'), where tanh(u / 2) gave the gate
            square *= 6 * 0.044715 * SQRT_2_OVER_PI
            square += 2 * SQRT_2_OVER_PI
            square *= a
            rest = np.subtract(1, gate, out=slopes[piece])
            rest *= square
            rest += 1
            rest *= gate

    parallel(work, _pieces(flat.size))
    return y.reshape(x.shape)


def relu_squared(x):
    flat = np.ascontiguousarray(x).reshape(-1)
    y, slope = np.empty_like(flat), np.empty_like(flat)

    def work(piece: slice) -> None:
        positive = np.maximum(flat[piece], 0, out=slope[piece])
        np.multiply(positive, positive, out=y[piece])
        positive *= 2

    parallel(work, _pieces(flat.size))
    return y.reshape(x.shape), slope.reshape(x.shape)


@_or_faster
def orthogonalise(x, precision="float32"):
    """A matrix for each thread at a time."""
    found = np.empty_like(x)

    def work(i: int) -> None:
        found[i] = reference.orthogonalise(x[i : i + 1])[0]

    parallel(work, range(len(x)))
    return found


def each(like, calls):
    parallel(lambda call: call(), calls)


def multiply(a, b):
    """Large arrays go through memory once, by all threads."""
    if a.size < 2 * PIECE or a.shape != b.shape or not (a.flags.c_contiguous and b.flags.c_contiguous):
        return reference.multiply(a, b)
    out = np.empty(a.shape, np.result_type(a, b))
    flat_a, flat_b, flat_out = (array.reshape(-1) for array in (a, b, out))
    parallel(lambda piece: np.multiply(flat_a[piece], flat_b[piece], out=flat_out[piece]), _pieces(a.size))
    return out


# -------------------------------------------------------------------- normalisation
@_or_faster
def layer_norm(x, gain, bias, eps, centred):
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    y = np.empty_like(rows)
    mean, scale = np.zeros((len(rows), 1), x.dtype), np.empty((len(rows), 1), x.dtype)
    average = _ones(rows.shape[1], x) / max(1, rows.shape[1])

    def work(piece: slice) -> None:
        out, spread = y[piece], scale[piece, 0]
        if centred:
            np.matmul(rows[piece], average, out=mean[piece, 0])
            np.subtract(rows[piece], mean[piece], out=out)
        else:
            out[...] = rows[piece]
        np.vecdot(out, out, out=spread)
        spread /= rows.shape[1]
        spread += eps
        np.sqrt(spread, out=spread)
        np.divide(1, spread, out=spread)
        out *= scale[piece]
        out *= gain
        if bias is not None:
            out += bias

    parallel(work, _pieces(*rows.shape))
    statistics = (*x.shape[:-1], 1)
    return y.reshape(x.shape), mean.reshape(statistics), scale.reshape(statistics)


@_or_faster
def layer_norm_backward(grad, x, gain, mean, scale, centred):
    if not x.size:
        return reference.layer_norm_backward(grad, x, gain, mean, scale, centred)
    rows, row_grads = (np.ascontiguousarray(a).reshape(-1, x.shape[-1]) for a in (x, grad))
    mean, scale = mean.reshape(-1, 1), scale.reshape(-1, 1)
    dx = np.empty_like(rows)
    average = _ones(rows.shape[1], x) / max(1, rows.shape[1])

    def work(piece: slice) -> np.ndarray:
        out, spread = dx[piece], scale[piece]
        difference = rows[piece] - mean[piece] if centred else rows[piece].copy()
        dbias = _ones(len(out), x) @ row_grads[piece]
        np.multiply(row_grads[piece], difference, out=out)
        dgain = spread[:, 0] @ out
        np.multiply(row_grads[piece], gain, out=out)
        difference *= np.vecdot(out, difference)[:, None] * spread * spread / rows.shape[1]
        if centred:
            out -= (out @ average)[:, None]
        out -= difference
        out *= spread
        return np.stack([dgain, dbias])

    dgain, dbias = _sum_over(work, _pieces(*rows.shape))
    return dx.reshape(x.shape), dgain, dbias


# -------------------------------------------------------------------- tables and losses
def embedding_backward(grad: np.ndarray, ids: np.ndarray, n_rows: int) -> np.ndarray:
    """Rows of one id stand together after a sort, and are summed in one run (`np.add.at` takes them singly)."""
    table = np.zeros((n_rows, grad.shape[-1]), grad.dtype)
    if ids.size:
        order = np.argsort(ids, kind="stable")
        present, starts = np.unique(ids[order], return_index=True)

        def columns(part: slice) -> None:
            table[present, part] = np.add.reduceat(grad[order, part], starts, axis=0)

        parallel(columns, _parts(grad.shape[1], 64))
    return table


def cross_entropy(logits, labels, weights, smoothing=0.0):
    work = lambda piece: _cross_entropy(logits, labels, weights, smoothing, piece, None)
    return _sum_over(work, _pieces(*logits.shape))


def cross_entropy_with_slope(logits, labels, weights, smoothing=0.0):
    slope = np.empty(logits.shape, logits.dtype)
    work = lambda piece: _cross_entropy(logits, labels, weights, smoothing, piece, slope[piece])
    return _sum_over(work, _pieces(*logits.shape)), slope


def _cross_entropy(logits, labels, weights, smoothing, piece: slice, slope: np.ndarray | None) -> np.ndarray:
    """The sum for the rows of one piece, whose gradient overwrites the exponentials."""
    rows, labels, weights = logits[piece], labels[piece], weights[piece]
    shift, ones = np.zeros((len(rows), 1), rows.dtype), _ones(rows.shape[1], rows)
    exponentials, total = slope, None
    if rows.max() < _safe_exponent(rows.dtype):
        exponentials = np.exp(rows, out=slope)
        total = exponentials @ ones
    if total is None or not total.min() > 1 / MOST:
        shift = rows.max(axis=1, keepdims=True)
        exponentials = np.subtract(rows, shift, out=slope)
        np.exp(exponentials, out=exponentials)
        total = exponentials @ ones
    places = np.arange(len(rows)), labels
    # where, for a row that does not count may cost infinitely much, and 0 times that is not 0
    truth = rows[places] if not smoothing else (1 - smoothing) * rows[places] + smoothing * rows.mean(axis=1)
    costs = np.where(weights == 0, 0, shift[:, 0] + np.log(total) - truth)
    if slope is not None:
        slope *= (weights / total)[:, None]
        if smoothing:
            slope -= (weights * (smoothing / rows.shape[1]))[:, None]
        slope[places] -= weights * (1 - smoothing)
    return np.asarray((costs * weights).sum())


# -------------------------------------------------------------------- attention
def _small(q: np.ndarray, k: np.ndarray, offset: int | None) -> bool:
    """Whether one batched product over all scores is as good (or some query sees no key, which is rare)."""
    n_items, n_queries, n_heads, _ = q.shape
    few = n_queries < 16 and n_items * n_heads * n_queries * k.shape[1] < PIECE // 8
    return few or not q.size or (offset is not None and offset < 0)


def _some_items(q: np.ndarray, k: np.ndarray, mask: np.ndarray | None, work: Callable) -> None:
    """work(items, their mask) for short sequences, several at a time."""
    (n_items, n_queries, n_heads, _), n_keys = q.shape, k.shape[1]
    step = max(1, min(PIECE // (n_heads * n_queries * n_keys), -(-n_items // n_threads())))
    take = lambda items: work(items, mask if mask is None or len(mask) == 1 else mask[items])
    parallel(take, [slice(i, i + step) for i in range(0, n_items, step)])


class _Block(NamedTuple):
    """Some queries, the blocks of keys that the last of them sees, and how many of the last of these keys are hidden
    from some of them: those lie in the last block whole.
    """

    queries: slice
    keys: list[slice]
    n_diagonal: int


def _blocks(n_queries: int, n_keys: int, offset: int | None) -> list[_Block]:
    found = []
    for start in range(0, n_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, n_queries)
        seen = n_keys if offset is None else min(n_keys, stop + offset)
        n_diagonal = 0 if offset is None else max(0, seen - start - offset)
        first = max(0, seen - max(KEY_BLOCK, n_diagonal))
        cuts = [*range(0, first, KEY_BLOCK), first] if first else [0]
        keys = [slice(a, b) for a, b in zip(cuts, [*cuts[1:], seen])]
        found.append(_Block(slice(start, stop), keys, n_diagonal))
    return found


def _groups(q: np.ndarray, n_keys: int) -> list[tuple[int, slice]]:
    """Items, and in each as many heads as make scores of about a piece, but some groups for every thread."""
    n_items, n_queries, n_heads, _ = q.shape
    fit = PIECE // max(1, min(n_queries, QUERY_BLOCK) * min(n_keys, KEY_BLOCK))
    threads = 1 if all_at_work() else n_threads()
    step = max(1, min(fit, n_items * n_heads // (4 * threads if threads > 1 else 1)))
    return [(item, slice(head, head + step)) for item in range(n_items) for head in range(0, n_heads, step)]


def for_items(q, work):
    if len(q) < n_threads():  # better shared by what is done inside
        return reference.for_items(q, work)
    parallel(work, [slice(i, i + 1) for i in range(len(q))])


def _heads_first(x: np.ndarray, item: int, heads: slice) -> np.ndarray:
    """(T, H, D) of one item as (H, T, D), a view."""
    return x[item, :, heads].transpose(1, 0, 2)


def _scores(
    queries: np.ndarray, keys: np.ndarray, block: _Block, seen: slice, later: np.ndarray, mask: np.ndarray | None
) -> np.ndarray:
    """(H, T, S) of some blocks of keys, the last one among them hidden where it is not seen."""
    scores = queries[:, block.queries] @ keys[:, seen].swapaxes(1, 2)
    if mask is not None:
        scores += mask[:, block.queries, seen] if mask.shape[1] > 1 else mask[:, :, seen]
    if block.n_diagonal and seen.stop == block.keys[-1].stop:
        scores[:, :, -block.n_diagonal :] += later[: scores.shape[1], : block.n_diagonal]
    return scores


def _taken(
    group: tuple[int, slice], q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Scaled queries, keys and values (H, T, D) and the mask (H or 1, T or 1, S) of some heads of one item."""
    item, heads = group
    if mask is not None:
        mask = mask[min(item, len(mask) - 1), heads if mask.shape[1] > 1 else slice(None)]
    queries = _heads_first(q, item, heads) * q.dtype.type(1 / math.sqrt(q.shape[3]))
    return queries, _heads_first(k, item, heads), _heads_first(v, item, heads), mask


def _later(n_queries: int, dtype) -> np.ndarray:
    """0, and -inf after the diagonal."""
    n = min(n_queries, QUERY_BLOCK)
    return np.triu(np.full((n, n), -np.inf, dtype), 1)


@_or_faster
def attention(q, k, v, offset, nothing, mask=None):
    if _small(q, k, offset):
        return reference.attention(q, k, v, offset, nothing, mask)
    (n_items, n_queries, n_heads, _), n_keys = q.shape, k.shape[1]
    out, log_total = np.empty(q.shape, q.dtype), np.empty((n_items, n_heads, n_queries), q.dtype)
    if n_queries * n_keys <= SHORT:

        def attend(items: slice, mask: np.ndarray | None) -> None:
            found = reference.attention(q[items], k[items], v[items], offset, nothing, mask)
            out[items], log_total[items] = found

        _some_items(q, k, mask, attend)
        return out, log_total
    blocks, later, ones = _blocks(n_queries, n_keys, offset), _later(n_queries, q.dtype), _ones(n_keys, q)
    limit = _safe_exponent(q.dtype)

    def work(group: tuple[int, slice]) -> None:
        (item, heads), (queries, keys, values, masks) = group, _taken(group, q, k, v, mask)
        for block in blocks:
            mixed, total, shift = np.zeros((), q.dtype), np.zeros((), q.dtype), None
            for seen in block.keys:
                weights = _scores(queries, keys, block, seen, later, masks)
                if not weights.max() < limit:
                    break
                np.exp(weights, out=weights)
                total = total + weights @ ones[seen]
                mixed = mixed + weights @ values[:, seen]
            else:
                shift = np.zeros((), q.dtype) if nothing or total.min() > 1 / MOST else None
            if shift is None:
                whole = slice(0, block.keys[-1].stop)
                weights = _scores(queries, keys, block, whole, later, masks)
                shift = weights.max(axis=-1)
                shift = np.maximum(shift, 0) if nothing else np.where(np.isneginf(shift), 0, shift)
                weights -= shift[..., None]
                np.exp(weights, out=weights)
                total, mixed = weights.sum(axis=-1), weights @ values[:, whole]
            if nothing:
                total = total + np.exp(-shift)
            empty = total == 0
            total = np.where(empty, 1, total)
            np.divide(mixed, total[..., None], out=_heads_first(out, item, heads)[:, block.queries])
            log_total[item, heads, block.queries] = np.where(empty, -np.inf, np.log(total) + shift)

    parallel(work, _groups(q, n_keys))
    return out, log_total


@_or_faster
def attention_backward(grad, q, k, v, out, log_total, offset, dq, dk, dv, mask=None):
    if _small(q, k, offset):
        return reference.attention_backward(grad, q, k, v, out, log_total, offset, dq, dk, dv, mask)
    n_queries, n_keys, size = q.shape[1], k.shape[1], q.shape[3]
    if n_queries * n_keys <= SHORT:

        def differentiate(items: slice, mask: np.ndarray | None) -> None:
            reference.attention_backward(
                grad[items], q[items], k[items], v[items], out[items], log_total[items], offset, dq[items], dk[items],
                dv[items], mask,
            )

        _some_items(q, k, mask, differentiate)
        return
    scale = q.dtype.type(1 / math.sqrt(size))
    blocks, later = _blocks(n_queries, n_keys, offset), _later(n_queries, q.dtype)

    def work(group: tuple[int, slice]) -> None:
        (item, heads), (queries, keys, values, masks) = group, _taken(group, q, k, v, mask)
        # One column more takes a subtraction into a product: [dy, -y.dy] [v, 1]^T = dy v^T - y.dy
        values, grads = _one_more(values), _one_more(_heads_first(grad, item, heads))
        values[..., -1] = 1
        np.negative(np.vecdot(grad[item, :, heads], out[item, :, heads]).T, out=grads[..., -1])
        key_sum, value_sum = np.zeros(keys.shape, q.dtype), np.zeros(keys.shape, q.dtype)
        for block in blocks:
            log_totals = log_total[item, heads, block.queries, None]
            log_totals = np.where(np.isneginf(log_totals), 0, log_totals)
            safe = np.abs(log_totals).max() < _safe_exponent(q.dtype)
            if safe:  # dividing the few gradients by the totals saves subtracting their logs from all scores
                grads[:, block.queries] *= np.exp(-log_totals)
            query_sum = 0
            for seen in block.keys:
                weights = _scores(queries, keys, block, seen, later, masks)
                if not safe:
                    weights -= log_totals
                np.exp(weights, out=weights)
                value_sum[:, seen] += weights.swapaxes(1, 2) @ grads[:, block.queries, :-1]
                dscores = grads[:, block.queries] @ values[:, seen].swapaxes(1, 2)
                dscores *= weights
                key_sum[:, seen] += dscores.swapaxes(1, 2) @ queries[:, block.queries]
                query_sum = query_sum + dscores @ keys[:, seen]
            np.multiply(query_sum, scale, out=_heads_first(dq, item, heads)[:, block.queries])
        _heads_first(dk, item, heads)[...], _heads_first(dv, item, heads)[...] = key_sum, value_sum

    parallel(work, _groups(q, n_keys))


def row_attention(q, k, v, offset, rows, mask=None):
    """Whole rows of scores, but for few queries at a time."""
    if _small(q, k, offset):
        return reference.row_attention(q, k, v, offset, rows, mask)
    blocks, later = _blocks(q.shape[1], k.shape[1], offset), _later(q.shape[1], q.dtype)
    out = np.empty(q.shape, q.dtype)

    def work(group: tuple[int, slice]) -> None:
        (item, heads), (queries, keys, values, masks) = group, _taken(group, q, k, v, mask)
        for block in blocks:
            seen = slice(0, block.keys[-1].stop)
            weights = rows(_scores(queries, keys, block, seen, later, masks))
            np.matmul(weights, values[:, seen], out=_heads_first(out, item, heads)[:, block.queries])

    parallel(work, _groups(q, k.shape[1]))
    return out


def row_attention_backward(grad, q, k, v, offset, rows, rows_backward, dq, dk, dv, mask=None):
    if _small(q, k, offset):
        return reference.row_attention_backward(grad, q, k, v, offset, rows, rows_backward, dq, dk, dv, mask)
    blocks, later = _blocks(q.shape[1], k.shape[1], offset), _later(q.shape[1], q.dtype)
    scale = q.dtype.type(1 / math.sqrt(q.shape[3]))

    def work(group: tuple[int, slice]) -> None:
        (item, heads), (queries, keys, values, masks) = group, _taken(group, q, k, v, mask)
        grads = _heads_first(grad, item, heads)
        key_sum, value_sum = np.zeros(keys.shape, q.dtype), np.zeros(keys.shape, q.dtype)
        for block in blocks:
            seen = slice(0, block.keys[-1].stop)
            scores = _scores(queries, keys, block, seen, later, masks)
            weights = rows(scores)
            value_sum[:, seen] += weights.swapaxes(1, 2) @ grads[:, block.queries]
            dscores = rows_backward(grads[:, block.queries] @ values[:, seen].swapaxes(1, 2), scores, weights)
            key_sum[:, seen] += dscores.swapaxes(1, 2) @ queries[:, block.queries]
            np.multiply(dscores @ keys[:, seen], scale, out=_heads_first(dq, item, heads)[:, block.queries])
        _heads_first(dk, item, heads)[...], _heads_first(dv, item, heads)[...] = key_sum, value_sum

    parallel(work, _groups(q, k.shape[1]))


def rotate(x, cos, sin):
    """A thread takes an item at a time."""
    y, half = np.empty(x.shape, x.dtype), x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]

    def work(i: int) -> None:
        first, second = x[i, ..., :half], x[i, ..., half:]
        np.multiply(first, cos, out=y[i, ..., :half])
        np.multiply(second, cos, out=y[i, ..., half:])
        y[i, ..., :half] -= second * sin
        y[i, ..., half:] += first * sin

    parallel(work, range(len(x)))
    return y


def _one_more(x: np.ndarray) -> np.ndarray:
    """(H, T, D) as (H, T, D + 1) with room in the last column."""
    wider = np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    wider[..., :-1] = x
    return wider


# -------------------------------------------------------------------- optimiser
def adamw(weights, grad, first, second, step, learning_rate, betas, eps, decay):
    if not all(a.flags.c_contiguous for a in (weights, grad, first, second)):
        return reference.adamw(weights, grad, first, second, step, learning_rate, betas, eps, decay)
    flat = [a.reshape(-1) for a in (weights, grad, first, second)]
    (beta1, beta2), correction = betas, math.sqrt(1 - betas[1] ** step)
    rate = learning_rate * correction / (1 - beta1**step)

    def work(piece: slice) -> None:
        w, g, m, v = (a[piece] for a in flat)
        t = (1 - beta1) * g
        m *= beta1
        m += t
        np.multiply(g, g, out=t)
        t *= 1 - beta2
        v *= beta2
        v += t
        if decay:
            w *= 1 - learning_rate * decay
        np.sqrt(v, out=t)
        t += eps * correction
        np.divide(m, t, out=t)
        t *= rate
        w -= t

    parallel(work, _pieces(weights.size))


# -------------------------------------------------------------------- recurrence
# With every product of more than one row BLAS copies the matrix into an order that suits it, which takes as long as a
# product of few rows. Up to a million multiplications OpenBLAS reads it where it lies: with so many rows at most, and
# blocks of the matrix of that size.
ITEMS, MOST_TERMS, BLOCK_COLUMNS = 32, 480, 64


class _Blocks:
    """A matrix by which many others are multiplied, one after another, copied once into blocks."""

    __array_ufunc__ = None  # so that NumPy leaves `array @ blocks` to us

    def __init__(self, matrix: np.ndarray) -> None:
        self.matrix = matrix
        self.blocks: np.ndarray | None = None

    @cached_property
    def T(self) -> _Blocks:
        return _Blocks(self.matrix.T)

    def __rmatmul__(self, left: np.ndarray) -> np.ndarray:
        if len(left) == 1:
            return left @ self.matrix
        if self.blocks is None:
            self.blocks = self._cut()
        (n_sums, n_blocks, _, n_columns), n_rows = self.blocks.shape, len(left)
        out = np.empty((n_sums, n_rows, n_blocks * n_columns), left.dtype)
        terms = left.reshape(n_rows, n_sums, 1, -1).transpose(1, 2, 0, 3)
        np.matmul(terms, self.blocks, out=out.reshape(n_sums, n_rows, n_blocks, -1).swapaxes(1, 2))
        return (out[0] if n_sums == 1 else out.sum(axis=0))[:, : self.matrix.shape[1]]

    def _cut(self) -> np.ndarray:
        """(sums, blocks, terms, columns), with zeros where the last block is not full."""
        n_inner, n_columns = self.matrix.shape
        n_sums, n_blocks = 1, -(-n_columns // BLOCK_COLUMNS)
        while n_inner > n_sums * MOST_TERMS and n_inner % (2 * n_sums) == 0:
            n_sums *= 2
        whole = np.zeros((n_inner, n_blocks * BLOCK_COLUMNS), self.matrix.dtype)
        whole[:, :n_columns] = self.matrix
        return np.ascontiguousarray(whole.reshape(n_sums, -1, n_blocks, BLOCK_COLUMNS).swapaxes(1, 2))


repeated = _Blocks


def pipeline(gates, pieces, first, then):
    """In two threads, one for each function, where items are too few to be shared."""
    if gates.shape[1] > ITEMS or len(pieces) < 2:
        return reference.pipeline(gates, pieces, first, then)
    ready = threading.Semaphore(0)

    def run(second: bool) -> None:
        if second:
            for piece in pieces:
                ready.acquire()
                then(piece)
            return
        try:
            for piece in pieces:
                first(piece)
                ready.release()
        finally:
            ready.release(len(pieces))  # after an error the other thread must not wait for ever

    parallel(run, [False, True])


def _by_items(kernel: Callable) -> Callable:
    """Threads take some items of the batch each through the whole sequence, for items know nothing of each other.

    No fewer, though there be threads without work: the calls of NumPy would be so short that threads mostly wait for
    each other at Python's lock.
    """

    def run(*arguments: Any) -> None:
        n_items = arguments[0].shape[-2]

        def of(items: slice, argument: Any) -> Any:
            return argument[..., items, :] if isinstance(argument, np.ndarray) and argument.ndim > 2 else argument

        parts = [slice(i, i + ITEMS) for i in range(0, n_items, ITEMS)]
        parallel(lambda items: kernel(*(of(items, a) for a in arguments)), parts)

    return run


rnn, rnn_backward = _by_items(reference.rnn), _by_items(reference.rnn_backward)
gru, gru_backward = _by_items(reference.gru), _by_items(reference.gru_backward)
lstm, lstm_backward = _by_items(reference.lstm), _by_items(reference.lstm_backward)
