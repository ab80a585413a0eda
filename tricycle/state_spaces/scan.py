"""`StateSpaceScan`: the recurrence of a selective state-space model, computed in chunks.

The state S (N, P) of each head decays and adds one outer product per token: S_t = e^(d_t) S_(t-1) + k_t v_t^T, and the
output is y_t = S_t^T q_t. This equals causal attention without a softmax, whose weights q_t . k_s are multiplied by
the decay e^(d_(s+1) + ... + d_t) (Dao and Gu 2024, "Transformers are SSMs", sections 3 and 6). Within a chunk of tokens
it is computed as attention, by matrix products; between chunks by the state, so the time is linear in the tokens.

Shapes: B batch, T tokens, H heads, P channels per head, G groups of heads that share keys and queries, R heads per
group, N state size, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.attention.cache import KeyValueCache
from tricycle.autograd import NeedsGrad, grad_enabled_for
from tricycle.devices import Array, array_module
from tricycle.kernels.batched import run_over_batch
from tricycle.ops import Op, as_floating, as_tensors, check_device, check_positive
from tricycle.tensor import Operand, Tensor, record

MIN_DECAY = -1000.0  # of the logarithm: less makes no difference, for e to this power is 0


@dataclass
class Chunk:
    """A chunk's inputs in the order of the matrix products, and its decays."""

    v: Array  # (B, G, R, Q, P)
    k: Array  # (B, G, 1, Q, N)
    q: Array  # (B, G, 1, Q, N)
    within: Array  # (B, G, R, Q, Q): from each token s to each later t, 0 for earlier t
    since_start: Array  # (B, G, R, Q, 1): from the state before the chunk
    until_end: Array  # (B, G, R, Q, 1): to the state after the chunk
    whole: Array  # (B, G, R, 1, 1): of the state over the chunk


class ChunkedScan(Op, is_base=True):
    """The base of operations whose state decays and adds outer products of keys and values, computed in chunks.

    Args:
        chunk_size: Q. The results are equal up to rounding; memory for the weights grows with it, T Q per head.
    """

    threads_share_items = True

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
        """Return y, the last state, and the states (B, G, R, N, P) before all chunks, [] unless `keep_states`."""
        v, _, k, *_ = inputs
        xp, (n_items, n_tokens, n_heads, size) = array_module(v), v.shape
        shape = n_items, k.shape[2], n_heads // k.shape[2], k.shape[3], size
        last = xp.zeros(shape, v.dtype) if state is None else state.reshape(shape).copy()
        out = kernels.empty(v, v.shape)
        *operands, y = (_by_head(x, k.shape[2]) for x in (*inputs, out))
        chunks = self._chunks(n_tokens)
        states = [kernels.empty(v, shape) for _ in chunks] if keep_states else []

        def work(items: slice) -> None:
            s = last[items]
            for number, tokens in enumerate(chunks):
                rows = items, ..., tokens, slice(None)
                c = self._chunk(s, *(xp.ascontiguousarray(x[rows]) for x in operands))
                if keep_states:
                    states[number][items] = s
                y[rows] = (c.q @ c.k.swapaxes(-1, -2) * c.within) @ c.v + c.since_start * (c.q @ s)
                s = c.whole * s + (c.k * c.until_end).swapaxes(-1, -2) @ c.v
            last[items] = s

        self._run(v, work)
        return out, last.reshape(n_items, n_heads, *shape[3:]), states

    def _gradients(self, grad: Array, inputs: Sequence[Array], states: list[Array]) -> list[Array]:
        """Return the gradients of the inputs of `forward`; chunks are recomputed, from the last to the first."""
        xp, n_groups, chunks = array_module(grad), inputs[2].shape[2], self._chunks(grad.shape[1])
        grads = [kernels.empty(x, x.shape) for x in inputs]
        operands = [_by_head(x, n_groups) for x in (grad, *inputs)]
        targets = [_by_head(x, n_groups) for x in grads]

        def work(items: slice) -> None:
            ds: Array | None = None  # of the state after the chunk; nothing follows the last one
            for states_before, tokens in zip(reversed(states), reversed(chunks)):
                s, rows = states_before[items], (items, ..., tokens, slice(None))
                dy, *parts = (xp.ascontiguousarray(x[rows]) for x in operands)
                c = self._chunk(s, *parts)
                (dv, dsums, dk, dq, *others), ds = self._chunk_gradients(c, s, dy, ds)
                ddecays = xp.flip(xp.cumsum(xp.flip(dsums, -1), axis=-1), -1)[..., None]
                dk, dq = dk.sum(axis=2, keepdims=True), dq.sum(axis=2, keepdims=True)
                for target, gradient in zip(targets, (dv, ddecays, dk, dq, *others)):
                    target[rows] = gradient

        self._run(grad, work)
        return grads

    def _run(self, x: Array, work: Callable[[slice], None]) -> None:
        """Call `work` for all items of x (B, ...), which threads share unless its calls are too short for that."""
        if self.threads_share_items:
            run_over_batch(x, work)
        else:
            work(slice(0, len(x)))

    def _chunks(self, n_tokens: int) -> list[slice]:
        """Return the tokens of each chunk."""
        return [slice(start, start + self.chunk_size) for start in range(0, n_tokens, self.chunk_size)]

    def _chunk(self, s: Array, v: Array, decays: Array, k: Array, q: Array, *others: Array) -> Chunk:
        """Return the `Chunk` of tokens (B, G, R, Q, ...), which follow the state s; a subclass may use the rest."""
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
        c = new_chunk(*(_by_head(x, k.shape[2]) for x in (v, decays, k, q)))
        matrix = c.q @ c.k.swapaxes(-1, -2) * c.within
        return matrix.reshape(len(v), v.shape[2], *matrix.shape[3:])


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
    """Return the `Chunk` of tokens (B, G, R, Q, ...), with decays within the chunk, since its start and to its end."""
    xp = array_module(v)
    # In float64, because differences of sums would cancel in float32; without infinities, which would give NaN.
    sums = xp.cumsum(xp.maximum(decays, MIN_DECAY), axis=-2, dtype=np.float64)
    exponents = (sums - sums.swapaxes(-1, -2)).astype(v.dtype)
    within = xp.exp(xp.where(xp.tri(v.shape[-2], dtype=bool), exponents, -np.inf))
    since_start = xp.exp(sums).astype(v.dtype)
    until_end = within[..., -1:, :].swapaxes(-1, -2)
    return Chunk(v, k, q, within, since_start, until_end, since_start[..., -1:, :])


def _by_head(x: Array, n_groups: int) -> Array:
    """Return a view (B, G, R, T, P) of x (B, T, H, P), or (B, T, H) with P = 1: H heads as R of each of G groups."""
    x = x if x.ndim == 4 else x[..., None]
    n_items, n_tokens, n_heads, size = x.shape
    return x.reshape(n_items, n_tokens, n_groups, n_heads // n_groups, size).transpose(0, 2, 3, 1, 4)
