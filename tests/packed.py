"""Attention of queries, keys and values that lie side by side in one array (B, T, 3 C): how many tests write it."""

from tricycle.attention import Attention, Rotary, scores_and_weights
from tricycle.extra_ops import concatenate, split
from tricycle.ops import as_tensor, reshape
from tricycle.tensor import Tensor


def heads(x, n_heads: int) -> Tensor:
    """(B, T, C) to (B, T, H, D)."""
    x = as_tensor(x)
    return reshape(x, *x.shape[:2], n_heads, x.shape[2] // n_heads)


def flat(x: Tensor) -> Tensor:
    """(B, T, H, D) to (B, T, C)."""
    return reshape(x, *x.shape[:2], x.shape[2] * x.shape[3])


class SelfAttention:
    """(B, T, 3 C) to (B, T, C)."""

    def __init__(self, n_heads: int, causal: bool = True, softmax="softmax", **options) -> None:
        self.n_heads = n_heads
        self.attention = Attention(softmax, causal, **options)

    def parts(self, qkv) -> list[Tensor]:
        return [heads(part, self.n_heads) for part in split(as_tensor(qkv), 3)]

    def __call__(self, qkv, cache=None, scales=None, mask=None, precision="float32") -> Tensor:
        q, k, v = self.parts(qkv)
        if cache is not None:
            q, k, v = (Tensor(array, False) for array in (q.array, *cache.append(k.array, v.array)))
        out = flat(self.attention(q, k, v, mask, scales, precision))
        out.name = "attention"
        return out

    def look(self, qkv, scales=None, mask=None):
        q, k, _ = self.parts(qkv)
        return scores_and_weights(self.attention, q, k, None, mask, scales)


class CrossAttention:
    """(B, T, C) and twice (B, S, C) to (B, T, C)."""

    def __init__(self, n_heads: int, softmax="softmax") -> None:
        self.n_heads = n_heads
        self.attention = Attention(softmax, causal=False)

    def __call__(self, query, key, value, scales=None, mask=None) -> Tensor:
        parts = [heads(x, self.n_heads) for x in (query, key, value)]
        return flat(self.attention(*parts, mask, scales))

    def look(self, query, key, scales=None, mask=None):
        return scores_and_weights(
            self.attention, heads(query, self.n_heads), heads(key, self.n_heads), None, mask, scales
        )


def turn(qkv, n_heads: int, offset: int = 0, **options) -> Tensor:
    """(B, T, 3 C) with its queries and keys turned."""
    rotary = Rotary(**options)
    q, k, v = (heads(part, n_heads) for part in split(as_tensor(qkv), 3))
    return concatenate([flat(rotary(q, offset)), flat(rotary(k, offset)), flat(v)], axis=-1)
