"""Attention as pure functions of Tensors, and the cache of keys and values for generation.

Shapes: B batch, T tokens, S keys, H heads, D head size, C = H * D channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.backend import Array, array_module
from tricycle.functions import RowSoftmax, new_softmax, shared_backward
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Generator, Layer, new_generator
from tricycle.ops import Op, as_tensor, as_tensors, check_device, check_width, floating, log, positive, tanh
from tricycle.tensor import Operand, Tensor, record, to_tensor

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
        self.latest: Array | None = None  # what `TokenShift` has seen last, (B, 1, C)

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

    def select(self, rows: np.ndarray) -> KeyValueCache:
        """A cache of some items of the batch, each as often as it is named."""
        chosen = KeyValueCache(self.capacity)
        chosen.length = self.length
        for name in ("_keys", "_values", "latest"):
            held = getattr(self, name)
            setattr(chosen, name, None if held is None else held[array_module(held).asarray(rows)])
        return chosen

    @property
    def keys(self) -> Array:
        """(B, T, H, D) of all tokens so far."""
        return None if self._keys is None else self._keys[:, : self.length]


# -------------------------------------------------------------------- masks
def length_mask(
    lengths: Sequence[int] | Array, n_keys: int, n_items: int | None = None, least: int = 0, title: str = "length_mask"
) -> np.ndarray:
    """(B, S) booleans: True for the first `lengths[b]` keys of item b.

    Args:
        n_items: B, if it is known. least: no length may be smaller. title: who refuses.

    Raises:
        ValueError: a length below `least` or above n_keys, or that is no whole number, or not one for each item.
    """
    found = np.asarray(lengths)
    if found.shape != (found.size if n_items is None else n_items,) or (found.size and found.dtype.kind not in "iu"):
        wanted = f"({'batch' if n_items is None else n_items},)"
        raise ValueError(
            f"{title}: expected lengths as whole numbers of shape {wanted}, got {found.dtype} of shape {found.shape}"
        )
    if found.size and not least <= found.min() <= found.max() <= n_keys:
        raise ValueError(f"{title}: expected lengths from {least} to {n_keys}, got {found.min()} to {found.max()}")
    return np.arange(n_keys) < found[:, None]


def causal_mask(n_queries: int, n_keys: int | None = None) -> np.ndarray:
    """(1, T, S) booleans: the last query sees all keys (T of them unless given), each one before it one key fewer."""
    n_keys = n_queries if n_keys is None else n_keys
    return np.tri(n_queries, n_keys, n_keys - n_queries, bool)[None]


def additive_mask(op: str, mask: Mask, like: Array, n_queries: int, n_keys: int, n_heads: int = 1) -> Array | None:
    """What is added to scores (B, H, T, S): 0, and -inf where a key is hidden.

    Args:
        like: an array of the scores' batch size, dtype and device.
        mask: booleans, True where a key may be seen: (B, S), (B, T, S) or (B, H, T, S), whose axes may be 1 but for S.

    Returns:
        (B or 1, H or 1, T or 1, S).

    Raises:
        ValueError: another dtype or shape.
    """
    if mask is None:
        return None
    xp, given, n_items = array_module(like), mask.array if isinstance(mask, Tensor) else mask, len(like)
    full = {2: (n_items, n_keys), 3: (n_items, n_queries, n_keys), 4: (n_items, n_heads, n_queries, n_keys)}
    wanted = full.get(given.ndim, ())
    fits = [n in (1, m) for n, m in zip(given.shape[:-1], wanted)]
    if not wanted or given.dtype != bool or given.shape[-1] != n_keys or not all(fits):
        shapes = " or ".join(map(str, full.values()))
        raise ValueError(f"{op}: expected a mask of booleans of shape {shapes}, got {given.dtype} of {given.shape}")
    spread = given[(slice(None), *[None] * (4 - given.ndim))]
    return xp.where(xp.asarray(spread), 0, -xp.inf).astype(like.dtype)


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
        self, qkv: Tensor, cache: KeyValueCache | None = None, scales: Tensor | None = None, mask: Mask = None,
        precision: str = "float32",
    ) -> Tensor:
        """
        Args:
            qkv: (B, T, 3 C): queries, keys and values side by side.
            cache: earlier keys and values, to which these are added. No gradient flows through it.
            scales: the parameter of `BlockSoftmax`.
            mask: as `additive_mask` takes it.
            precision: of the products, for a softmax that the kernels know, and without a cache.

        Returns:
            (B, T, C), zeros where a query sees no key.
        """
        qkv = as_tensor(qkv)
        array = floating(qkv.array)
        taken = kernels.operand(array, precision) if cache is None and self.softmax.fused else array
        packed = _split_heads("SelfAttention", taken, self.n_heads)
        q, k, v = (packed[:, :, i] for i in range(3))
        if cache is not None:
            k, v = cache.append(k, v)
        offset = k.shape[1] - q.shape[1] if self.causal else None
        args = (qkv,) if scales is None else (qkv, scales)
        hidden = additive_mask("SelfAttention", mask, q, q.shape[1], k.shape[1], self.n_heads)
        out, attend_backward = self.softmax.attend(q, k, v, offset, hidden, *(arg.array for arg in args[1:]))
        shape = (*qkv.shape[:2], qkv.shape[2] // 3)
        if cache is not None:
            return Tensor(out.reshape(shape), False, qkv.is_batched, "attention")

        def backward(grad: Array) -> tuple[Array, ...]:
            dpacked = qkv.xp.empty(packed.shape, array.dtype)
            dscales = attend_backward(grad.reshape(out.shape), *(dpacked[:, :, i] for i in range(3)))
            return dpacked.reshape(qkv.shape), dscales

        return record(out.reshape(shape), args, shared_backward(backward, len(args)), "attention")

    def look(
        self, qkv: Tensor, cache: KeyValueCache | None = None, scales: Tensor | None = None, mask: Mask = None,
        precision: str = "float32",
    ) -> tuple[Array, Array]:
        """The scores before the softmax and the weights after it, both (B, H, T, S), for reading.

        Args:
            cache: with this call's keys in it already.
            precision: as `forward` takes it; what is read here was computed anew, in the dtype of qkv.
        """
        packed = _split_heads("SelfAttention", floating(as_tensor(qkv).array), self.n_heads)
        q, k = packed[:, :, 0], packed[:, :, 1] if cache is None else cache.keys
        offset = k.shape[1] - q.shape[1] if self.causal else None
        hidden = additive_mask("SelfAttention", mask, q, q.shape[1], k.shape[1], self.n_heads)
        return look(self.softmax, q, k, offset, hidden, scales)


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
        hidden = additive_mask("CrossAttention", mask, q, q.shape[1], k.shape[1], self.n_heads)
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
        hidden = additive_mask("CrossAttention", mask, q, q.shape[1], k.shape[1], self.n_heads)
        return look(self.softmax, q, k, None, hidden, scales)

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
        normalise: first scale the query and the key of each head to a mean square of 1 (Dehghani et al. 2023).
    """

    def __init__(self, n_heads: int, base: float = 10_000.0, normalise: bool = False) -> None:
        self.n_heads, self.base, self.normalise = n_heads, base, normalise

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
        heads, ones = packed[:, :, :2], xp.ones(size, packed.dtype)
        normal, mean, scale = heads, None, None
        if self.normalise:
            normal, mean, scale = kernels.layer_norm(heads, ones, None, 1e-6, False)

        def turn(heads: Array, sin: Array) -> Array:
            rows = heads.reshape(*packed.shape[:2], 2 * self.n_heads, size)
            return kernels.rotate(rows, cos, sin).reshape(heads.shape)

        def back_fn(grad: Tensor) -> Array:
            grads = grad.array.reshape(packed.shape)
            dheads = turn(grads[:, :, :2], -sin)  # a rotation is undone by the opposite angle: its gradient too
            if mean is not None:
                dheads = kernels.layer_norm_backward(dheads, heads, ones, mean, scale, False)[0]
            return xp.concatenate([dheads, grads[:, :, 2:]], axis=2).reshape(qkv.shape)

        turned = xp.concatenate([turn(normal, sin), packed[:, :, 2:]], axis=2)
        return record(turned.reshape(qkv.shape), (qkv,), (back_fn,), "rotary")


class TokenShift(Layer):
    """x_t + mix * x_(t-1), with a learned mix for each channel that starts at 0.

    With it one layer of attention can look for what followed an earlier occurrence of a token; without, it takes two.

    Source: Peng et al. 2023, "RWKV".

    Args:
        size: C.
    """

    def __init__(self, size: int) -> None:
        positive("TokenShift", size=size)
        self.mix = to_tensor(np.zeros(size, np.float32))

    def forward(self, x: Operand, cache: KeyValueCache | None = None) -> Tensor:
        """(B, T, C) to the same shape.

        Args:
            cache: knows the token before the first, and remembers the last; no gradient flows through it.
        """
        x = as_tensor(x, self.mix)
        check_width("TokenShift", x, self.mix.size)
        check_device("TokenShift", x.array, self.mix.array)
        array, mix = floating(x.array), self.mix.array
        earlier = x.xp.zeros_like(array)
        earlier[:, 1:] = array[:, :-1]
        if cache is not None:
            if cache.latest is not None:
                earlier[:, :1] = cache.latest
            cache.latest = array[:, -1:]

        def input_grad(grad: Tensor) -> Array:
            d = grad.array.copy()
            d[:, :-1] += mix * grad.array[:, 1:]
            return d

        mix_grad = lambda grad: kernels.sum_rows((grad.array * earlier).reshape(-1, mix.size))
        y = (array + mix * earlier).astype(array.dtype, copy=False)
        return record(y, (x, self.mix), (input_grad, mix_grad), "token_shift")


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


# -------------------------------------------------------------------- attention by a score of its own
class ScaledDotProductAttention(Layer):
    """Weights softmax(score(query, key)), score = q . k / sqrt(D) (Vaswani et al. 2017, section 3.2.1).

    Plain operations, one node each, to be read and changed; `CrossAttention` is the fused form. The base of those
    with other scores, which define `scores`.

    Args:
        softmax: what turns scores into weights: a name in `functions.SOFTMAXES`, or an object.
    """

    def __init__(self, softmax: str | RowSoftmax = "softmax") -> None:
        self.softmax = new_softmax(softmax)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, T, D) and what `remember` gave for the keys to (B, T, S)."""
        return query @ key.transpose(0, 2, 1) * (1 / math.sqrt(query.shape[-1]))

    def remember(self, key: Tensor) -> Tensor:
        """What the scores need of the keys: computed once where queries come one after the other."""
        return key

    def weights(self, query: Tensor, remembered: Tensor, mask: Mask = None) -> Tensor:
        """(B, T, S); a row that sees no key is all zeros."""
        scores = self.scores(query, remembered)
        hidden = additive_mask(type(self).__name__, mask, scores.array, *scores.shape[1:])
        if hidden is not None:
            scores = scores + Tensor(hidden[:, 0], requires_grad=False)
        return self.softmax(scores)

    def forward(
        self, query: Operand, key: Operand, value: Operand | None = None, mask: Mask = None,
        return_weights: bool = False,
    ) -> Any:
        """
        Args:
            query: (B, T, query_size). key: (B, S, key_size). value: (B, S, E), the keys unless given.
            mask: which keys may be seen, as `additive_mask` takes it.

        Returns:
            (B, T, E), the mean of the values by their weights; with `return_weights` also these, (B, T, S).

        Raises:
            ValueError: shapes that do not belong together.
        """
        query, key = as_tensors(query, key)
        value = key if value is None else as_tensor(value)
        shapes = query.shape, key.shape, value.shape
        if {len(shape) for shape in shapes} != {3} or len({s[0] for s in shapes}) > 1 or key.shape[1] != value.shape[1]:
            wanted = "query (B, T, .), key and value (B, S, .)"
            got = f"{query.shape}, {key.shape} and {value.shape}"
            raise ValueError(f"{type(self).__name__}: expected {wanted}, got shapes {got}")
        weights = self.weights(query, self.remember(key), mask)
        context = weights @ value
        return (context, weights) if return_weights else context


class AdditiveAttention(ScaledDotProductAttention):
    """score = v . tanh(W_q q + W_k k) (Bahdanau et al. 2015, appendix A.1.2).

    Args:
        query_size, key_size: may differ.
        hidden_size: of the tanh.
    """

    def __init__(
        self, query_size: int, key_size: int, hidden_size: int, softmax: str | RowSoftmax = "softmax",
        initialiser: Initialiser = xavier, generator: Generator = None,
    ) -> None:
        super().__init__(softmax)
        generator = new_generator(generator)
        self.query = Dense(query_size, hidden_size, False, initialiser, generator)
        self.key = Dense(key_size, hidden_size, False, initialiser, generator)
        self.vector = Dense(hidden_size, 1, False, initialiser, generator)

    def remember(self, key: Tensor) -> Tensor:
        return self.key(key)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        hidden = tanh(self.query(query)[:, :, None] + key[:, None])  # (B, T, S, hidden_size)
        return self.vector(hidden)[..., 0]


class LuongAttention(ScaledDotProductAttention):
    """score = q . k ("dot"), q W k ("general") or v . tanh(W [q; k]) ("concat") (Luong et al. 2015, section 3.1).

    Args:
        query_size, key_size: equal for "dot".
        hidden_size: of the tanh in "concat"; the query's unless given.
    """

    def __init__(
        self, query_size: int, key_size: int, score: str = "general", hidden_size: int | None = None,
        softmax: str | RowSoftmax = "softmax", initialiser: Initialiser = xavier, generator: Generator = None,
    ) -> None:
        super().__init__(softmax)
        if score not in ("dot", "general", "concat"):
            raise ValueError(f"LuongAttention: expected score to be dot, general or concat, got {score!r}")
        if score == "dot" and query_size != key_size:
            got = f"{query_size} and {key_size}"
            raise ValueError(f"LuongAttention: expected query and key of one size with score dot, got {got}")
        self.score = score
        if score == "general":
            self.key = Dense(key_size, query_size, False, initialiser, generator)
        elif score == "concat":  # W [q; k] is W_q q + W_k k
            size = hidden_size or query_size
            self.concat = AdditiveAttention(query_size, key_size, size, softmax, initialiser, generator)

    def remember(self, key: Tensor) -> Tensor:
        if self.score == "concat":
            return self.concat.remember(key)
        return self.key(key) if self.score == "general" else key

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.concat.scores(query, key) if self.score == "concat" else query @ key.transpose(0, 2, 1)


class HardAttention(Layer):
    """Attention to one key for each query, drawn with the weights that soft attention would give (Xu et al. 2015, 4.1).

    A draw has no gradient. What trains the weights is REINFORCE (Williams 1992): `reinforce` makes likelier what was
    better than expected. The values get gradients as usual. In `eval` the key of the largest weight is taken.

    Args:
        soft: gives the weights.
    """

    def __init__(self, soft: ScaledDotProductAttention, generator: Generator = None) -> None:
        self.soft = soft
        self.generator = new_generator(generator)

    def forward(
        self, query: Operand, key: Operand, value: Operand | None = None, mask: Mask = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            query, key, value, mask: as of soft attention.

        Returns:
            (B, T, E), the values of the chosen keys, zeros where there is none to choose; and the log of the
            probability of each choice (B, T).
        """
        _, weights = self.soft(query, key, value, mask, return_weights=True)
        value = as_tensor(key if value is None else value)
        xp, n_items = weights.xp, len(weights)
        sums = weights.array.cumsum(axis=-1)
        if self.training:
            draw = xp.asarray(self.generator.random(sums.shape[:-1], dtype=np.float32)) * sums[..., -1]
            chosen = xp.minimum((sums <= draw[..., None]).sum(axis=-1), sums.shape[-1] - 1)
        else:
            chosen = weights.array.argmax(axis=-1)
        items, queries = xp.arange(n_items)[:, None], xp.arange(weights.shape[1])[None]
        seen = (sums[..., -1] > 0).astype(weights.dtype)
        probability = weights[items, queries, chosen] * seen + (1 - seen)
        return value[items, chosen] * seen[..., None], log(probability)


def reinforce(log_probability: Tensor, reward: Array, baseline: Array | float) -> Tensor:
    """-mean((reward - baseline) log p): its gradient raises the expected reward (Williams 1992).

    Args:
        log_probability: of what was chosen, any shape.
        reward: how good it was, an array that broadcasts to that shape; no gradient flows to it.
        baseline: what was expected, such as a running mean of rewards: it takes noise away and no gradient.
    """
    return -(log_probability * (reward - baseline)).mean()
