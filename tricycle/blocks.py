"""The blocks of a transformer: attention with its projections, the MLP, and both with norms and residuals.

Shapes: B batch, T tokens, C channels, H heads of queries, K heads of keys and values, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tricycle import kernels
from tricycle.activation import ACTIVATIONS, Gated, new_activation
from tricycle.attention import (
    Attention,
    Cache,
    KeyShift,
    Mask,
    Rotary,
    RotaryScaling,
    TokenShift,
    call_with_cache,
    join,
    takes_ragged,
)
from tricycle.attention.cache import Segments
from tricycle.autograd import is_evaluating
from tricycle.configs.model import ModelConfig, hidden_width
from tricycle.functions import RowSoftmax, new_softmax, residual
from tricycle.initialisers import Initialiser, xavier
from tricycle.kernels import FEW_ROWS
from tricycle.layers import Dense, Dropout, Generator, Layer, LayerNorm, RMSNorm, new_generator
from tricycle.ops import as_tensor, as_tensors, positive, reshape, split_heads
from tricycle.tensor import Operand, Tensor


# -------------------------------------------------------------------- activations between products
def dtype_between(x: Tensor, precision: str, *products: Any) -> Any:
    """Return the dtype of activations between these layers: that of the operands of matrix products, if all of the
    layers can give it; else None, for that of x.

    In evaluation it is None for few rows, too: their products are made in float32. Not where gradients are merely off,
    for activation checkpointing computes the same again with gradients.
    """
    if precision == "float32" or not all(map(takes_dtype, products)):
        return None
    if math.prod(x.shape[:-1]) <= FEW_ROWS and is_evaluating():
        return None
    dtype = kernels.operand(x.array[:0], precision).dtype
    return None if dtype == x.dtype else dtype


def takes_dtype(layer: Any) -> bool:
    """Return whether the `forward` of a layer has a parameter `dtype`, the dtype of its result."""
    return takes(getattr(layer, "forward", None), "dtype")


def takes(function: Any, parameter: str) -> bool:
    """Return whether a function or method names this parameter; one that hands all its arguments on does not."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and parameter in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def call(layer: Any, x: Tensor, dtype: Any) -> Tensor:
    """Return `layer(x)`, in this dtype unless it is None, if the layer can choose it."""
    result: Tensor = layer(x) if dtype is None or not takes_dtype(layer) else layer(x, dtype=dtype)
    return result


# -------------------------------------------------------------------- attention with its projections
class _MultiHead(Layer):
    """What both layers with heads have in common: the last projection, and the way of weighing keys."""

    attention: Attention
    projection: Dense
    n_heads: int
    context_window: Any  # a whole number, or None for as many tokens as come

    def use_softmax(self, softmax: str | RowSoftmax) -> None:
        """Turn scores into weights in another way from now on, with a fresh parameter if it needs one."""
        chosen = new_softmax(softmax)
        window = self.context_window
        scales = chosen.new_scales(self.n_heads, window or 1)
        if chosen.by_place and scales is not None and window is None:
            raise ValueError(f"{type(self).__name__}: expected a context_window with {chosen}")
        now = self.attention
        chosen = chosen.for_window(window) if window else chosen
        self.attention = Attention(chosen, now.causal, now.window, now.scale, now.cap)
        weights = self.projection.weights
        if scales is not None and weights.on_gpu:
            scales.to_gpu(weights.array.device.id)
        self.softmax_scales = scales

    def _join_heads(self, out: Tensor) -> Tensor:
        """(B, T, H, D) to (B, T, C)."""
        return reshape(out, *out.shape[:2], out.shape[2] * out.shape[3])


@dataclass(frozen=True)
class AttentionConfig:
    """What a `MultiHeadSelfAttention` is made of.

    Attributes:
        embedding_dim: C.
        n_heads: H.
        context_window: the most tokens it takes; any smaller number will do.
        n_key_heads: K, a divisor of H; 0 for H.
        head_size: D; 0 for C / H.
        bias: queries, keys and values have biases.
        output_bias: the last projection has one; as `bias` unless given.
        dropout: probability of dropping an element of the result.
        rotary: turn queries and keys by position; True for `Rotary()`.
        qk_norm: scale the queries and keys of each head to one length first: what makes the norm of D channels, or
            True for an RMS norm without a gain.
        qk_norm_per_head: normalize each head by itself; False for all heads of queries, and of keys, together.
        softmax: what turns scores into weights: a name in `functions.SOFTMAXES`, or an object.
        causal: a token sees itself and those before it, and not those after.
        window, scale, cap: as of `Attention`.
        token_shift: mix each token with the one before it first (`TokenShift`).
        key_shift: mix the keys of each token with those of the one before it (`KeyShift`).
    """

    embedding_dim: int
    n_heads: int
    context_window: int
    n_key_heads: int = 0
    head_size: int = 0
    bias: bool = True
    output_bias: bool | None = None
    dropout: float = 0.0
    rotary: Rotary | bool = False
    qk_norm: Callable[[int], Layer] | bool = False
    qk_norm_per_head: bool = True
    softmax: str | RowSoftmax = "softmax"
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    cap: float | None = None
    token_shift: bool = False
    key_shift: bool = False

    def __post_init__(self) -> None:
        title = "MultiHeadSelfAttention"
        positive(title, embedding_dim=self.embedding_dim, n_heads=self.n_heads, context_window=self.context_window)
        if not self.head_size and self.embedding_dim % self.n_heads:
            got = f"{self.embedding_dim} and {self.n_heads}"
            raise ValueError(f"{title}: expected embedding_dim to be a multiple of n_heads, got {got}")
        if self.n_key_heads and self.n_heads % self.n_key_heads:
            got = f"{self.n_heads} and {self.n_key_heads}"
            raise ValueError(f"{title}: expected n_heads to be a multiple of n_key_heads, got {got}")


class MultiHeadSelfAttention(_MultiHead):
    """Self-attention in several heads, with the projections before and after.

    Args:
        embedding_dim: C.
        n_heads: H, a divisor of C.
        context_window: the most tokens it takes; any smaller number will do.
        initialiser: first values of the matrices.
        generator: a NumPy generator or a seed.
        options: further fields of `AttentionConfig`.
    """

    qk_norm_per_head: bool = True  # of models that were pickled before the option

    def __init__(
        self,
        embedding_dim: int,
        n_heads: int,
        context_window: int,
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
        **options: Any,
    ) -> None:
        config = AttentionConfig(embedding_dim, n_heads, context_window, **options)
        generator = new_generator(generator)
        self.embedding_dim, self.n_heads, self.context_window = embedding_dim, n_heads, context_window
        self.n_key_heads = config.n_key_heads or n_heads
        self.head_size = config.head_size or embedding_dim // n_heads
        self.attention = Attention("softmax", config.causal, config.window, config.scale, config.cap)
        self.shift = TokenShift(embedding_dim) if config.token_shift else None
        n_channels = (n_heads + 2 * self.n_key_heads) * self.head_size
        self.qkv = Dense(embedding_dim, n_channels, config.bias, initialiser, generator)
        self.key_shift = KeyShift(self.n_key_heads, self.head_size) if config.key_shift else None
        self.qk_norm_per_head = config.qk_norm_per_head
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            new_norm = without_gain if config.qk_norm is True else config.qk_norm
            sizes = [self.head_size * (1 if config.qk_norm_per_head else n) for n in (n_heads, self.n_key_heads)]
            self.query_norm, self.key_norm = map(new_norm, sizes)
        self.rotary = Rotary() if config.rotary is True else config.rotary or None
        output_bias = config.bias if config.output_bias is None else config.output_bias
        self.projection = Dense(n_heads * self.head_size, embedding_dim, output_bias, initialiser, generator)
        self.dropout = Dropout(config.dropout, generator)
        self.use_softmax(config.softmax)

    def dtype_inside(self, x: Tensor) -> Any:
        """Return the dtype that activations of x are kept in, if not its own: 16 bits where products take no more, and
        all between can do with it.
        """
        if self.mixes or not getattr(self.attention.softmax, "fused", False):
            return None
        return dtype_between(x, self.precision, self.qkv, self.projection)

    @takes_ragged
    def forward(self, x: Operand, cache: Cache | None = None, mask: Mask = None, dtype: Any = None) -> Tensor:
        """(B, T, C), or (T, C) for one sequence, to the same shape.

        Args:
            cache: keys and values of earlier tokens, for generation: no gradient flows through it.
            mask: which keys may be seen, as `attention.additive_mask` takes it.
            dtype: of the result; that of x unless given.

        Raises:
            ValueError: a wrong width, no token, or more tokens than the context window.
        """
        x = as_tensor(x)
        self._check_width(x)
        rows = x if x.ndim == 3 else reshape(x, -1, *x.shape[-2:])
        segments = ((0, x.shape[-2]),) if cache is None else cache.segments(x.shape[-2])
        self._check_length(segments)
        if dtype is None and self.precision != "float32":
            dtype = x.dtype
        if cache is None:
            q, k, v = self._queries_keys_values(rows, segments, cache, self.dtype_inside(x))
            out = self.attention(q, k, v, mask, self.softmax_scales, self.precision)
        else:
            q, k, v = self._queries_keys_values(rows, segments, cache, dtype)
            out = self._attend_to_cached(q, k, v, cache, mask)
        out = self.dropout(call(self.projection, self._join_heads(out), dtype))
        return out if x.ndim == 3 else reshape(out, x.shape)

    def _attend_to_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, mask: Mask) -> Tensor:
        """Add keys and values to the cache, and let the queries attend to those of their text."""
        results = []
        for rows, text in cache.texts(q.shape[1]):
            keys, values = text.append(k.array[:, rows], v.array[:, rows])
            queries = Tensor(q.array[:, rows], False)
            # in float32: to make 16 bits of all that is cached for each token would cost more than it saves
            kv = Tensor(keys, False), Tensor(values, False)
            results.append(self.attention(queries, *kv, mask, self.softmax_scales, "float32"))
        return join(results)

    def _queries_keys_values(self, x: Tensor, segments: Segments, cache: Cache | None, dtype: Any) -> list[Tensor]:
        """Project (B, T, C) to (B, T, H, D), (B, T, K, D) and (B, T, K, D), normalize them and apply RoPE."""
        x = x if self.shift is None else self.shift(x, cache)
        n_heads = self.n_heads, self.n_key_heads, self.n_key_heads
        q, k, v = split_heads(call(self.qkv, x, dtype), n_heads, self.head_size)
        if self.key_shift is not None:
            k = reshape(self.key_shift(self._join_heads(k), cache), k.shape)
        if self.query_norm is not None and self.key_norm is not None:
            if self.qk_norm_per_head:
                q, k = self.query_norm(q), self.key_norm(k)
            else:
                q = reshape(self.query_norm(self._join_heads(q)), q.shape)
                k = reshape(self.key_norm(self._join_heads(k)), k.shape)
        if self.rotary is not None:
            q, k = self.rotary(q, segments), self.rotary(k, segments)
        return [q, k, v]

    @property
    def mixes(self) -> bool:
        """Whether a token is mixed with the one before it, besides what attention does."""
        return self.shift is not None or self.key_shift is not None

    def _check_width(self, x: Tensor) -> None:
        if x.ndim < 2 or x.shape[-1] != self.embedding_dim or x.shape[-2] == 0:
            title = f"MultiHeadSelfAttention(embedding_dim={self.embedding_dim})"
            raise ValueError(f"{title}: expected shape (batch, tokens, {self.embedding_dim}), got {x.shape}")

    def _check_length(self, segments: Segments) -> None:
        for first, n_tokens in segments:
            if first + n_tokens > self.context_window:
                title = f"MultiHeadSelfAttention(context_window={self.context_window})"
                raise ValueError(f"{title}: expected at most {self.context_window} tokens, got {first + n_tokens}")


class MultiHeadAttention(_MultiHead):
    """Attention of one sequence to another in several heads, with the projections before and after.

    Source: Vaswani et al. 2017, section 3.2.2.

    Args:
        embedding_dim: C, a multiple of n_heads, of queries and results.
        n_heads: H.
        key_size, value_size: channels of keys and values; C unless given.
        bias: the projections add a bias.
        softmax: what turns scores into weights: a name in `functions.SOFTMAXES`, or an object.
        context_window: the most queries and keys it takes, which "blocks" needs to know.
        dropout: probability of dropping an element of the result.
    """

    def __init__(
        self,
        embedding_dim: int,
        n_heads: int,
        *,
        key_size: int | None = None,
        value_size: int | None = None,
        bias: bool = True,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
        softmax: str | RowSoftmax = "softmax",
        context_window: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        positive("MultiHeadAttention", embedding_dim=embedding_dim, n_heads=n_heads)
        if embedding_dim % n_heads:
            got = f"{embedding_dim} and {n_heads}"
            raise ValueError(f"MultiHeadAttention: expected embedding_dim to be a multiple of n_heads, got {got}")
        generator = new_generator(generator)
        self.embedding_dim, self.n_heads, self.context_window = embedding_dim, n_heads, context_window
        self.attention = Attention("softmax", causal=False)
        self.query = Dense(embedding_dim, embedding_dim, bias, initialiser, generator)
        self.key = Dense(key_size or embedding_dim, embedding_dim, bias, initialiser, generator)
        self.value = Dense(value_size or embedding_dim, embedding_dim, bias, initialiser, generator)
        self.projection = Dense(embedding_dim, embedding_dim, bias, initialiser, generator)
        self.dropout = Dropout(dropout, generator)
        self.use_softmax(softmax)

    def remember(self, key: Operand, value: Operand | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values as they are attended to: computed once where queries come one after the other.

        Args:
            key: (B, S, key_size). value: (B, S, value_size), the keys unless given.

        Returns:
            both (B, S, C).
        """
        return self.key(key), self.value(key if value is None else value)

    def forward(
        self,
        query: Operand,
        key: Operand | None = None,
        value: Operand | None = None,
        mask: Mask = None,
        remembered: tuple[Tensor, Tensor] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """
        Args:
            query: (B, T, C). key, value: as of `remember`.
            mask: which keys may be seen, as `attention.additive_mask` takes it.
            remembered: what `remember` gave, in place of key and value.

        Returns:
            (B, T, C); with `return_weights` also the weights of each head, an array (B, H, T, S).
        """
        if remembered is None:
            if key is None:
                raise ValueError(
                    "MultiHeadAttention: expected either keys or what `remember` gave for them, got neither"
                )
            remembered = self.remember(key, value)
        elif key is not None:
            raise ValueError("MultiHeadAttention: expected either keys or what `remember` gave, got both")
        q, k, v = (self._heads(part) for part in (self.query(query), *remembered))
        arguments = (q, k, v, mask, self.softmax_scales, self.precision)
        out = self.dropout(self.projection(self._join_heads(self.attention(*arguments))))
        return (out, self.attention.look(*arguments)[1]) if return_weights else out

    def _heads(self, x: Operand) -> Tensor:
        """(B, T, C) to (B, T, H, D)."""
        (x,) = as_tensors(x)
        if x.ndim != 3:
            raise ValueError(f"MultiHeadAttention: expected shape (batch, tokens, channels), got {x.shape}")
        return reshape(x, *x.shape[:2], self.n_heads, self.embedding_dim // self.n_heads)


# -------------------------------------------------------------------- the MLP
class MLPBlock(Layer):
    """A wider hidden layer with an activation, applied to each token by itself.

    Args:
        embedding_dim: C.
        expansion_ratio: the hidden layer is this many times wider. One with a gate has three matrices instead of two,
            so its hidden layer is 2/3 as wide, rounded up to a multiple of 8 (Shazeer 2020).
        activation: a name in `activation.ACTIVATIONS`.
        gated: the activation of one half of what the first matrix gives is multiplied with the other half.
        hidden_size: width of the hidden layer, in place of the ratio.
    """

    def __init__(
        self,
        embedding_dim: int,
        expansion_ratio: float = 4,
        activation: str = "gelu",
        *,
        gated: bool = False,
        hidden_size: int = 0,
        bias: bool = True,
        dropout: float = 0.0,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"MLPBlock: expected activation to be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        positive("MLPBlock", embedding_dim=embedding_dim)
        if not 0 < expansion_ratio < math.inf:
            raise ValueError(f"MLPBlock: expected a finite expansion_ratio above 0, got {expansion_ratio!r}")
        generator = new_generator(generator)
        self.activation = new_activation(activation, gated)
        halves = isinstance(self.activation, Gated)
        hidden = hidden_size or hidden_width(embedding_dim, expansion_ratio, halves)
        self.up = Dense(embedding_dim, 2 * hidden if halves else hidden, bias, initialiser, generator)
        self.projection = Dense(hidden, embedding_dim, bias, initialiser, generator)
        self.dropout = Dropout(dropout, generator)

    def dtype_inside(self, x: Tensor) -> Any:
        """Return the dtype that activations of x are kept in, if not its own: 16 bits where products take no more, and
        the activation can.
        """
        if not getattr(self.activation, "computes_wide", False):
            return None
        return dtype_between(x, self.precision, self.up, self.projection)

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """(..., C) to (..., C).

        Args:
            dtype: of the result; that of x unless given.
        """
        x = as_tensor(x)
        hidden = self.activation(call(self.up, x, self.dtype_inside(x)))
        if dtype is None and self.precision != "float32":
            dtype = x.dtype
        return self.dropout(call(self.projection, hidden, dtype))


# -------------------------------------------------------------------- norms
def without_gain(size: int) -> RMSNorm:
    """The RMS norm of queries and keys that learns nothing."""
    return RMSNorm(size, 1e-6, gain=False)


def new_norm(config: ModelConfig, size: int | None = None) -> Layer:
    """The norm that a config asks for, of so many channels (the model's width unless given)."""
    size = config.embedding_dim if size is None else size
    if config.norm == "layer_norm":
        return LayerNorm(size, config.bias, config.norm_eps)
    return RMSNorm(size, config.norm_eps, unit_offset=config.norm_unit_offset)


# -------------------------------------------------------------------- the block
class TransformerBlock(Layer):
    """Self-attention, then in a decoder attention to what an encoder gave, then the MLP: each adds to what it gets.

    Sources: Vaswani et al. 2017, section 3.1; norms before the parts: Xiong et al. 2020; attention and MLP side by
    side: Wang and Komatsuzaki 2021.

    Args:
        config: of the model that the block is a part of.
        layer: the block's number in it, from 0: a config may treat some layers differently.
        causal: a token sees itself and those before it, and not those after.
        cross: attend to an encoder's output too.
        attention, mlp: parts already built, in place of the config's.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        causal: bool = True,
        cross: bool = False,
        attention: Layer | None = None,
        mlp: Layer | None = None,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        both = config.norm_placement == "both"
        self.norm_placement = config.norm_placement
        self.parallel = config.parallel
        self.attention_norm = new_norm(config)
        self.attention: Any = attention or self_attention(config, layer, causal, initialiser, generator)
        self.attention_post_norm = new_norm(config) if both else None
        if cross:
            self.cross_norm = new_norm(config)
            self.cross: Any = cross_attention(config, initialiser, generator)
            self.cross_post_norm = new_norm(config) if both else None
        else:
            self.cross = None
        self.mlp_norm = None if config.shared_norm else new_norm(config)
        self.mlp: Any = mlp or mlp_of(config, initialiser, generator)
        self.mlp_post_norm = new_norm(config) if both else None

    @takes_ragged
    def forward(
        self,
        x: Operand,
        cache: Cache | None = None,
        mask: Mask = None,
        remembered: tuple[Tensor, Tensor] | None = None,
        remembered_mask: Mask = None,
    ) -> Tensor:
        """(B, T, C) to (B, T, C).

        Args:
            cache: keys and values of earlier tokens, for generation.
            mask: which tokens may be seen, as `attention.additive_mask` takes it.
            remembered: what `cross.remember` gave for an encoder's output; with its mask.

        Raises:
            ValueError: a block with cross-attention got nothing to attend to, or one without got something.
        """
        if self.cross is not None and remembered is None:
            raise ValueError("TransformerBlock(cross=True): expected what `cross.remember` gave, got nothing")
        if self.cross is None and remembered is not None:
            raise ValueError("TransformerBlock: expected nothing remembered without cross=True, got some")
        x = as_tensor(x)
        dtype = x.dtype

        def attend(normal: Tensor) -> Tensor:
            options = () if normal.dtype == dtype else (dtype,)
            if cache is None:
                return self.attention(normal, cache, mask, *options)
            return call_with_cache(self.attention, normal, cache, mask, *options)

        def look(normal: Tensor) -> Tensor:
            return self.cross(normal, mask=remembered_mask, remembered=remembered)

        def think(normal: Tensor) -> Tensor:
            return self.mlp(normal) if normal.dtype == dtype else call(self.mlp, normal, dtype)

        attention_norm, mlp_norm = self._for(self.attention_norm, self.attention), self._for(self.mlp_norm, self.mlp)
        if self.parallel:
            normal = attention_norm(x)
            return residual(residual(x, attend(normal)), think(normal if self.mlp_norm is None else mlp_norm(x)))
        x = self._add(x, attention_norm, attend, self.attention_post_norm)
        if self.cross is not None:
            x = self._add(x, self.cross_norm, look, self.cross_post_norm)
        return self._add(x, mlp_norm, think, self.mlp_post_norm)

    def _for(self, norm: Any, part: Any) -> Callable[[Tensor], Tensor]:
        """Return a norm that gives the dtype which is kept inside the part after it, where both can."""
        if self.precision == "float32" or self.norm_placement in ("after", "output"):
            return norm
        if not (takes_dtype(norm) and takes_dtype(part)):
            return norm
        dtype_inside = getattr(part, "dtype_inside", None)
        return norm if dtype_inside is None else lambda x: norm(x, dtype_inside(x))

    def _add(self, x: Tensor, norm: Any, part: Callable[[Tensor], Tensor], post_norm: Any) -> Tensor:
        """x and a part of it, normed where this block norms."""
        if self.norm_placement == "after":
            return norm(residual(x, part(x)))
        if self.norm_placement == "output":
            return residual(x, norm(part(x)))
        if self.norm_placement == "both":
            return residual(x, post_norm(part(norm(x))))
        return residual(x, part(norm(x)))


class GPT2TransformerBlock(TransformerBlock):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-norm block of GPT-2 (Radford et al. 2019).

    Args:
        embedding_dim, n_heads, context_window: fields of `ModelConfig`, as are `fields`.
        initialiser, generator: as of `TransformerBlock`.
    """

    def __init__(
        self,
        embedding_dim: int,
        n_heads: int,
        context_window: int,
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
        **fields: Any,
    ) -> None:
        config = ModelConfig(embedding_dim=embedding_dim, n_heads=n_heads, context_window=context_window, **fields)
        super().__init__(config, initialiser=initialiser, generator=generator)


# -------------------------------------------------------------------- the parts that a config asks for
def self_attention(
    config: ModelConfig, layer: int, causal: bool, initialiser: Initialiser, generator: Generator
) -> MultiHeadSelfAttention:
    """The self-attention of a layer."""

    def qk_norm(size: int) -> Layer:
        return RMSNorm(size, config.qk_norm_eps, config.qk_norm_gain, config.norm_unit_offset)

    return MultiHeadSelfAttention(
        config.embedding_dim,
        config.n_heads,
        config.context_window,
        n_key_heads=config.n_key_heads,
        head_size=config.head_size,
        bias=config.bias if config.qkv_bias is None else config.qkv_bias,
        output_bias=config.bias if config.output_bias is None else config.output_bias,
        dropout=config.dropout,
        rotary=rotary_of(config, layer) or False,
        qk_norm=qk_norm if config.qk_norm else False,
        qk_norm_per_head=config.qk_norm_per_head,
        softmax=new_softmax(config.softmax, config.softmax_blocks),
        causal=causal,
        window=config.window_of(layer) if causal else None,
        scale=config.score_scale or None,
        cap=config.score_cap or None,
        token_shift=config.token_shift,
        key_shift=config.key_shift,
        initialiser=initialiser,
        generator=generator,
    )


def cross_attention(config: ModelConfig, initialiser: Initialiser, generator: Generator) -> MultiHeadAttention:
    """The attention of a decoder's block to an encoder's output."""
    return MultiHeadAttention(
        config.embedding_dim,
        config.n_heads,
        bias=config.bias,
        softmax=new_softmax(config.softmax, config.softmax_blocks),
        context_window=config.context_window,
        dropout=config.dropout,
        initialiser=initialiser,
        generator=generator,
    )


def mlp_of(config: ModelConfig, initialiser: Initialiser, generator: Generator) -> MLPBlock:
    """The MLP of a block."""
    return MLPBlock(
        config.embedding_dim,
        activation=config.activation,
        gated=config.gated,
        hidden_size=config.mlp_width,
        bias=config.bias if config.mlp_bias is None else config.mlp_bias,
        dropout=config.dropout,
        initialiser=initialiser,
        generator=generator,
    )


def rotary_of(config: ModelConfig, layer: int) -> Rotary | None:
    """How queries and keys of a layer are turned, if they are."""
    if config.positions != "rotary":
        return None
    if config.window_of(layer) is not None and config.rotary_local_base:
        return Rotary(config.rotary_local_base, config.rotary_fraction)
    if config.rotary_scaling == "none":
        return Rotary(config.rotary_base, config.rotary_fraction)
    scaling = RotaryScaling(
        config.rotary_scaling,
        config.rotary_factor,
        config.rotary_low_frequency,
        config.rotary_high_frequency,
        config.rotary_original_window,
    )
    return Rotary(config.rotary_base, config.rotary_fraction, scaling)
