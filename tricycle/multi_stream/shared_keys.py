"""Attention whose keys and values may be those of an earlier layer.

The last layers of Gemma 3n compute only queries. Each attends to the keys and values of the last earlier layer that
computes its own and has the same window, so the last layers need no matrices for keys and values. For generation, the
KV cache of each of these layers stores a copy: the caches are independent, but take the memory that they could share.

Source: Sun et al. 2024, "You only cache once"; Brandon et al. 2024, "Reducing transformer key-value cache size with
cross-layer attention"; with a norm of values as in Gemma 3n.

Shapes: B batch, T tokens, C channels, H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tricycle.attention.attend import Attention, Mask, merge_heads
from tricycle.attention.cache import KeyValueCache, Segments, takes_ragged
from tricycle.attention.rotary import POSITIONS
from tricycle.blocks import MultiHead
from tricycle.configs.model import ModelConfig
from tricycle.extra_ops import concatenate
from tricycle.functions import new_softmax
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Dropout, Generator, RMSNorm, new_generator
from tricycle.ops import split_heads
from tricycle.tensor import Tensor


class SharedKeyAttention(MultiHead):
    """Causal self-attention that receives keys and values, which it or an earlier layer has computed.

    Args:
        config: of the model. layer: the index of the block.
        has_keys: whether the layer computes keys and values, instead of receiving those of an earlier one.
        initialiser, generator: of the initial weights; the generator also draws dropout masks.
    """

    uses_shift = False  # no token or key shift

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        has_keys: bool = True,
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        dense = partial(Dense, initialiser=initialiser, generator=generator)
        width, size, eps = config.embedding_dim, config.channels_per_head, config.qk_norm_eps
        self.context_window, self.head_size = config.context_window, size
        self.n_heads, self.n_key_heads = config.n_heads, config.key_heads
        bias, output_bias = (config.bias if own is None else own for own in (config.qkv_bias, config.output_bias))
        self.query, self.query_norm = dense(width, self.n_heads * size, bias), RMSNorm(size, eps)
        self.key_value: Any = None
        if has_keys:
            self.key_value = dense(width, 2 * self.n_key_heads * size, bias)
            self.key_norm, self.value_norm = RMSNorm(size, eps), RMSNorm(size, eps, gain=False)
        self.rotary: Any = POSITIONS[config.positions].new_rotation(config, layer)
        self.projection = dense(self.n_heads * size, width, output_bias)
        self.dropout = Dropout(config.dropout, generator)
        scale, cap = config.score_scale or None, config.score_cap or None
        self.attention = Attention("softmax", True, config.window_size(layer), scale, cap)
        self.use_softmax(new_softmax(config.softmax, config))

    @takes_ragged
    def forward(self, x: Tensor, kv: Tensor, cache: KeyValueCache | None = None, mask: Mask = None) -> Tensor:
        """Return attention (B, T, C) of queries from x (B, T, C) to keys and values (B, T, 2 K D), as of `project_kv`.

        Args:
            cache: the KV cache of this layer, to which the keys and values are appended.
            mask: a further boolean mask, see `attend.additive_mask`.
        """
        (q,) = split_heads(self.query(x), [self.n_heads], self.head_size)
        q = self.rotary(self.query_norm(q), _segments(x, cache))
        k, v = split_heads(kv, [self.n_key_heads] * 2, self.head_size)
        if cache is None:
            out = self.attention(q, k, v, mask, self.softmax_scales, self.precision)
        else:
            out = self._attend_to_cached(q, k, v, cache, mask)
        return self.dropout(self.projection(merge_heads(out)))

    def project_kv(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the layer's own keys, with RoPE, and values of x (B, T, C), normalized, together (B, T, 2 K D)."""
        k, v = split_heads(self.key_value(x), [self.n_key_heads] * 2, self.head_size)
        k = self.rotary(self.key_norm(k), _segments(x, cache))
        return concatenate([merge_heads(k), merge_heads(self.value_norm(v))], axis=-1)


def _segments(x: Tensor, cache: KeyValueCache | None) -> Segments:
    """Return the first position and the number of tokens of each text in x (B, T, C)."""
    return ((0, x.shape[1]),) if cache is None else cache.segments(x.shape[1])
