"""`GatedDeltaRule`: linear attention whose state replaces the value of a key, computed in chunks.

The state S (N, P) of each head decays, and moves the value that it returns for the key k_t towards v_t, by a strength
b_t from 0 to 1: S_t = e^(d_t) S_(t-1) + k_t u_t^T with the update u_t = b_t (v_t - e^(d_t) S_(t-1)^T k_t). The output
is y_t = S_t^T q_t. With the updates as values this is the scan of a state-space model. Those of a chunk depend on each
other and on the state S before it by a triangular system of equations (the WY representation),

    (I + A) U = b (V - e^D K S),    A_ts = b_t e^(D_t - D_s) k_t . k_s for s < t, else 0,

where D_t is the sum of the decays from the start of the chunk to token t.

Sources: Yang et al. 2024, "Parallelizing linear transformers with the delta rule over sequence length", sections 3.2
and 3.3; Yang, Kautz and Hatamizadeh 2025, "Gated delta networks", section 3.

Shapes: see `tricycle/state_spaces/scan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tricycle.autograd import NeedsGrad, grad_enabled_for
from tricycle.devices import Array, array_module
from tricycle.ops import as_tensors
from tricycle.state_spaces.scan import Chunk, ChunkedScan, new_chunk
from tricycle.tensor import Operand, Tensor, record

MAX_LAPACK_SIZE = 8  # of a triangular matrix that is inverted at once


@dataclass
class _DeltaChunk(Chunk):
    """A chunk whose values are the updates U, and what their gradients need."""

    strengths: Array  # b, (B, G, R, Q, 1)
    weights: Array  # A, (B, G, R, Q, Q)
    inverse: Array  # (I + A)^-1
    errors: Array  # V - e^D K S, (B, G, R, Q, P)


class GatedDeltaRule(ChunkedScan):
    """y_t = S_t^T q_t with S_t = e^(d_t) S_(t-1) + k_t u_t^T, u_t = b_t (v_t - e^(d_t) S_(t-1)^T k_t), S_0 = 0.

    See `ChunkedScan`. The time of a chunk includes the inversion of a triangular matrix (Q, Q) for each head.
    """

    name = "gated_delta_rule"
    threads_share_items = False  # two threads would take longer: after each of many short calls they wait for the GIL

    def forward(self, v: Operand, decays: Operand, k: Operand, q: Operand, strengths: Operand) -> Tensor:
        """Return y (B, T, H, P) of v (B, T, H, P), log decays d and strengths b (B, T, H), k and q (B, T, G, N).

        Raises:
            ValueError: other shapes, or H is not a multiple of G.
        """
        tensors = as_tensors(v, decays, k, q, strengths)
        arrays = self._arrays(*tensors)
        out, _, states = self._scan(arrays, None, grad_enabled_for(*tensors))

        def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array]:
            return self._gradients(grad, arrays, states)

        return record(out, tensors, backward, self.name)

    def _chunk(self, s: Array, v: Array, decays: Array, k: Array, q: Array, *others: Array) -> _DeltaChunk:
        """Return the chunk of tokens (B, G, R, Q, ...) after the state s, with the rule's updates as its values."""
        xp, c, (strengths,) = array_module(v), new_chunk(v, decays, k, q), others
        weights = xp.tril(c.within * strengths * (c.k @ c.k.swapaxes(-1, -2)), -1)
        inverse = _inverse(weights)
        errors = c.v - c.since_start * (c.k @ s)
        c.v = inverse @ (strengths * errors)
        return _DeltaChunk(**vars(c), strengths=strengths, weights=weights, inverse=inverse, errors=errors)

    def _chunk_gradients(self, c: Any, s: Array, dy: Array, ds: Array | None) -> tuple[list[Array], Array]:
        """Return [dv, dsums, dk, dq, dstrengths (..., 1)] and the prior state's gradient, through the solved system."""
        (du, dsums, dk, dq), ds_before = super()._chunk_gradients(c, s, dy, ds)
        to_solution = c.inverse.swapaxes(-1, -2) @ du  # the gradient of b (V - e^D K S)
        dv = to_solution * c.strengths
        decayed = dv * c.since_start
        dk = dk - decayed @ s.swapaxes(-1, -2)
        dsums -= (decayed * (c.k @ s)).sum(axis=-1)
        ds_before -= c.k.swapaxes(-1, -2) @ decayed
        xp = array_module(dy)
        dweights = xp.tril(to_solution @ c.v.swapaxes(-1, -2), -1)  # of -A
        by_weight = dweights * c.weights
        dsums += by_weight.sum(axis=-2) - by_weight.sum(axis=-1)
        products = c.k @ c.k.swapaxes(-1, -2)
        dstrengths = (to_solution * c.errors).sum(axis=-1) - (dweights * c.within * products).sum(axis=-1)
        dproducts = dweights * c.within * c.strengths
        dk -= (dproducts + dproducts.swapaxes(-1, -2)) @ c.k
        return [dv, dsums, dk, dq, dstrengths[..., None]], ds_before


def _inverse(weights: Array) -> Array:
    """Return (I + A)^-1 of strictly lower triangular matrices A (..., Q, Q), from those of two diagonal blocks.

    The block below is -D C B, where B and D are the inverses and C the block of A. LAPACK takes twice as long.
    """
    xp, size = array_module(weights), weights.shape[-1]
    if size <= MAX_LAPACK_SIZE:
        return xp.linalg.inv(weights + xp.eye(size, dtype=weights.dtype))
    half = size // 2
    inverse = xp.zeros_like(weights)
    first = inverse[..., :half, :half] = _inverse(weights[..., :half, :half])
    second = inverse[..., half:, half:] = _inverse(weights[..., half:, half:])
    inverse[..., half:, :half] = -(second @ weights[..., half:, :half]) @ first
    return inverse
