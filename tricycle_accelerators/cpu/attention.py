"""Attention kernels in NumPy and threads: blocks of queries and heads, with memory linear in the number of tokens.

The query heads that share a key head stand in the rows of one product, so that no key is copied and the gradients of
keys and values are summed inside the products. Keys that no query sees are not read: a block of queries takes the keys
from its first query's window to its last query's offset, and only at the two edges of that band something is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.kernels import ScoreOptions
from tricycle.kernels import row_attention as row_kernels
from tricycle.kernels.dispatch import upcast, upcasting
from tricycle.kernels.in_place import upcasting_in_place
from tricycle.kernels.ranges import block_score_options, queries_with_keys, visible_keys
from tricycle.kernels.reference.attention import RowSoftmaxBackwardFn, RowSoftmaxFn
from tricycle_accelerators import buffers, chunks, threads
from tricycle_accelerators.attention_blocks import AttentionPlan, HeadGroup, QueryBlock, head_major, plan_attention
from tricycle_accelerators.providers import decline_when

MAX_BATCHED_SCORES = 1600  # scores of a head: with fewer, calls for each item cost more than going through memory again


# -------------------------------------------------------------------- inputs of a call
class _Inputs(NamedTuple):
    """Inputs of attention, without queries that see no key and keys that no query sees."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    score_options: ScoreOptions
    mask: np.ndarray | None

    def of_items(self, items: slice) -> _Inputs:
        """Return the inputs of some batch items, as views; a mask for all items stays as it is."""
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[items]
        return self._replace(q=self.q[items], k=self.k[items], v=self.v[items], mask=mask)


def _trim_hidden(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, score_options: ScoreOptions, mask: np.ndarray | None
) -> tuple[slice, slice, _Inputs | None]:
    """Return queries that see any key, keys that any query sees, and these as inputs (None if there are none)."""
    queries = queries_with_keys(score_options, q.shape[1], k.shape[1])
    keys = visible_keys(score_options, queries, k.shape[1])
    if queries.start == queries.stop or not q.size or not k.size:
        return queries, keys, None
    if mask is not None:
        mask = mask[:, :, queries if mask.shape[2] > 1 else slice(None), keys]
    moved = block_score_options(score_options, queries.start, keys.start)
    return queries, keys, _Inputs(q[:, queries], k[:, keys], v[:, keys], moved, mask)


def _fill_outside(x: np.ndarray, tokens: slice, value: float) -> np.ndarray:
    """Write a value before and after some tokens of (B, T, ...) in place; return a view of these tokens."""
    x[:, : tokens.start] = value
    x[:, tokens.stop :] = value
    return x[:, tokens]


def _run_over_batch_decline_reason(q: np.ndarray, *_: Any, **__: Any) -> str | None:
    """Return a reason if there are fewer batch items than threads, else None."""
    return "fewer items than threads: better shared by what is done inside" if len(q) < threads.n_threads() else None


@decline_when(_run_over_batch_decline_reason)
def run_over_batch(q: np.ndarray, work: Callable[[slice], None]) -> None:
    """Call `work(slice(i, i + 1))` for each batch item i in threads; NotImplemented for fewer items than threads."""
    threads.parallel_for(work, [slice(i, i + 1) for i in range(len(q))])


# -------------------------------------------------------------------- scores of a group
class _CausalMasks(NamedTuple):
    """Which keys are hidden in squares of scores at the two edges of the band: after, or up to, the diagonal."""

    later: np.ndarray
    earlier: np.ndarray


def _causal_masks(blocks: list[QueryBlock]) -> _CausalMasks:
    """Return masks for the longest block: true above the diagonal; true on and below it."""
    earlier = np.tri(max(block.queries.stop - block.queries.start for block in blocks), dtype=bool)
    return _CausalMasks(~earlier, earlier)


class _Heads(NamedTuple):
    """The arrays and options of a head group.

    Attributes:
        queries: (H, T, D), times the scale.
        keys, values: (K, S, D) and (K, S, E).
        mask: (H or 1, T or 1, S), or None.
    """

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    mask: np.ndarray | None
    cap: float | None
    masks: _CausalMasks

    def stack(self, rows: np.ndarray) -> np.ndarray:
        """Reshape (H, T, D) to (K, H/K * T, D): join the rows of query heads that share a key head."""
        return _regroup(rows, len(self.keys))

    def unstack(self, rows: np.ndarray) -> np.ndarray:
        """Reshape (K, H/K * T, D) back to (H, T, D)."""
        return _regroup(rows, len(self.queries))

    def softcapped_scores(self, block: QueryBlock, seen: slice) -> np.ndarray:
        """Return the scaled and soft-capped scores (H, T, S) of a block's queries and some keys, without any mask."""
        products = self.stack(self.queries[:, block.queries]) @ self.keys[:, seen].swapaxes(1, 2)
        if self.cap is not None:
            products /= self.cap
            np.tanh(products, out=products)
            products *= self.cap
        return self.unstack(products)

    def softcap_derivative(self, capped: np.ndarray) -> np.ndarray | None:
        """Return the derivative of softcapped scores with respect to the scores; None without a cap."""
        if self.cap is None:
            return None
        slope = capped / self.cap
        slope *= slope
        return np.subtract(1, slope, out=slope)

    def mask_scores(self, scores: np.ndarray, block: QueryBlock, seen: slice) -> None:
        """Add the mask to scores (H, T, S) in place; set -inf, also for NaN, where causality or window hide a key."""
        n_queries = scores.shape[1]
        if self.mask is not None:
            scores += self.mask[:, block.queries, seen] if self.mask.shape[1] > 1 else self.mask[:, :, seen]
        if block.diagonal is not None and block.diagonal < seen.stop:
            start = max(seen.start, block.diagonal)
            columns = slice(start - block.diagonal, seen.stop - block.diagonal)
            np.copyto(scores[:, :, start - seen.start :], -np.inf, where=self.masks.later[:n_queries, columns])
        if block.edge is not None and seen.start < block.edge + n_queries:
            stop = min(seen.stop, block.edge + n_queries)
            columns = slice(seen.start - block.edge, stop - block.edge)
            np.copyto(scores[:, :, : stop - seen.start], -np.inf, where=self.masks.earlier[:n_queries, columns])

    def scores(self, block: QueryBlock, seen: slice) -> np.ndarray:
        """Return the scores (H, T, S) of a block's queries and some keys, -inf where a key is hidden."""
        scores = self.softcapped_scores(block, seen)
        self.mask_scores(scores, block, seen)
        return scores

    def apply_weights(self, weights: np.ndarray, seen: slice) -> np.ndarray:
        """Return the sums (H, T, E) of the values of some keys, weighted by (H, T, S)."""
        return self.unstack(self.stack(weights) @ self.values[:, seen])


def _regroup(rows: np.ndarray, n: int) -> np.ndarray:
    """Return rows (M, R, C) as n groups (n, M R / n, C)."""
    return rows.reshape(n, rows.shape[0] * rows.shape[1] // n, rows.shape[2])


def _heads(inputs: _Inputs, group: HeadGroup, triangles: _CausalMasks) -> _Heads:
    """Return a head group's scaled queries, keys, values and mask."""
    mask = inputs.mask
    if mask is not None:
        mask = mask[min(group.item, len(mask) - 1), group.heads if mask.shape[1] > 1 else slice(None)]
    return _Heads(
        head_major(inputs.q, group.item, group.heads) * inputs.q.dtype.type(inputs.score_options.scale),
        head_major(inputs.k, group.item, group.key_heads),
        head_major(inputs.v, group.item, group.key_heads),
        mask,
        inputs.score_options.softcap,
        triangles,
    )


def _run(
    inputs: _Inputs,
    work_items: Callable[[slice, _Inputs], None],
    work_group: Callable[[HeadGroup, _Heads, AttentionPlan], None],
) -> AttentionPlan | None:
    """Call `work_items` for few or short items and return None, else `work_group` per head group; return the plan.

    Returns:
        The plan whose groups `work_group` was called for, if it was.
    """
    (n_items, n_queries, n_heads, _), n_keys = inputs.q.shape, inputs.k.shape[1]
    if n_queries < 16 and n_items * n_heads * n_queries * n_keys < chunks.CHUNK_SIZE // 8:
        with threads.single_blas_thread():
            work_items(slice(None), inputs)
        return None
    if n_queries * n_keys <= MAX_BATCHED_SCORES:
        step = max(1, min(chunks.CHUNK_SIZE // (n_heads * n_queries * n_keys), -(-n_items // threads.n_threads())))
        some = [slice(i, i + step) for i in range(0, n_items, step)]
        threads.parallel_for(lambda items: work_items(items, inputs.of_items(items)), some)
        return None
    plan = plan_attention(inputs.q, inputs.k, inputs.score_options)
    masks = _causal_masks(plan.blocks)
    threads.parallel_for(lambda group: work_group(group, _heads(inputs, group, masks), plan), plan.groups)
    return plan


# -------------------------------------------------------------------- softmax
def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score_options: ScoreOptions,
    off_by_one: bool,
    mask: np.ndarray | None = None,
    dtype: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute attention with NumPy, head groups in parallel; return output (B, T, H, D) and logsumexp (B, H, T)."""
    dtype = dtype or q.dtype
    q, k, v, mask = map(upcast, (q, k, v, mask))
    out = buffers.empty((*q.shape[:3], v.shape[3]), q.dtype)
    logsumexp = np.empty((q.shape[0], q.shape[2], q.shape[1]), q.dtype)
    queries, _, inputs = _trim_hidden(q, k, v, score_options, mask)
    seen_out = _fill_outside(out, queries, 0)
    seen_total = _fill_outside(logsumexp.transpose(0, 2, 1), queries, 0 if off_by_one else -np.inf).transpose(0, 2, 1)

    def attend_items(items: slice, some: _Inputs) -> None:
        seen_out[items], seen_total[items] = kernels.attention.reference(*some[:4], off_by_one, some.mask)

    def attend_group(group: HeadGroup, heads: _Heads, plan: AttentionPlan) -> None:
        results = head_major(seen_out, group.item, group.heads)
        for block in plan.blocks:
            mixed, total, shift = _exponentials(heads, block, off_by_one)
            if off_by_one:
                total = total + np.exp(-shift)
            empty = total == 0
            total = np.where(empty, 1, total)
            np.divide(mixed, total[..., None], out=results[:, block.queries])
            seen_total[group.item, group.heads, block.queries] = np.where(empty, -np.inf, np.log(total) + shift)

    if inputs is not None:
        _run(inputs, attend_items, attend_group)
    return out.astype(dtype, copy=False), logsumexp


def _exponentials(heads: _Heads, block: QueryBlock, off_by_one: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sums of e^(score - shift) times values (H, T, E), sums of e^... (H, T), and the shift (H, T) or ()."""
    exponentials = _unshifted_exponentials(heads, block)
    no_shift = np.zeros((), heads.queries.dtype)
    if exponentials is not None and (off_by_one or exponentials[1].min() > 1 / chunks.MAX_EXP):
        return *exponentials, no_shift
    scores = heads.scores(block, block.visible)
    shift = scores.max(axis=-1)
    shift = np.maximum(shift, 0) if off_by_one else np.where(np.isneginf(shift), 0, shift)
    scores -= shift[..., None]
    weights = np.exp(scores, out=scores)
    return heads.apply_weights(weights, block.visible), weights.sum(axis=-1), shift


def _unshifted_exponentials(heads: _Heads, block: QueryBlock) -> tuple[np.ndarray, np.ndarray] | None:
    """Compute `_exponentials` without a shift; return None if an exponential could overflow."""
    bounded = heads.cap is not None and heads.cap < chunks.SAFE_EXPONENT and heads.mask is None
    ones = np.ones(block.visible.stop - block.visible.start, heads.queries.dtype)
    mixed = total = np.zeros((), heads.queries.dtype)
    for seen in block.keys:
        scores = heads.scores(block, seen)
        if not bounded and not scores.max() < chunks.SAFE_EXPONENT:
            return None
        weights = np.exp(scores, out=scores)
        total = total + weights @ ones[: seen.stop - seen.start]
        mixed = mixed + heads.apply_weights(weights, seen)
    return mixed, total


@upcasting_in_place(7, 8, 9)
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
) -> None:
    """Write the attention gradients into dq, dk and dv by NumPy, scores recomputed by blocks; threads divide heads."""
    queries, keys, inputs = _trim_hidden(q, k, v, score_options, mask)
    gradients = _fill_outside(dq, queries, 0), _fill_outside(dk, keys, 0), _fill_outside(dv, keys, 0)
    upstream = grad[:, queries], out[:, queries], logsumexp[:, :, queries]

    def differentiate_items(items: slice, some: _Inputs) -> None:
        grad, out, logsumexp = (array[items] for array in upstream)
        dq, dk, dv = (array[items] for array in gradients)
        kernels.attention_backward.reference(grad, *some[:3], out, logsumexp, some.score_options, dq, dk, dv, some.mask)

    if inputs is not None:
        _differentiate(inputs, gradients, differentiate_items, partial(_softmax_backward, upstream))


def _softmax_backward(
    upstream: tuple[np.ndarray, np.ndarray, np.ndarray], group: HeadGroup, heads: _Heads
) -> _DifferentiateBlock:
    """Return a function that adds a block's softmax gradients to dkeys, dvalues and returns those of its queries.

    Args:
        upstream: gradient and output (B, T, H, E), and logsumexp (B, H, T).
    """
    grad, out = (array[group.item, :, group.heads] for array in upstream[:2])
    # One column more takes a subtraction into a product: [dy, -y.dy] [v, 1]^T = dy v^T - y.dy
    values, slopes = _append_column(heads.values), _append_column(grad.transpose(1, 0, 2))
    values[..., -1] = 1
    np.negative(np.vecdot(grad, out).T, out=slopes[..., -1])
    logs = upstream[2][group.item, group.heads, :, None]

    def differentiate(block: QueryBlock, dkeys: np.ndarray, dvalues: np.ndarray) -> np.ndarray:
        logsumexp = logs[:, block.queries]
        logsumexp = np.where(np.isneginf(logsumexp), 0, logsumexp)
        safe = np.abs(logsumexp).max() < chunks.SAFE_EXPONENT
        grads = slopes[:, block.queries]
        if safe:  # dividing the few gradients by the totals saves subtracting their logs from all scores
            grads *= np.exp(-logsumexp)
        grads, queries = heads.stack(grads), heads.stack(heads.queries[:, block.queries])
        query_sum = np.zeros((), queries.dtype)
        for seen in block.keys:
            scores = heads.softcapped_scores(block, seen)
            slope = heads.softcap_derivative(scores)
            heads.mask_scores(scores, block, seen)
            if not safe:
                scores -= logsumexp
            weights = heads.stack(np.exp(scores, out=scores))
            dvalues[:, seen] += weights.swapaxes(1, 2) @ grads[..., :-1]
            dscores = grads @ values[:, seen].swapaxes(1, 2)
            dscores *= weights
            if slope is not None:
                dscores *= heads.stack(slope)
            dkeys[:, seen] += dscores.swapaxes(1, 2) @ queries
            query_sum = query_sum + dscores @ heads.keys[:, seen]
        return heads.unstack(query_sum)

    return differentiate


def _append_column(x: np.ndarray) -> np.ndarray:
    """Copy (H, T, D) to (H, T, D + 1) with an uninitialized last column."""
    wider = np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    wider[..., :-1] = x
    return wider


# -------------------------------------------------------------------- any row softmax
@upcasting(1)
def row_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score_options: ScoreOptions,
    row_softmax: RowSoftmaxFn,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Return attention (B, T, H, E) with `row_softmax` on rows of scores in place of softmax, heads in threads."""
    out = buffers.empty((*q.shape[:3], v.shape[3]), q.dtype)
    queries, _, inputs = _trim_hidden(q, k, v, score_options, mask)
    seen_out = _fill_outside(out, queries, 0)

    def attend_items(items: slice, some: _Inputs) -> None:
        seen_out[items] = row_kernels.row_attention.reference(*some[:4], row_softmax, some.mask)

    def attend_group(group: HeadGroup, heads: _Heads, plan: AttentionPlan) -> None:
        results = head_major(seen_out, group.item, group.heads)
        for block in plan.blocks:
            weights = row_softmax(heads.scores(block, block.visible))
            results[:, block.queries] = heads.apply_weights(weights, block.visible)

    if inputs is not None:
        _run(inputs, attend_items, attend_group)
    return out


@upcasting_in_place(7, 8, 9)
def row_attention_backward(
    grad: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score_options: ScoreOptions,
    row_softmax: RowSoftmaxFn,
    row_softmax_backward: RowSoftmaxBackwardFn,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    mask: np.ndarray | None = None,
) -> None:
    """Write the gradients of attention with `row_softmax` in place of softmax into dq, dk and dv, heads in parallel."""
    queries, keys, inputs = _trim_hidden(q, k, v, score_options, mask)
    gradients = _fill_outside(dq, queries, 0), _fill_outside(dk, keys, 0), _fill_outside(dv, keys, 0)
    grad = grad[:, queries]
    functions = row_softmax, row_softmax_backward

    def differentiate_items(items: slice, some: _Inputs) -> None:
        dq, dk, dv = (array[items] for array in gradients)
        row_kernels.row_attention_backward.reference(grad[items], *some[:4], *functions, dq, dk, dv, some.mask)

    def backward_of(group: HeadGroup, heads: _Heads) -> _DifferentiateBlock:
        return partial(_row_softmax_backward, heads, head_major(grad, group.item, group.heads), *functions)

    if inputs is not None:
        _differentiate(inputs, gradients, differentiate_items, backward_of)


def _row_softmax_backward(
    heads: _Heads,
    grad: np.ndarray,
    row_softmax: RowSoftmaxFn,
    row_softmax_backward: RowSoftmaxBackwardFn,
    block: QueryBlock,
    dkeys: np.ndarray,
    dvalues: np.ndarray,
) -> np.ndarray:
    """Add a block's gradients to `dkeys`, `dvalues` for any row softmax; return those of its unscaled queries."""
    seen = block.visible
    scores = heads.softcapped_scores(block, seen)
    slope = heads.softcap_derivative(scores)
    heads.mask_scores(scores, block, seen)
    weights = row_softmax(scores)
    grads = heads.stack(grad[:, block.queries])
    dvalues[:, seen] += heads.stack(weights).swapaxes(1, 2) @ grads
    dweights = heads.unstack(grads @ heads.values[:, seen].swapaxes(1, 2))
    dscores = row_softmax_backward(dweights, scores, weights)
    dproducts = heads.stack(dscores if slope is None else dscores * slope)
    dkeys[:, seen] += dproducts.swapaxes(1, 2) @ heads.stack(heads.queries[:, block.queries])
    return heads.unstack(dproducts @ heads.keys[:, seen])


# -------------------------------------------------------------------- sums of gradients
# Returns the scaled queries' gradient of a block (H, T, D), and adds those of keys (K, S, D) and values (K, S, E).
_DifferentiateBlock = Callable[[QueryBlock, np.ndarray, np.ndarray], np.ndarray]


def _differentiate(
    inputs: _Inputs,
    gradients: tuple[np.ndarray, np.ndarray, np.ndarray],
    work_items: Callable[[slice, _Inputs], None],
    backward_of: Callable[[HeadGroup, _Heads], _DifferentiateBlock],
) -> None:
    """Write dq, dk, dv by `work_items` or, per group, `backward_of`; add up, in order, groups that share a key head."""
    scale = inputs.q.dtype.type(inputs.score_options.scale)
    sums: dict[tuple[int, int], list[np.ndarray]] = {}  # by item and first head

    def work_group(group: HeadGroup, heads: _Heads, plan: AttentionPlan) -> None:
        differentiate = backward_of(group, heads)
        totals = [np.zeros(x.shape, x.dtype) for x in (heads.keys, heads.values)]
        dq = head_major(gradients[0], group.item, group.heads)
        for block in plan.blocks:
            np.multiply(differentiate(block, *totals), scale, out=dq[:, block.queries])
        if plan.splits_key_heads:
            sums[group.item, group.heads.start] = totals
        else:
            for place, total in zip(gradients[1:], totals):
                head_major(place, group.item, group.key_heads)[...] = total

    plan = _run(inputs, work_items, work_group)
    if plan is not None and plan.splits_key_heads:
        for i, place in enumerate(gradients[1:]):
            place[...] = 0
            for group in plan.groups:
                head_major(place, group.item, group.key_heads)[...] += sums[group.item, group.heads.start][i]
