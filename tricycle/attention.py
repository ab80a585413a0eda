"""Attention as pure functions of Tensors, and the cache of keys and values for generation.

Shapes: B batch, T tokens, S keys, H heads, D head size, C = H * D channels.
"""

from __future__ import annotations

import numpy as np

from tricycle import kernels
from tricycle.backend import Array, array_module
from tricycle.ops import Op, as_tensor, floating
from tricycle.tensor import Tensor, record


class KeyValueCache:
    """The keys and values of the tokens that one attention layer has seen, for generation without gradients.

    Args:
        capacity: how many tokens fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Array | None = None
        self._values: Array | None = None

    def append(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add (B, T, H, D) keys and values; returns those of all tokens so far.

        Raises:
            ValueError: more tokens than the cache holds, or another batch size than before.
        """
        n_items, n_tokens, n_heads, size = keys.shape
        if self.length + n_tokens > self.capacity:
            raise ValueError(f"KeyValueCache: {self.length} + {n_tokens} tokens exceed its capacity of {self.capacity}")
        if self._keys is None or self._values is None:
            shape = (n_items, self.capacity, n_heads, size)
            self._keys, self._values = (array_module(x).empty(shape, x.dtype) for x in (keys, values))
        if len(self._keys) != n_items:
            raise ValueError(f"KeyValueCache: expected a batch of {len(self._keys)}, got {n_items}")
        new = slice(self.length, self.length + n_tokens)
        self._keys[:, new], self._values[:, new] = keys, values
        self.length += n_tokens
        return self._keys[:, : self.length], self._values[:, : self.length]


class SelfAttention(Op):
    """softmax(Q K^T / sqrt(D)) V in each head, forward and backward as one node of the graph.

    Source: Vaswani et al. 2017, section 3.2.

    Args:
        n_heads: heads that share the channels evenly.
        causal: a token sees itself and the tokens before it.
    """

    def __init__(self, n_heads: int, causal: bool = True) -> None:
        self.n_heads = n_heads
        self.causal = causal

    def forward(self, qkv: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """
        Args:
            qkv: (B, T, 3 C): queries, keys and values side by side.
            cache: earlier keys and values, to which these are added. No gradient flows through it.

        Returns:
            (B, T, C).
        """
        qkv = as_tensor(qkv)
        packed = _split_heads("SelfAttention", floating(qkv.array), self.n_heads)
        q, k, v = (packed[:, :, i] for i in range(3))
        n_items, n_tokens, n_heads, size = q.shape
        shape = (n_items, n_tokens, n_heads * size)
        causal = self.causal
        if cache is not None:
            k, v = cache.append(k, v)
            out, _ = kernels.attention(q, k, v, causal)
            return Tensor(out.reshape(shape), False, qkv.is_batched, "attention")
        out, log_total = kernels.attention(q, k, v, causal)

        def back_fn(grad: Tensor) -> Array:
            dpacked = qkv.xp.empty_like(packed, order="C")
            dq, dk, dv = (dpacked[:, :, i] for i in range(3))
            kernels.attention_backward(grad.array.reshape(out.shape), q, k, v, out, log_total, causal, dq, dk, dv)
            return dpacked.reshape(qkv.shape)

        return record(out.reshape(shape), (qkv,), (back_fn,), "attention")


class Rotary(Op):
    """Turn queries and keys by angles that grow with position, so that their product depends on distance.

    Source: Su et al. 2021, "RoFormer", with channels paired as i and i + D/2.

    Args:
        n_heads: as of the attention that follows.
        base: the slowest pair turns by about 1 / base a token.
    """

    def __init__(self, n_heads: int, base: float = 10_000.0) -> None:
        self.n_heads = n_heads
        self.base = base

    def forward(self, qkv: Tensor, offset: int = 0) -> Tensor:
        """
        Args:
            qkv: (B, T, 3 C): queries, keys and values side by side; the values stay as they are.
            offset: position of the first token.
        """
        qkv = as_tensor(qkv)
        packed = _split_heads("Rotary", floating(qkv.array), self.n_heads)
        n_tokens, size = packed.shape[1], packed.shape[-1]
        if size % 2:
            raise ValueError(f"Rotary: expected an even head size, got {size}")
        xp = qkv.xp
        speeds = self.base ** (-np.arange(0, size, 2) / size)
        angles = np.arange(offset, offset + n_tokens)[:, None] * speeds
        cos, sin = (xp.asarray(f(angles), dtype=packed.dtype) for f in (np.cos, np.sin))

        def turn(array: Array, sin: Array) -> Array:
            turned = xp.empty_like(array, order="C")
            for part in (0, 1):
                turned[:, :, part] = kernels.rotate(array[:, :, part], cos, sin)
            turned[:, :, 2] = array[:, :, 2]
            return turned.reshape(qkv.shape)

        # a rotation is undone by the opposite angle, which is also its gradient
        back_fn = lambda grad: turn(grad.array.reshape(packed.shape), -sin)
        return record(turn(packed, sin), (qkv,), (back_fn,), "rotary")


def _split_heads(op: str, qkv: Array, n_heads: int) -> Array:
    """(B, T, 3 C) as (B, T, 3, H, D), a view.

    Raises:
        ValueError: another number of axes, or channels that do not divide.
    """
    if qkv.ndim != 3 or qkv.shape[-1] % (3 * n_heads):
        wanted = f"(batch, tokens, 3 * {n_heads} * head size)"
        raise ValueError(f"{op}(n_heads={n_heads}): expected shape {wanted}, got {qkv.shape}")
    n_items, n_tokens, width = qkv.shape
    return qkv.reshape(n_items, n_tokens, 3, n_heads, width // (3 * n_heads))
