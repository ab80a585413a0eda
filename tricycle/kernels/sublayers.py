"""Kernels of whole sublayers of a transformer block for one token: norm, products, attention or activation, residual.

In generation the calls of separate kernels take longer than their work, so a provider computes a sublayer in one call.

Shapes: C channels, H query heads, K key and value heads, D head size, S cached tokens, M hidden channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tricycle import kernels
from tricycle.devices import Array
from tricycle.kernels import ScoreOptions
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.quantized import QuantizedMatrix, quantized_matmul


class Norm(NamedTuple):
    """The parameters of a layer norm, or of an RMS norm (without `subtract_mean`): gain (C,), bias (C,) or None."""

    gain: Array
    bias: Array | None
    eps: float
    subtract_mean: bool

    def __call__(self, x: Array) -> Array:
        """Normalize rows (N, C)."""
        return kernels.layer_norm(x, *self)[0]


class Linear(NamedTuple):
    """The parameters of a linear layer: a matrix, an array or `QuantizedMatrix` (C, M), and a bias (M,) or None."""

    weights: Any
    bias: Array | None

    def __call__(self, x: Array) -> Array:
        """Map rows (N, C) to (N, M)."""
        is_quantized = isinstance(self.weights, QuantizedMatrix)
        product: Array = quantized_matmul(x, *self) if is_quantized else kernels.matmul(x, *self)
        return product


@Kernel
def mlp_sublayer(x: Array, norm: Norm, up: Linear, down: Linear, activation: str) -> Array:
    """Return x + down(activation(up(norm(x)))) of a token x (1, C); `activation` is the kernel "swiglu" or "gelu"."""
    activate = kernels.swiglu if activation == "swiglu" else kernels.gelu
    return x + down(activate(up(norm(x))))


@Kernel
def attention_sublayer(
    x: Array,
    norm: Norm,
    qkv: Linear,
    projection: Linear,
    rope: tuple[Array, Array] | None,
    cached: tuple[Array, Array],
    score_options: ScoreOptions,
    off_by_one: bool,
) -> Array:
    """Return x + projection(attention of norm(x)) of a token x (1, C); write its key and value to the cache.

    Args:
        qkv: from C to (H + 2 K) D channels: all queries, keys and values.
        rope: the cosines and sines (1, R / 2) that rotate the first R channels of queries and keys, or None.
        cached: keys and values (1, S, K, D), of which the last token's are overwritten.
        off_by_one: whether the softmax is softmax1.
    """
    keys, values = cached
    n_key_heads, head_size = keys.shape[2:]
    heads = qkv(norm(x)).reshape(1, 1, -1, head_size)
    if rope is not None:
        n_channels, rotated = 2 * rope[0].shape[1], heads[:, :, :-n_key_heads, :]
        rotated[..., :n_channels] = kernels.apply_rope(rotated[..., :n_channels], *rope)
    keys[:, -1:], values[:, -1:] = heads[:, :, -2 * n_key_heads : -n_key_heads], heads[:, :, -n_key_heads:]
    q = heads[:, :, : -2 * n_key_heads]
    attended, _ = kernels.attention(q, keys, values, score_options, off_by_one)
    return x + projection(attended.reshape(1, -1))
