"""Attention for tests, with packed queries, keys and values of shape (B, T, 3 C)."""

from tricycle.attention import Attention, Rotary, scores_and_weights
from tricycle.extra_ops import concatenate, split
from tricycle.ops import as_tensor, reshape
from tricycle.tensor import Tensor


def split_heads(x, n_heads: int) -> Tensor:
    """Reshape (B, T, C) to (B, T, H, D)."""
    x = as_tensor(x)
    return reshape(x, *x.shape[:2], n_heads, x.shape[2] // n_heads)


def merge_heads(x: Tensor) -> Tensor:
    """Reshape (B, T, H, D) to (B, T, C)."""
    return reshape(x, *x.shape[:2], x.shape[2] * x.shape[3])


class SelfAttention:
    """Self-attention from packed projections (B, T, 3 C) to outputs (B, T, C)."""

    def __init__(self, n_heads: int, causal: bool = True, softmax="softmax", **options) -> None:
        self.n_heads = n_heads
        self.attention = Attention(softmax, causal, **options)

    def unpack(self, qkv) -> list[Tensor]:
        return [split_heads(x, self.n_heads) for x in split(as_tensor(qkv), 3)]

    def __call__(self, qkv, cache=None, scales=None, mask=None, precision="float32") -> Tensor:
        q, k, v = self.unpack(qkv)
        if cache is not None:
            q, k, v = (Tensor(array, False) for array in (q.array, *cache.append(k.array, v.array)))
        out = merge_heads(self.attention(q, k, v, mask, scales, precision))
        out.name = "attention"
        return out

    def scores_and_weights(self, qkv, scales=None, mask=None):
        q, k, _ = self.unpack(qkv)
        return scores_and_weights(self.attention, q, k, None, mask, scales)


class CrossAttention:
    """Cross-attention from queries (B, T, C), and keys and values (B, S, C), to outputs (B, T, C)."""

    def __init__(self, n_heads: int, softmax="softmax") -> None:
        self.n_heads = n_heads
        self.attention = Attention(softmax, causal=False)

    def __call__(self, query, key, value, scales=None, mask=None) -> Tensor:
        qkv = [split_heads(x, self.n_heads) for x in (query, key, value)]
        return merge_heads(self.attention(*qkv, mask, scales))

    def scores_and_weights(self, query, key, scales=None, mask=None):
        q, k = (split_heads(x, self.n_heads) for x in (query, key))
        return scores_and_weights(self.attention, q, k, None, mask, scales)


def apply_rope(qkv, n_heads: int, offset: int = 0, **options) -> Tensor:
    """Apply RoPE to the queries and keys of packed projections (B, T, 3 C)."""
    rotary = Rotary(**options)
    q, k, v = (split_heads(x, n_heads) for x in split(as_tensor(qkv), 3))
    return concatenate([merge_heads(x) for x in (rotary(q, offset), rotary(k, offset), v)], axis=-1)
