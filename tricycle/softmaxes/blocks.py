"""`BlockSoftmax`: softmax over independent blocks of keys, each with a learned scale."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tricycle import extra_ops, kernels
from tricycle.devices import Array, array_module
from tricycle.functions import AttendBackward, RowSoftmax, Softmax, as_non_scalar
from tricycle.kernels import ScoreOptions, batched
from tricycle.kernels.ranges import block_score_options, queries_with_keys
from tricycle.ops import check_positive
from tricycle.parameter import Parameter
from tricycle.tensor import Operand, Tensor, no_grad


class _Part(NamedTuple):
    """The attention of the queries that see any key of one block; offsets count from the first of both."""

    block: int
    queries: slice
    keys: slice
    score_options: ScoreOptions
    mask: Array | None
    out: Array
    logsumexp: Array


class _Operands(NamedTuple):
    """Queries (B, T, H, D), keys (B, S, K, D) and values (B, S, K, E), or arrays for their gradients."""

    q: Array
    k: Array
    v: Array

    def of_items(self, items: slice) -> _Operands:
        """Return views of the operands for a range of batch items."""
        return _Operands(self.q[items], self.k[items], self.v[items])

    def of_part(self, part: _Part) -> _Operands:
        """Return views of the operands of one key block: the queries that see it, its keys and values."""
        return _Operands(self.q[:, part.queries], self.k[:, part.keys], self.v[:, part.keys])


class _Kept(NamedTuple):
    """Intermediate results of some batch items for the backward pass."""

    parts: list[_Part]
    factors: list[Array | int]
    logsumexp: Array | None  # with exact scales
    mask: Array | None


class BlockSoftmax(RowSoftmax):
    """Softmax within each block of keys, times a scale for each block and query position.

    With the exact scales, the fraction of all exponentials in each block, the result equals the softmax of the whole
    row; FlashAttention computes them on the fly (Dao et al. 2022). Here they are learned and independent of the input,
    so that the blocks are independent of each other.

    Args:
        n_blocks: the number of key blocks of equal length (the last may be shorter).
        correction: "learned": scales are an argument of each call. "none": all are 1. "exact": the exact scales of each
            row, which learned ones approximate.
        per_head: whether each attention head has its own scales.
        length: the number of keys that are divided into blocks; by default those of the call. A layer passes its
            context window, so that a key stays in the same block while the text grows.
        per_position: whether each query position has its own scales; otherwise there is one for each pair of a key
            block and a query block.
    """

    name, config_fields = "block_softmax", ("softmax_blocks",)

    def __init__(
        self,
        n_blocks: int = 2,
        correction: str = "learned",
        per_head: bool = False,
        length: int | None = None,
        per_position: bool = True,
    ) -> None:
        check_positive("BlockSoftmax", n_blocks=n_blocks)
        if correction not in ("learned", "none", "exact"):
            raise ValueError(f"BlockSoftmax: expected correction to be learned, none or exact, got {correction!r}")
        self.n_blocks, self.correction, self.per_head, self.length = n_blocks, correction, per_head, length
        self.per_position = per_position

    def for_layer(self, n_heads: int, context_window: int | None) -> tuple[BlockSoftmax, Tensor | None]:
        """Return a copy for the layer's length; ones ([H,] n_blocks, W or n_blocks) if "learned" (needs W), or None."""
        if context_window is None and self.correction == "learned":
            raise ValueError(f"{self}: expected a layer with a context_window")
        length = self.length or context_window
        chosen = BlockSoftmax(self.n_blocks, self.correction, self.per_head, length, self.per_position)
        heads = (n_heads,) if self.per_head else ()
        shape = (*heads, self.n_blocks, context_window if self.per_position else self.n_blocks)
        return chosen, Parameter(np.ones(shape), "scale") if self.correction == "learned" else None

    def expand_scales(self, scales: Array, n_keys: int) -> Array:
        """Return scales if `per_position`, else repeat each over a block's positions; ValueError for a misfit shape.

        Args:
            scales: ([H,] n_blocks, W), or without `per_position` ([H,] n_blocks of keys, n_blocks of queries).
            n_keys: the number of keys of the call, which are divided into blocks if there is no `length`.

        Raises:
            ValueError: not one scale for each pair of blocks.
        """
        if self.per_position:
            return scales
        if scales.shape[-2:] != (self.n_blocks, self.n_blocks):
            wanted = f"([heads,] {self.n_blocks}, {self.n_blocks})"
            raise ValueError(f"{self}: expected a scale for each pair of blocks, {wanted}, got {scales.shape}")
        return array_module(scales).repeat(scales, self._step(n_keys), axis=-1)

    def scales_of_queries(self, scales: Tensor, first: int, n_queries: int, n_keys: int) -> Tensor:
        """Return the scales ([H,] n_blocks, T) of T queries from position `first` on, from the scales of `attend`."""
        positions = np.arange(first, first + n_queries)
        return scales[..., positions if self.per_position else positions // self._step(n_keys)]

    def forward(self, x: Operand, scales: Tensor | None = None) -> Tensor:
        """Compute softmax per key block, times 1, `scales` or the block's probability; ValueError for misfit scales.

        Args:
            x: scores (..., T, S).
            scales: (..., n_blocks, T), only with the correction "learned".

        Raises:
            ValueError: scales are missing, have a wrong shape, or are not used by the correction.
        """
        x = as_non_scalar(self, x)
        wanted = (self.n_blocks, *x.shape[-2:-1]) if self.correction == "learned" else None
        got = None if scales is None else scales.shape
        if (got if got is None or wanted is None else got[-len(wanted) :]) != wanted:
            raise ValueError(f"{self}: expected scales of shape (..., n_blocks, T), here {wanted}, got {got}")
        whole, parts = Softmax()(x), []
        for i, keys in enumerate(self._blocks(x.shape[-1])):
            part = Softmax()(x[..., keys])
            if self.correction == "exact":
                part = part * whole[..., keys].sum(axis=-1, keepdims=True)
            elif scales is not None:
                part = part * (scales[i] if x.ndim == 1 else scales[..., i, :, None])
            parts.append(part)
        result = extra_ops.concatenate(parts, axis=-1) if parts else whole
        result.name = self.name
        return result

    def row_softmax(self, scores: Array, scales: Array | None = None) -> Array:
        """Return the weights of scores (..., T, S) without gradients; scales (..., n_blocks, T) only if "learned"."""
        with no_grad():
            return self(Tensor(scores), None if scales is None else Tensor(scales)).array

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        score_options: ScoreOptions,
        mask: Array | None = None,
        scales: Array | None = None,
        *,
        dtype: Any = None,
    ) -> tuple[Array, AttendBackward]:
        """Return attention (B, T, H, E) of scaled key blocks, and `backward`, which fills dq, dk, dv, returns dscales.

        Args:
            scales: ([H,] n_blocks, W) for at least as many positions as queries, or one for each pair of blocks, see
                `expand_scales`; only with the correction "learned".

        Raises:
            ValueError: scales are missing, too few, or not used by the correction; or keys after the last block.
        """
        xp, start = array_module(q), score_options.offset or 0
        scales = self._checked(scales, k.shape[1], start + q.shape[1])
        operands = _Operands(q, k, v)
        kept: dict[int, _Kept] = {}
        out = xp.zeros((*q.shape[:3], v.shape[3]), dtype or q.dtype)

        def forward(items: slice) -> None:
            here = mask if mask is None or len(mask) == 1 else mask[items]
            parts = self._attend_blocks(*operands.of_items(items), score_options, here)
            exact, shape = self.correction == "exact", (items.stop - items.start, q.shape[2], q.shape[1])
            logsumexp = _log_of_sum(xp, parts, shape) if exact and parts else None
            factors = [self._factor(xp, part, start, scales, logsumexp) for part in parts]
            for part, factor in zip(parts, factors):
                out[items, part.queries] += part.out * factor
            kept[items.start] = _Kept(parts, factors, logsumexp, here)

        batched.run_over_batch(q, forward)

        def backward(grad: Array, dq: Array, dk: Array, dv: Array) -> Array | None:
            by_start: dict[int, Array | None] = {}

            def work(items: slice) -> None:
                mine = operands.of_items(items)
                grads = _Operands(dq, dk, dv).of_items(items)
                of_these = kept[items.start]
                if of_these.logsumexp is None:
                    by_start[items.start] = self._backward_blocks(grad[items], mine, grads, of_these, start, scales)
                else:  # with exact scales it is attention to the whole row
                    whole = (out[items], of_these.logsumexp, score_options, *grads, of_these.mask)
                    kernels.attention_backward(grad[items], *mine, *whole)

            batched.run_over_batch(q, work)
            if scales is None:
                return None
            dscales = xp.stack([by_start[first] for first in sorted(by_start)]).sum(axis=0)
            if self.per_position:
                return dscales
            return dscales.reshape(*dscales.shape[:-1], self.n_blocks, -1).sum(axis=-1)

        return out, backward

    def _checked(self, scales: Array | None, n_keys: int, last: int) -> Array | None:
        """Return the scales expanded to one per position, None without any; ValueError if they do not fit.

        Args:
            last: the number of positions up to the last query.
        """
        placed = None if scales is None else self.expand_scales(scales, n_keys)
        wanted = (self.n_blocks, last) if self.correction == "learned" else None
        got = None if placed is None else (placed.shape[-2], min(placed.shape[-1], last))
        if got != wanted or (wanted and n_keys > (self.length or n_keys)):
            got_all = f"{n_keys} keys and scales {None if scales is None else scales.shape}"
            raise ValueError(f"{self}: expected no more keys than length and scales {wanted} or longer, got {got_all}")
        return placed

    def _attend_blocks(
        self, q: Array, k: Array, v: Array, score_options: ScoreOptions, mask: Array | None
    ) -> list[_Part]:
        """Attend to each key block that any query sees; return their ranges, outputs and logsumexps."""
        n_queries, parts = q.shape[1], []
        for i, keys in enumerate(self._blocks(k.shape[1])):
            queries = queries_with_keys(
                block_score_options(score_options, 0, keys.start), n_queries, keys.stop - keys.start
            )
            if queries.start == queries.stop:
                continue
            part_scoring = block_score_options(score_options, queries.start, keys.start)
            here = None if mask is None else mask[:, :, queries if mask.shape[2] > 1 else slice(None), keys]
            results = kernels.attention(q[:, queries], k[:, keys], v[:, keys], part_scoring, False, here)
            parts.append(_Part(i, queries, keys, part_scoring, here, *results))
        return parts

    def _backward_blocks(
        self, grad: Array, operands: _Operands, grads: _Operands, kept: _Kept, start: int, scales: Array | None
    ) -> Array | None:
        """Write the gradients of queries, keys and values into `grads`; return that of the scales, None without.

        Args:
            start: the position of the first query.
        """
        xp = array_module(grad)
        dscales = None if scales is None else xp.zeros_like(scales)
        for array in grads:
            array[...] = 0
        for part, factor in zip(kept.parts, kept.factors):
            part_grad = grad[:, part.queries]
            if dscales is not None:
                shares = (part_grad * part.out).sum(axis=-1).sum(axis=0)  # (T, H)
                places = slice(part.queries.start + start, part.queries.stop + start)
                dscales[..., part.block, places] = shares.T if self.per_head else shares.sum(axis=1)
                part_grad = part_grad * factor
            mine = operands.of_part(part)
            _, dk, dv = grads.of_part(part)
            dq = xp.empty(mine.q.shape, mine.q.dtype)  # a query may see several blocks
            saved = (part.out, part.logsumexp, part.score_options)
            kernels.attention_backward(part_grad, *mine, *saved, dq, dk, dv, part.mask)
            grads.q[:, part.queries] += dq
        return dscales

    def _step(self, n_keys: int) -> int:
        """Return the length of a key block: `length`, else n_keys, over n_blocks, rounded up; at least 1."""
        return max(1, -(-(self.length or n_keys) // self.n_blocks))

    def _blocks(self, n_keys: int) -> list[slice]:
        """Return the slices of the key blocks, of equal length but the last, which ends at `n_keys`."""
        step = self._step(n_keys)
        return [slice(start, min(start + step, n_keys)) for start in range(0, n_keys, step)]

    def _factor(self, xp: Any, part: _Part, start: int, scales: Array | None, logsumexp: Array | None) -> Array | int:
        """Return the factor of a block's output per query: its probability with `logsumexp`, else its scale, else 1."""
        if logsumexp is not None:
            return xp.exp(part.logsumexp - logsumexp[..., part.queries]).transpose(0, 2, 1)[..., None]
        if scales is None:
            return 1
        at = scales[..., part.block, start + part.queries.start : start + part.queries.stop]
        return at.T.reshape(at.shape[-1], -1, 1)


def _log_of_sum(xp: Any, parts: list[_Part], shape: tuple[int, ...]) -> Array:
    """Return the logsumexp (B, H, T) of each row from those of its blocks; -inf for a row without any."""
    logs = xp.full((len(parts), *shape), -np.inf, parts[0].logsumexp.dtype)
    for i, part in enumerate(parts):
        logs[i][..., part.queries] = part.logsumexp
    largest = logs.max(axis=0)
    largest = xp.where(xp.isneginf(largest), 0, largest)
    total = xp.exp(logs - largest).sum(axis=0)
    return largest + xp.log(xp.where(total == 0, 1, total))
