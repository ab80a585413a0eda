"""Attention as pure functions of Tensors, and the cache of keys and values for generation.

Shapes: B batch, T tokens, S keys, H heads, D head size, C = H * D channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tricycle import kernels
from tricycle.backend import Array, array_module
from tricycle.functions import RowSoftmax, new_softmax, shared_backward
from tricycle.ops import Op, as_tensor, as_tensors, check_device, floating
from tricycle.tensor import Tensor, record

Mask = Tensor | Array | None


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
        return self.keys, self._values[:, : self.length]

    @property
    def keys(self) -> Array:
        """(B, T, H, D) of all tokens so far."""
        return None if self._keys is None else self._keys[:, : self.length]


# -------------------------------------------------------------------- masks
def length_mask(lengths: Sequence[int] | Array, n_keys: int) -> np.ndarray:
    """(B, S) booleans: True for the first `lengths[b]` keys of item b.

    Raises:
        ValueError: a length below 0 or above n_keys, or that is no whole number.
    """
    found = np.asarray(lengths)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        got = f"{found.dtype} of shape {found.shape}"
        raise ValueError(f"length_mask: expected a whole number for each item, got {got}")
    if found.size and not 0 <= found.min() <= found.max() <= n_keys:
        raise ValueError(f"length_mask: expected lengths from 0 to {n_keys}, got {found.min()} to {found.max()}")
    return np.arange(n_keys) < found[:, None]


def additive_mask(op: str, mask: Mask, q: Array, k: Array) -> Array | None:
    """What is added to the scores of queries (B, T, H, D) and keys (B, S, H, D): 0, and -inf where a key is hidden.

    Args:
        mask: booleans, True where a key may be seen: (B, S), (B, T, S) or (B, H, T, S), whose axes may be 1 but for S.

    Returns:
        (B or 1, H or 1, T or 1, S), on the device of the queries.

    Raises:
        ValueError: another dtype or shape.
    """
    if mask is None:
        return None
    xp, given = array_module(q), mask.array if isinstance(mask, Tensor) else mask
    (n_items, n_queries, n_heads, _), n_keys = q.shape, k.shape[1]
    full = {2: (n_items, n_keys), 3: (n_items, n_queries, n_keys), 4: (n_items, n_heads, n_queries, n_keys)}
    wanted = full.get(given.ndim, ())
    fits = [n in (1, m) for n, m in zip(given.shape[:-1], wanted)]
    if not wanted or given.dtype != bool or given.shape[-1] != n_keys or not all(fits):
        shapes = " or ".join(map(str, full.values()))
        raise ValueError(f"{op}: expected a mask of booleans of shape {shapes}, got {given.dtype} of {given.shape}")
    spread = given[(slice(None), *[None] * (4 - given.ndim))]
    return xp.where(xp.asarray(spread), 0, -xp.inf).astype(q.dtype)


# -------------------------------------------------------------------- fused attention
class SelfAttention(Op):
    """softmax(Q K^T / sqrt(D)) V in each head, forward and backward as one node of the graph.

    Source: Vaswani et al. 2017, section 3.2.

    Args:
        n_heads: heads that share the channels evenly.
        causal: a token sees itself and the tokens before it.
        softmax: what turns scores into weights: a name in `functions.SOFTMAXES`, or an object.
    """

    def __init__(self, n_heads: int, causal: bool = True, softmax: str | RowSoftmax = "softmax") -> None:
        self.n_heads = n_heads
        self.causal = causal
        self.softmax = new_softmax(softmax)

    def forward(
        self, qkv: Tensor, cache: KeyValueCache | None = None, scales: Tensor | None = None, mask: Mask = None
    ) -> Tensor:
        """
        Args:
            qkv: (B, T, 3 C): queries, keys and values side by side.
            cache: earlier keys and values, to which these are added. No gradient flows through it.
            scales: the parameter of `BlockSoftmax`.
            mask: as `additive_mask` takes it.

        Returns:
            (B, T, C), zeros where a query sees no key.
        """
        qkv = as_tensor(qkv)
        packed = _split_heads("SelfAttention", floating(qkv.array), self.n_heads)
        q, k, v = (packed[:, :, i] for i in range(3))
        if cache is not None:
            k, v = cache.append(k, v)
        offset = k.shape[1] - q.shape[1] if self.causal else None
        args = (qkv,) if scales is None else (qkv, scales)
        hidden = additive_mask("SelfAttention", mask, q, k)
        out, attend_backward = self.softmax.attend(q, k, v, offset, hidden, *(arg.array for arg in args[1:]))
        shape = (*qkv.shape[:2], qkv.shape[2] // 3)
        if cache is not None:
            return Tensor(out.reshape(shape), False, qkv.is_batched, "attention")

        def backward(grad: Array) -> tuple[Array, ...]:
            dpacked = qkv.xp.empty_like(packed, order="C")
            dscales = attend_backward(grad.reshape(out.shape), *(dpacked[:, :, i] for i in range(3)))
            return dpacked.reshape(qkv.shape), dscales

        return record(out.reshape(shape), args, shared_backward(backward, len(args)), "attention")

    def look(
        self, qkv: Tensor, cache: KeyValueCache | None = None, scales: Tensor | None = None, mask: Mask = None
    ) -> tuple[Array, Array]:
        """The scores before the softmax and the weights after it, both (B, H, T, S), for reading.

        Args:
            cache: with this call's keys in it already.
        """
        packed = _split_heads("SelfAttention", floating(as_tensor(qkv).array), self.n_heads)
        q, k = packed[:, :, 0], packed[:, :, 1] if cache is None else cache.keys
        offset = k.shape[1] - q.shape[1] if self.causal else None
        return look(self.softmax, q, k, offset, additive_mask("SelfAttention", mask, q, k), scales)


class CrossAttention(Op):
    """softmax(Q K^T / sqrt(D)) V where queries come from one sequence, keys and values from another.

    Args:
        n_heads: heads that share the channels evenly.
        softmax: as of `SelfAttention`.
    """

    def __init__(self, n_heads: int, softmax: str | RowSoftmax = "softmax") -> None:
        self.n_heads = n_heads
        self.softmax = new_softmax(softmax)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scales: Tensor | None = None, mask: Mask = None
    ) -> Tensor:
        """
        Args:
            query: (B, T, C). key, value: (B, S, C).
            scales: the parameter of `BlockSoftmax`.
            mask: as `additive_mask` takes it.

        Returns:
            (B, T, C), zeros where a query sees no key.

        Raises:
            ValueError: shapes that do not belong together.
        """
        query, key, value = tensors = as_tensors(query, key, value)
        q, k, v = (self._heads(tensor) for tensor in tensors)
        if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            got = f"{query.shape}, {key.shape} and {value.shape}"
            raise ValueError(f"CrossAttention: expected query (B, T, C), key and value (B, S, C), got shapes {got}")
        check_device("CrossAttention", q, k, v)
        args = tensors if scales is None else (*tensors, scales)
        hidden = additive_mask("CrossAttention", mask, q, k)
        out, attend_backward = self.softmax.attend(q, k, v, None, hidden, *(arg.array for arg in args[3:]))

        def backward(grad: Array) -> tuple[Array, ...]:
            grads = [query.xp.empty(array.shape, array.dtype) for array in (q, k, v)]
            dscales = attend_backward(grad.reshape(out.shape), *grads)
            return (*(array.reshape(tensor.shape) for array, tensor in zip(grads, tensors)), dscales)

        return record(out.reshape(query.shape), args, shared_backward(backward, len(args)), "attention")

    def look(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, scales: Tensor | None = None, mask: Mask = None
    ) -> tuple[Array, Array]:
        """The scores before the softmax and the weights after it, both (B, H, T, S), for reading."""
        q, k = self._heads(as_tensor(query)), self._heads(as_tensor(key))
        return look(self.softmax, q, k, None, additive_mask("CrossAttention", mask, q, k), scales)

    def _heads(self, x: Tensor) -> Array:
        if x.ndim != 3 or x.shape[-1] % self.n_heads:
            wanted = f"(batch, tokens, {self.n_heads} * head size)"
            raise ValueError(f"CrossAttention(n_heads={self.n_heads}): expected shape {wanted}, got {x.shape}")
        return floating(x.array).reshape(*x.shape[:2], self.n_heads, -1)


def look(
    softmax: RowSoftmax, q: Array, k: Array, offset: int | None, mask: Array | None, scales: Tensor | None
) -> tuple[Array, Array]:
    """Scores and weights (B, H, T, S) of queries (B, T, H, D) and keys (B, S, H, D)."""
    scores, start = kernels.attention_scores(q, k, offset, mask), offset or 0
    parameters = () if scales is None else (scales.array[..., start : start + q.shape[1]],)
    return scores, softmax.rows(scores, *parameters)


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
