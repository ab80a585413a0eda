"""Attention kernels in NumPy and threads: blocks of queries and heads, with memory linear in the number of tokens.

The query heads that share a key head stand in the rows of one product, so that no key is copied and the gradients of
keys and values are summed inside the products. Keys that no query sees are not read: a block of queries takes the keys
from its first query's window to its last query's offset, and only at the two edges of that band something is hidden.
Exponentials are not shifted by each row's maximum where one look at a whole block says that nothing can overflow or
vanish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.kernels import ScoreOptions
from tricycle.kernels import row_attention as row_kernels
from tricycle.kernels.dispatch import upcast, upcasting
from tricycle.kernels.in_place import upcasting_in_place
from tricycle.kernels.ranges import block_score_options, queries_with_keys, visible_keys
from tricycle.kernels.reference.attention import RowSoftmaxBackwardFn, RowSoftmaxFn
from tricycle_accelerators import attention_blocks, buffers, chunks, threads
from tricycle_accelerators.attention_blocks import (
    HeadGroup,
    QueryBlock,
    head_major,
    stack_query_heads,
    unstack_query_heads,
)
from tricycle_accelerators.providers import decline_when

MAX_BATCHED_SCORES = 1600  # scores of a head: with fewer, calls for each item cost more than going through memory again


# -------------------------------------------------------------------- what a call computes with
class _Inputs(NamedTuple):
    """Inputs of attention, without queries that see no key and keys that no query sees."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    score_options: ScoreOptions
    mask: np.ndarray | None

    def of_items(self, items: slice) -> _Inputs:
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[items]
        return self._replace(q=self.q[items], k=self.k[items], v=self.v[items], mask=mask)

    def run_small(self, work: Callable[[slice, _Inputs], None]) -> bool:
        """Call `work` once for few scores, or in threads for batches of short items; return False if neither applies.

        Returns:
            Whether it was called.
        """
        (n_items, n_queries, n_heads, _), n_keys = self.q.shape, self.k.shape[1]
        if n_queries < 16 and n_items * n_heads * n_queries * n_keys < chunks.CHUNK_SIZE // 8:
            with threads.single_blas_thread():
                work(slice(None), self)
        elif n_queries * n_keys <= MAX_BATCHED_SCORES:
            step = max(1, min(chunks.CHUNK_SIZE // (n_heads * n_queries * n_keys), -(-n_items // threads.n_threads())))
            some = [slice(i, i + step) for i in range(0, n_items, step)]
            threads.parallel_for(lambda items: work(items, self.of_items(items)), some)
        else:
            return False
        return True


def _trim_hidden(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, score_options: ScoreOptions, mask: np.ndarray | None
) -> tuple[slice, slice, _Inputs | None]:
    """Return the queries that see any key, the keys that any query sees, and these as inputs; None for nothing."""
    queries = queries_with_keys(score_options, q.shape[1], k.shape[1])
    keys = visible_keys(score_options, queries, k.shape[1])
    if queries.start == queries.stop or not q.size or not k.size:
        return queries, keys, None
    if mask is not None:
        mask = mask[:, :, queries if mask.shape[2] > 1 else slice(None), keys]
    moved = block_score_options(score_options, queries.start, keys.start)
    return queries, keys, _Inputs(q[:, queries], k[:, keys], v[:, keys], moved, mask)


def _fill_outside(x: np.ndarray, tokens: slice, value: float) -> np.ndarray:
    """Write a value before and after some tokens of (B, T, ...); return these tokens."""
    x[:, : tokens.start] = value
    x[:, tokens.stop :] = value
    return x[:, tokens]


def _for_items_decline_reason(q: np.ndarray, *_: Any, **__: Any) -> str | None:
    return "fewer items than threads: better shared by what is done inside" if len(q) < threads.n_threads() else None


@decline_when(_for_items_decline_reason)
def run_over_batch(q: np.ndarray, work: Callable[[slice], None]) -> None:
    """Call `work(slice(i, i + 1))` for each batch item i in threads; NotImplemented for fewer items than threads."""
    threads.parallel_for(work, [slice(i, i + 1) for i in range(len(q))])


# -------------------------------------------------------------------- scores of a group
class _CausalMasks(NamedTuple):
    """What is added to a square of scores at the two edges of the band: 0, and -inf after, or up to, the diagonal."""

    later: np.ndarray
    earlier: np.ndarray


def _causal_masks(blocks: list[QueryBlock], dtype: np.dtype) -> _CausalMasks:
    longest = max(block.queries.stop - block.queries.start for block in blocks)
    whole = np.full((longest, longest), -np.inf, dtype)
    return _CausalMasks(np.triu(whole, 1), np.tril(whole))


class _Heads(NamedTuple):
    """What a group computes with.

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
        return stack_query_heads(rows, len(self.keys))

    def unstack(self, rows: np.ndarray) -> np.ndarray:
        return unstack_query_heads(rows, len(self.queries))

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
        """Add the mask, and -inf where causality or the window hides a key, to scores (H, T, S) in place."""
        n_queries = scores.shape[1]
        if self.mask is not None:
            scores += self.mask[:, block.queries, seen] if self.mask.shape[1] > 1 else self.mask[:, :, seen]
        if block.diagonal is not None and block.diagonal < seen.stop:
            start = max(seen.start, block.diagonal)
            columns = slice(start - block.diagonal, seen.stop - block.diagonal)
            scores[:, :, start - seen.start :] += self.masks.later[:n_queries, columns]
        if block.edge is not None and seen.start < block.edge + n_queries:
            stop = min(seen.stop, block.edge + n_queries)
            columns = slice(seen.start - block.edge, stop - block.edge)
            scores[:, :, : stop - seen.start] += self.masks.earlier[:n_queries, columns]

    def scores(self, block: QueryBlock, seen: slice) -> np.ndarray:
        """(H, T, S) of a block, -inf where a key is hidden."""
        scores = self.softcapped_scores(block, seen)
        self.mask_scores(scores, block, seen)
        return scores

    def apply_weights(self, weights: np.ndarray, seen: slice) -> np.ndarray:
        """(H, T, S) and values to (H, T, E)."""
        return self.unstack(self.stack(weights) @ self.values[:, seen])


def _heads(inputs: _Inputs, group: HeadGroup, triangles: _CausalMasks) -> _Heads:
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

    def attend_items(items: slice, inputs: _Inputs) -> None:
        q, k, v, score_options, mask = inputs
        seen_out[items], seen_total[items] = kernels.attention.reference(q, k, v, score_options, off_by_one, mask)

    if inputs is not None and not inputs.run_small(attend_items):
        _attend_by_blocks(inputs, off_by_one, seen_out, seen_total)
    return out.astype(dtype, copy=False), logsumexp


def _attend_by_blocks(inputs: _Inputs, off_by_one: bool, out: np.ndarray, logsumexp: np.ndarray) -> None:
    plan = attention_blocks.plan_attention(inputs.q, inputs.k, inputs.score_options)
    triangles = _causal_masks(plan.blocks, inputs.q.dtype)

    def work(group: HeadGroup) -> None:
        heads = _heads(inputs, group, triangles)
        results = head_major(out, group.item, group.heads)
        for block in plan.blocks:
            mixed, total, shift = _exponentials(heads, block, off_by_one)
            if off_by_one:
                total = total + np.exp(-shift)
            empty = total == 0
            total = np.where(empty, 1, total)
            np.divide(mixed, total[..., None], out=results[:, block.queries])
            logsumexp[group.item, group.heads, block.queries] = np.where(empty, -np.inf, np.log(total) + shift)

    threads.parallel_for(work, plan.groups)


def _exponentials(heads: _Heads, block: QueryBlock, off_by_one: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of e^(score - shift): their products with the values (H, T, E), their sums (H, T), and the shift (H, T) or ()."""
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
    gradients = _Gradients(_fill_outside(dq, queries, 0), _fill_outside(dk, keys, 0), _fill_outside(dv, keys, 0))
    upstream = _Upstream(grad[:, queries], out[:, queries], logsumexp[:, :, queries])

    def differentiate_items(items: slice, inputs: _Inputs) -> None:
        q, k, v, score_options, mask = inputs
        grad, out, logsumexp = (array[items] for array in upstream)
        dq, dk, dv = (array[items] for array in gradients)
        kernels.attention_backward.reference(grad, q, k, v, out, logsumexp, score_options, dq, dk, dv, mask)

    if inputs is not None and not inputs.run_small(differentiate_items):
        _accumulate_gradients(inputs, gradients, lambda group, heads: _SoftmaxBackward(group, heads, upstream))


class _Upstream(NamedTuple):
    """What the backward of softmax is given beside the inputs: (B, T, H, E) twice, and (B, H, T)."""

    grad: np.ndarray
    out: np.ndarray
    logsumexp: np.ndarray


class _SoftmaxBackward:
    """Backward pass of softmax attention for a group: recomputes scores and weights, and accumulates gradients."""

    def __init__(self, group: HeadGroup, heads: _Heads, upstream: _Upstream) -> None:
        grad = upstream.grad[group.item, :, group.heads]
        out = upstream.out[group.item, :, group.heads]
        # One column more takes a subtraction into a product: [dy, -y.dy] [v, 1]^T = dy v^T - y.dy
        self.values, self.grads = _append_column(heads.values), _append_column(grad.transpose(1, 0, 2))
        self.values[..., -1] = 1
        np.negative(np.vecdot(grad, out).T, out=self.grads[..., -1])
        self.logsumexp = upstream.logsumexp[group.item, group.heads, :, None]
        self.heads = heads

    def add(self, block: QueryBlock, sums: _KeyValueSums) -> np.ndarray:
        """Return a block's gradient of scaled queries, add keys' and values' to `sums`; may overwrite self.grads."""
        heads, logsumexp = self.heads, self.logsumexp[:, block.queries]
        logsumexp = np.where(np.isneginf(logsumexp), 0, logsumexp)
        safe = np.abs(logsumexp).max() < chunks.SAFE_EXPONENT
        grads = self.grads[:, block.queries]
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
            sums.values[:, seen] += weights.swapaxes(1, 2) @ grads[..., :-1]
            dscores = grads @ self.values[:, seen].swapaxes(1, 2)
            dscores *= weights
            if slope is not None:
                dscores *= heads.stack(slope)
            sums.keys[:, seen] += dscores.swapaxes(1, 2) @ queries
            query_sum = query_sum + dscores @ heads.keys[:, seen]
        return heads.unstack(query_sum)


def _append_column(x: np.ndarray) -> np.ndarray:
    """Copy (H, T, D) to (H, T, D + 1) with an uninitialized last column."""
    wider = np.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    wider[..., :-1] = x
    return wider


# -------------------------------------------------------------------- any function of rows
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

    def attend_items(items: slice, inputs: _Inputs) -> None:
        q, k, v, score_options, mask = inputs
        seen_out[items] = row_kernels.row_attention.reference(q, k, v, score_options, row_softmax, mask)

    if inputs is not None and not inputs.run_small(attend_items):
        _row_attention_by_blocks(inputs, row_softmax, seen_out)
    return out


def _row_attention_by_blocks(inputs: _Inputs, row_softmax: RowSoftmaxFn, out: np.ndarray) -> None:
    plan = attention_blocks.plan_attention(inputs.q, inputs.k, inputs.score_options)
    triangles = _causal_masks(plan.blocks, inputs.q.dtype)

    def work(group: HeadGroup) -> None:
        heads = _heads(inputs, group, triangles)
        results = head_major(out, group.item, group.heads)
        for block in plan.blocks:
            weights = row_softmax(heads.scores(block, block.visible))
            results[:, block.queries] = heads.apply_weights(weights, block.visible)

    threads.parallel_for(work, plan.groups)


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
    gradients = _Gradients(_fill_outside(dq, queries, 0), _fill_outside(dk, keys, 0), _fill_outside(dv, keys, 0))
    grad = grad[:, queries]

    def differentiate_items(items: slice, inputs: _Inputs) -> None:
        q, k, v, score_options, mask = inputs
        dq, dk, dv = (array[items] for array in gradients)
        row_kernels.row_attention_backward.reference(
            grad[items], q, k, v, score_options, row_softmax, row_softmax_backward, dq, dk, dv, mask
        )

    def backward_of(group: HeadGroup, heads: _Heads) -> _RowSoftmaxBackward:
        return _RowSoftmaxBackward(heads, head_major(grad, group.item, group.heads), row_softmax, row_softmax_backward)

    if inputs is not None and not inputs.run_small(differentiate_items):
        _accumulate_gradients(inputs, gradients, backward_of)


class _RowSoftmaxBackward(NamedTuple):
    """The gradients of a group's blocks, for weights that are any function of rows of scores; grads: (H, T, E)."""

    heads: _Heads
    grads: np.ndarray
    row_softmax: RowSoftmaxFn
    row_softmax_backward: RowSoftmaxBackwardFn

    def add(self, block: QueryBlock, sums: _KeyValueSums) -> np.ndarray:
        """Return the scaled queries' gradient for a block (H, T, D), and add those of keys and values to `sums`."""
        heads, seen = self.heads, block.visible
        scores = heads.softcapped_scores(block, seen)
        slope = heads.softcap_derivative(scores)
        heads.mask_scores(scores, block, seen)
        weights = self.row_softmax(scores)
        grads = heads.stack(self.grads[:, block.queries])
        sums.values[:, seen] += heads.stack(weights).swapaxes(1, 2) @ grads
        dweights = heads.unstack(grads @ heads.values[:, seen].swapaxes(1, 2))
        dscores = self.row_softmax_backward(dweights, scores, weights)
        dproducts = heads.stack(dscores if slope is None else dscores * slope)
        sums.keys[:, seen] += dproducts.swapaxes(1, 2) @ heads.stack(heads.queries[:, block.queries])
        return heads.unstack(dproducts @ heads.keys[:, seen])


# -------------------------------------------------------------------- sums of gradients
class _Gradients(NamedTuple):
    """Where the gradients of queries, keys and values go: (B, T, H, D), (B, S, K, D) and (B, S, K, E)."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class _KeyValueSums(NamedTuple):
    """Over the queries of a group, for keys (K, S, D) and values (K, S, E)."""

    keys: np.ndarray
    values: np.ndarray


def _accumulate_gradients(
    inputs: _Inputs,
    gradients: _Gradients,
    backward_of: Callable[[HeadGroup, _Heads], _SoftmaxBackward | _RowSoftmaxBackward],
) -> None:
    """Compute the gradients of all groups and add up, in order, those that share a key head."""
    plan = attention_blocks.plan_attention(inputs.q, inputs.k, inputs.score_options)
    triangles = _causal_masks(plan.blocks, inputs.q.dtype)
    scale = inputs.q.dtype.type(inputs.score_options.scale)
    parts: list[_KeyValueSums | None] = [None] * len(plan.groups)

    def work(i: int) -> None:
        group = plan.groups[i]
        heads = _heads(inputs, group, triangles)
        backward = backward_of(group, heads)
        sums = _KeyValueSums(
            np.zeros(heads.keys.shape, heads.keys.dtype), np.zeros(heads.values.shape, heads.values.dtype)
        )
        dq = head_major(gradients.dq, group.item, group.heads)
        for block in plan.blocks:
            np.multiply(backward.add(block, sums), scale, out=dq[:, block.queries])
        if plan.splits_key_heads:
            parts[i] = sums
        else:
            head_major(gradients.dk, group.item, group.key_heads)[...] = sums.keys
            head_major(gradients.dv, group.item, group.key_heads)[...] = sums.values

    threads.parallel_for(work, range(len(plan.groups)))
    if plan.splits_key_heads:
        _sum_groups(plan.groups, [sums for sums in parts if sums is not None], gradients)


def _sum_groups(groups: list[HeadGroup], parts: list[_KeyValueSums], gradients: _Gradients) -> None:
    gradients.dk[...] = 0
    gradients.dv[...] = 0
    for group, sums in zip(groups, parts):
        head_major(gradients.dk, group.item, group.key_heads)[...] += sums.keys
        head_major(gradients.dv, group.item, group.key_heads)[...] += sums.values
