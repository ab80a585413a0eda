"""`StateSpaceScan`: the recurrence of a selective state-space model, computed in chunks.

The state S (N, P) of each head decays and adds one outer product per token: S_t = e^(d_t) S_(t-1) + k_t v_t^T, and the
output is y_t = S_t^T q_t. This equals causal attention without a softmax, whose weights q_t . k_s are multiplied by
the decay e^(d_(s+1) + ... + d_t) (Dao and Gu 2024, "Transformers are SSMs", sections 3 and 6). Within a chunk of tokens
it is computed as attention, by matrix products; between chunks by the state, so the time is linear in the tokens.

Shapes: B batch, T tokens, H heads, P channels per head, G groups of heads that share keys and queries, F = B G groups
of all items, R heads per group, N state size, Q tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tricycle import kernels
from tricycle.attention.cache import KeyValueCache
from tricycle.autograd import NeedsGrad, grad_enabled_for
from tricycle.devices import Array, array_module
from tricycle.kernels.batched import run_over_batch
from tricycle.ops import Op, as_floating, as_tensors, check_device, check_positive
from tricycle.tensor import Operand, Tensor, record


@dataclass
class Chunk:
    """A chunk's inputs by group, and its decays."""

    v: Array  # (F, R, Q, P)
    k: Array  # (F, 1, Q, N)
    q: Array  # (F, 1, Q, N)
    within: Array  # (F, R, Q, Q): from each token s to each later t, 0 for earlier t
    since_start: Array  # (F, R, Q, 1): from the state before the chunk
    until_end: Array  # (F, R, Q, 1): to the state after the chunk
    whole: Array  # (F, R, 1, 1): of the state over the chunk


class ChunkedScan(Op, is_base=True):
    """The base of operations whose state decays and adds outer products of keys and values, computed in chunks.

    Args:
        chunk_size: Q. The results are equal up to rounding; memory for the weights grows with it, T Q per head.
    """

    def __init__(self, chunk_size: int = 32) -> None:
        check_positive(type(self).__name__, chunk_size=chunk_size)
        self.chunk_size = chunk_size

    def scan(self, *inputs: Array, state: Array | None = None) -> tuple[Array, Array]:
        """Return y and the last state (B, H, N, P), from a state (default zeros), without gradients; see `forward`."""
        return self._scan(inputs, state)[:2]

    def continue_from(self, cache: KeyValueCache | None, *inputs: Tensor) -> Tensor:
        """Return y; with a cache, from its state, which is updated, without gradients."""
        if cache is None:
            return self(*inputs)
        out, cache.last["state"] = self.scan(*(x.array for x in inputs), state=cache.last.get("state"))
        return Tensor(out, False)

    def _arrays(self, *tensors: Tensor) -> list[Array]:
        """Return the inputs as arrays of one dtype; ValueError for other shapes than those of `forward`."""
        arrays = [as_floating(tensor.array) for tensor in tensors]
        _check_shapes(self, *arrays)
        dtype = array_module(arrays[0]).result_type(*arrays)
        return [array.astype(dtype, copy=False) for array in arrays]

    def _scan(
        self, inputs: Sequence[Array], state: Array | None, keep_states: bool = False
    ) -> tuple[Array, Array, list[Array]]:
        """Return y, the last state, and the states (F, R, N, P) before all chunks, [] unless `keep_states`."""
        v, _, k, *_ = inputs
        by_group = [_by_group(x, k.shape[2]) for x in inputs]
        shape = (*by_group[0].shape[:2], k.shape[3], v.shape[3])
        last = array_module(v).zeros(shape, v.dtype) if state is None else state.reshape(shape).copy()
        out = kernels.empty(v, by_group[0].shape)
        chunks = self._chunks(v.shape[1])
        states = [kernels.empty(v, shape) for _ in chunks] if keep_states else []

        def work(groups: slice) -> None:
            s = last[groups]
            for number, tokens in enumerate(chunks):
                c = self._chunk(s, *(x[groups, :, tokens] for x in by_group))
                if keep_states:
                    states[number][groups] = s
                out[groups, :, tokens] = (c.q @ c.k.swapaxes(-1, -2) * c.within) @ c.v + c.since_start * (c.q @ s)
                s = c.whole * s + (c.k * c.until_end).swapaxes(-1, -2) @ c.v
            last[groups] = s

        run_over_batch(out, work)
        return _by_token(out, v.shape), last.reshape(len(v), v.shape[2], *shape[2:]), states

    def _gradients(self, grad: Array, inputs: Sequence[Array], states: list[Array]) -> list[Array]:
        """Return the gradients of the inputs of `forward`; chunks are recomputed, from the last to the first."""
        xp, n_groups, chunks = array_module(grad), inputs[2].shape[2], self._chunks(grad.shape[1])
        out, *by_group = (_by_group(x, n_groups) for x in (grad, *inputs))
        grads = [kernels.empty(x, x.shape) for x in by_group]

        def work(groups: slice) -> None:
            ds: Array | None = None  # of the state after the chunk; nothing follows the last one
            for states_before, tokens in zip(reversed(states), reversed(chunks)):
                s, rows = states_before[groups], (groups, slice(None), tokens)
                c = self._chunk(s, *(x[rows] for x in by_group))
                (dv, dsums, dk, dq, *others), ds = self._chunk_gradients(c, s, out[rows], ds)
                ddecays = xp.flip(xp.cumsum(xp.flip(dsums, -1), axis=-1), -1)[..., None]
                dk, dq = dk.sum(axis=1, keepdims=True), dq.sum(axis=1, keepdims=True)
                for gradient, part in zip(grads, (dv, ddecays, dk, dq, *others)):
                    gradient[rows] = part

        run_over_batch(out, work)
        return [_by_token(gradient, x.shape) for gradient, x in zip(grads, inputs)]

    def _chunks(self, n_tokens: int) -> list[slice]:
        """Return the tokens of each chunk."""
        return [slice(start, start + self.chunk_size) for start in range(0, n_tokens, self.chunk_size)]

    def _chunk(self, s: Array, v: Array, decays: Array, k: Array, q: Array, *others: Array) -> Chunk:
        """Return the `Chunk` of these tokens (F, R, Q, ...), which follow the state s; a subclass may use the rest."""
        return new_chunk(v, decays, k, q)

    def _chunk_gradients(self, c: Any, s: Array, dy: Array, ds: Array | None) -> tuple[list[Array], Array]:
        """Return gradients by head of v, of the sums of decays from the start, k, q, others; and of the state before.

        Args:
            s: the state before the chunk.
            dy, ds: the gradients of the output and of the state after the chunk, None for 0.
        """
        scores, products = c.q @ c.k.swapaxes(-1, -2), dy @ c.v.swapaxes(-1, -2)
        dscores = products * c.within
        decayed = dy * c.since_start
        dq = dscores @ c.k + decayed @ s.swapaxes(-1, -2)
        dk = dscores.swapaxes(-1, -2) @ c.q
        dv = (scores * c.within).swapaxes(-1, -2) @ dy
        # A weight is e^(D_t - D_s), where D is the sum of the decays from the start of the chunk.
        by_weight = dscores * scores
        dsums = by_weight.sum(axis=-1) - by_weight.sum(axis=-2) + (decayed * (c.q @ s)).sum(axis=-1)
        ds_before = c.q.swapaxes(-1, -2) @ decayed
        if ds is not None:
            of_state = c.until_end * (c.k @ ds)
            dv += of_state
            dk += (c.until_end * c.v) @ ds.swapaxes(-1, -2)
            by_end = (of_state * c.v).sum(axis=-1)
            dsums -= by_end
            dsums[..., -1] += by_end.sum(axis=-1) + (c.whole * s * ds).sum(axis=(-1, -2))
            ds_before += c.whole * ds
        return [dv, dsums, dk, dq], ds_before


class StateSpaceScan(ChunkedScan):
    """y_t = S_t^T q_t with S_t = e^(d_t) S_(t-1) + k_t v_t^T, from a state of zeros; see `ChunkedScan`."""

    name = "state_space_scan"

    def forward(self, v: Operand, decays: Operand, k: Operand, q: Operand) -> Tensor:
        """Return y (B, T, H, P) of values v (B, T, H, P), log decays d (B, T, H), keys and queries (B, T, G, N).

        Raises:
            ValueError: other shapes, or H is not a multiple of G.
        """
        tensors = as_tensors(v, decays, k, q)
        arrays = self._arrays(*tensors)
        out, _, states = self._scan(arrays, None, grad_enabled_for(*tensors))

        def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array]:
            return self._gradients(grad, arrays, states)

        return record(out, tensors, backward, self.name)

    def weights(self, v: Array, decays: Array, k: Array, q: Array) -> Array:
        """Return the matrix (B, H, T, T) that maps the values to y: q_t . k_s times the decay from s to t, 0 for s > t.

        Its memory is quadratic in the tokens: it is for inspection. See `forward` for the shapes.
        """
        c = new_chunk(*(_by_group(x, k.shape[2]) for x in (v, decays, k, q)))
        matrix: Array = c.q @ c.k.swapaxes(-1, -2) * c.within
        return matrix.reshape(len(v), v.shape[2], *matrix.shape[2:])


def _check_shapes(op: Op, v: Array, decays: Array, k: Array, q: Array, *others: Array) -> None:
    """Raise ValueError unless the inputs fit; `others` have the shape of `decays`."""
    title = type(op).__name__
    if len({type(x) for x in (v, decays, k, q, *others)}) > 1:
        check_device(title, v, decays, k, q, *others)
    heads = v.shape[:3]
    fits = v.ndim == k.ndim == 4 and k.shape == q.shape and k.shape[:2] == v.shape[:2]
    fits = fits and all(x.shape == heads for x in (decays, *others))
    if not fits or k.shape[2] == 0 or v.shape[2] % k.shape[2]:
        rest = " and strengths" if others else ""
        expected = f"v (B, T, H, P), decays{rest} (B, T, H), k and q (B, T, G, N), H a multiple of G"
        got = ", ".join(str(x.shape) for x in (v, decays, k, q, *others))
        raise ValueError(f"{title}: expected {expected}, got shapes {got}")


def new_chunk(v: Array, decays: Array, k: Array, q: Array) -> Chunk:
    """Return the `Chunk` of tokens (F, R, Q, ...): their decays within the chunk, since its start and until its end."""
    xp, n_tokens = array_module(v), v.shape[2]
    # Sums from each token s on, as differences of sums from the first token on would cancel.
    exponents = xp.cumsum(xp.where(xp.tri(n_tokens, k=-1, dtype=bool), decays, 0), axis=-2)
    within = xp.where(xp.tri(n_tokens, dtype=bool), xp.exp(exponents), 0)
    since_start = xp.exp(xp.cumsum(decays, axis=-2))
    until_end = within[..., -1:, :].swapaxes(-1, -2)
    return Chunk(v, k, q, within, since_start, until_end, since_start[..., -1:, :])


def _by_group(x: Array, n_groups: int) -> Array:
    """Copy x (B, T, H, P), or (B, T, H) with P = 1, to (F, R, T, P): its H heads as R heads of each of G groups."""
    n_items, n_tokens, n_heads = x.shape[:3]
    by_item = x.reshape(n_items, n_tokens, n_groups, n_heads // n_groups, math.prod(x.shape[3:])).transpose(
        0, 2, 3, 1, 4
    )
    return by_item.reshape(n_items * n_groups, *by_item.shape[2:])


def _by_token(x: Array, shape: tuple[int, ...]) -> Array:
    """Bring x (F, R, T, P) to a shape (B, T, H, P), or (B, T, H) for P = 1: the inverse of `_by_group`."""
    by_head = x.reshape(shape[0], shape[2], shape[1], x.shape[-1])
    return by_head.swapaxes(1, 2).reshape(shape)
