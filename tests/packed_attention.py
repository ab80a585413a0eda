"""Attention for tests, with packed queries, keys and values of shape (B, T, 3 C)."""

from tricycle.attention import Attention, Rotary
from tricycle.attention.attend import merge_heads
from tricycle.extra_ops import concatenate, split
from tricycle.ops import as_tensor, reshape
from tricycle.tensor import Tensor


def split_heads(x, n_heads: int) -> Tensor:
    """Reshape (B, T, C) to (B, T, H, D)."""
    x = as_tensor(x)
    return reshape(x, *x.shape[:2], n_heads, x.shape[2] // n_heads)


def unpack(qkv, n_heads: int) -> list[Tensor]:
    """Split packed projections (B, T, 3 C) into queries, keys and values (B, T, H, D)."""
    return [split_heads(x, n_heads) for x in split(as_tensor(qkv), 3)]


class SelfAttention:
    """Self-attention from packed projections (B, T, 3 C) to outputs (B, T, C)."""

    def __init__(self, n_heads: int, causal: bool = True, softmax="softmax") -> None:
        self.n_heads = n_heads
        self.attention = Attention(softmax, causal)

    def __call__(self, qkv, cache=None, scales=None, mask=None) -> Tensor:
        q, k, v = unpack(qkv, self.n_heads)
        if cache is not None:
            q, k, v = (Tensor(array, False) for array in (q.array, *cache.append(k.array, v.array)))
        return merge_heads(self.attention(q, k, v, mask, scales))


class CrossAttention:
    """Cross-attention from queries (B, T, C), and keys and values (B, S, C), to outputs (B, T, C)."""

    def __init__(self, n_heads: int, softmax="softmax") -> None:
        self.n_heads = n_heads
        self.attention = Attention(softmax, causal=False)

    def __call__(self, query, key, value, scales=None, mask=None) -> Tensor:
        qkv = [split_heads(x, self.n_heads) for x in (query, key, value)]
        return merge_heads(self.attention(*qkv, mask, scales))


def apply_rope(qkv, n_heads: int, offset: int = 0) -> Tensor:
    """Apply RoPE to the queries and keys of packed projections (B, T, 3 C)."""
    q, k, v = unpack(qkv, n_heads)
    return concatenate([merge_heads(x) for x in (Rotary()(q, offset), Rotary()(k, offset), v)], axis=-1)
