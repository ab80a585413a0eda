"""The blocks of a transformer: attention with its projections, the MLP, and both with norms and residuals.

Shapes: B batch, T tokens, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tricycle.activation import GeLU, ReLU, ReLUSquared, SwiGLU, Swish
from tricycle.attention import CrossAttention, KeyValueCache, Mask, Rotary, SelfAttention, TokenShift
from tricycle.functions import RowSoftmax, new_softmax
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Dropout, Generator, Layer, LayerNorm, RMSNorm, new_generator
from tricycle.ops import Op, as_tensor, positive, reshape
from tricycle.tensor import Operand, Tensor

# The activations that a config may name.
ACTIVATIONS: dict[str, Callable] = {
    "gelu": GeLU, "relu": ReLU, "relu_squared": ReLUSquared, "swish": Swish, "swiglu": SwiGLU,
}  # fmt: skip


class _MultiHead(Layer):
    """What both layers with heads have in common."""

    attention: Any
    context_window: Any
    projection: Dense

    def __init__(self, embedding_dim: int, n_heads: int, context_window: int | None) -> None:
        title = type(self).__name__
        positive(title, embedding_dim=embedding_dim, n_heads=n_heads)
        if embedding_dim % n_heads:
            got = f"{embedding_dim} and {n_heads}"
            raise ValueError(f"{title}: expected embedding_dim to be a multiple of n_heads, got {got}")
        self.embedding_dim, self.n_heads, self.context_window = embedding_dim, n_heads, context_window

    def use_softmax(self, softmax: str | RowSoftmax) -> None:
        """Turn scores into weights in another way from now on, with a fresh parameter if it needs one."""
        softmax, window = new_softmax(softmax), self.context_window
        scales = softmax.new_scales(self.n_heads, window or 1)
        if scales is not None and window is None:
            raise ValueError(f"{type(self).__name__}: expected a context_window with {softmax}")
        self.attention = self._new_attention(softmax.for_window(window) if window else softmax)
        weights = self.projection.weights
        if scales is not None and weights.on_gpu:
            scales.to_gpu(weights.array.device.id)
        self.softmax_scales = scales

    def _new_attention(self, softmax: RowSoftmax) -> Op:
        raise NotImplementedError


class MultiHeadSelfAttention(_MultiHead):
    """Self-attention in several heads, with the projections before and after.

    Args:
        embedding_dim: C, a multiple of n_heads.
        n_heads: H.
        context_window: the most tokens it takes; any smaller number will do.
        bias: the projections add a bias.
        dropout: probability of dropping an element of the result.
        rotary: turn queries and keys by position (`Rotary`).
        softmax: what turns scores into weights: a name in `functions.SOFTMAXES`, or an object.
        causal: a token sees itself and those before it, and not those after.
        qk_norm: scale the queries and keys of each head to one length before they are turned (needs `rotary`).
        token_shift: mix each token with the one before it first (`TokenShift`).
    """

    def __init__(
        self, embedding_dim: int, n_heads: int, context_window: int, bias: bool = True, dropout: float = 0.0,
        rotary: bool = False, initialiser: Initialiser = xavier, generator: Generator = None,
        softmax: str | RowSoftmax = "softmax", causal: bool = True, qk_norm: bool = False,
        token_shift: bool = False,
    ) -> None:
        positive("MultiHeadSelfAttention", context_window=context_window)
        generator = new_generator(generator)
        super().__init__(embedding_dim, n_heads, context_window)
        self.causal = causal
        self.shift = TokenShift(embedding_dim) if token_shift else None
        self.qkv = Dense(embedding_dim, 3 * embedding_dim, bias, initialiser, generator)
        if qk_norm and not rotary:
            raise ValueError("MultiHeadSelfAttention: expected rotary=True with qk_norm=True, got rotary=False")
        self.rotary = Rotary(n_heads, normalise=qk_norm) if rotary else None
        self.projection = Dense(embedding_dim, embedding_dim, bias, initialiser, generator)
        self.dropout = Dropout(dropout, generator)
        self.use_softmax(softmax)

    def _new_attention(self, softmax: RowSoftmax) -> Op:
        return SelfAttention(self.n_heads, self.causal, softmax)

    def forward(self, x: Operand, cache: KeyValueCache | None = None, mask: Mask = None) -> Tensor:
        """(B, T, C), or (T, C) for one sequence, to the same shape.

        Args:
            cache: keys and values of earlier tokens, for generation.
            mask: which keys may be seen, as `attention.additive_mask` takes it.

        Raises:
            ValueError: a wrong width, no token, or more tokens than the context window.
        """
        x = as_tensor(x, self.qkv.weights)
        if x.ndim < 2 or x.shape[-1] != self.embedding_dim or x.shape[-2] == 0:
            title = f"MultiHeadSelfAttention(embedding_dim={self.embedding_dim})"
            raise ValueError(f"{title}: expected shape (batch, tokens, {self.embedding_dim}), got {x.shape}")
        seen = cache.length if cache is not None else 0
        if seen + x.shape[-2] > self.context_window:
            title = f"MultiHeadSelfAttention(context_window={self.context_window})"
            raise ValueError(f"{title}: expected at most {self.context_window} tokens, got {seen + x.shape[-2]}")
        rows = x if x.ndim == 3 else reshape(x, -1, *x.shape[-2:])
        qkv = self.qkv(rows if self.shift is None else self.shift(rows, cache))
        if self.rotary is not None:
            qkv = self.rotary(qkv, offset=seen)
        out = self.dropout(self.projection(self.attention(qkv, cache, self.softmax_scales, mask, self.qkv.precision)))
        return out if x.ndim == 3 else reshape(out, x.shape)


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
        self, embedding_dim: int, n_heads: int, key_size: int | None = None, value_size: int | None = None,
        bias: bool = True, initialiser: Initialiser = xavier, generator: Generator = None,
        softmax: str | RowSoftmax = "softmax", context_window: int | None = None, dropout: float = 0.0,
    ) -> None:
        generator = new_generator(generator)
        super().__init__(embedding_dim, n_heads, context_window)
        self.query = Dense(embedding_dim, embedding_dim, bias, initialiser, generator)
        self.key = Dense(key_size or embedding_dim, embedding_dim, bias, initialiser, generator)
        self.value = Dense(value_size or embedding_dim, embedding_dim, bias, initialiser, generator)
        self.projection = Dense(embedding_dim, embedding_dim, bias, initialiser, generator)
        self.dropout = Dropout(dropout, generator)
        self.use_softmax(softmax)

    def _new_attention(self, softmax: RowSoftmax) -> Op:
        return CrossAttention(self.n_heads, softmax)

    def remember(self, key: Operand, value: Operand | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values as they are attended to: computed once where queries come one after the other.

        Args:
            key: (B, S, key_size). value: (B, S, value_size), the keys unless given.
        """
        return self.key(key), self.value(key if value is None else value)

    def forward(
        self, query: Operand, key: Operand | None = None, value: Operand | None = None, mask: Mask = None,
        remembered: tuple[Tensor, Tensor] | None = None, return_weights: bool = False,
    ) -> Any:
        """
        Args:
            query: (B, T, C). key, value: as of `remember`.
            mask: which keys may be seen, as `attention.additive_mask` takes it.
            remembered: what `remember` gave, in place of key and value.

        Returns:
            (B, T, C); with `return_weights` also the weights of each head, an array (B, H, T, S).
        """
        if (key is None) == (remembered is None):
            raise ValueError("MultiHeadAttention: expected either keys or what `remember` gave for them")
        k, v = self.remember(key, value) if remembered is None else remembered
        given = self.query(query), k, v, self.softmax_scales, mask
        out = self.dropout(self.projection(self.attention(*given)))
        return (out, self.attention.look(*given)[1]) if return_weights else out


class MLPBlock(Layer):
    """A wider hidden layer with an activation, applied to each token by itself.

    Args:
        embedding_dim: C.
        expansion_ratio: the hidden layer is this many times wider. "swiglu" has three matrices instead of two,
            so its hidden layer is 2/3 as wide, rounded up to a multiple of 8 (Shazeer 2020).
        activation: a name in ACTIVATIONS.
    """

    def __init__(
        self, embedding_dim: int, expansion_ratio: float = 4, activation: str = "gelu", bias: bool = True,
        dropout: float = 0.0, initialiser: Initialiser = xavier, generator: Generator = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"MLPBlock: expected activation to be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        positive("MLPBlock", embedding_dim=embedding_dim)
        if not 0 < expansion_ratio < math.inf:
            raise ValueError(f"MLPBlock: expected a finite expansion_ratio above 0, got {expansion_ratio!r}")
        generator = new_generator(generator)
        gated = activation == "swiglu"
        hidden = round(embedding_dim * expansion_ratio)
        if gated:
            hidden = -(-2 * hidden // 3 // 8) * 8
        self.up = Dense(embedding_dim, 2 * hidden if gated else hidden, bias, initialiser, generator)
        self.activation = ACTIVATIONS[activation]()
        self.projection = Dense(hidden, embedding_dim, bias, initialiser, generator)
        self.dropout = Dropout(dropout, generator)

    def forward(self, x: Operand) -> Tensor:
        """(..., C) to (..., C)."""
        return self.dropout(self.projection(self.activation(self.up(x))))


class TransformerBlock(Layer):
    """Self-attention, then in a decoder attention to what an encoder gave, then the MLP: each adds to what it gets.

    Source: Vaswani et al. 2017, section 3.1.

    Args:
        causal: a token sees itself and those before it, and not those after.
        cross: attend to an encoder's output too.
        norm_first: x + part(norm(x)), which trains more easily (Xiong et al. 2020); else norm(x + part(x)), as in the
            paper. The others are as of `MultiHeadSelfAttention` and `MLPBlock`.
    """

    def __init__(
        self, embedding_dim: int, n_heads: int, context_window: int, expansion_ratio: float = 4,
        activation: str = "gelu", norm: str = "layer_norm", bias: bool = True, dropout: float = 0.0,
        rotary: bool = False, initialiser: Initialiser = xavier, generator: Generator = None,
        softmax: str | RowSoftmax = "softmax", causal: bool = True, cross: bool = False, norm_first: bool = True,
        qk_norm: bool = False, token_shift: bool = False,
    ) -> None:
        generator = new_generator(generator)
        self.norm_first = norm_first
        self.attention_norm = new_norm(norm, embedding_dim, bias)
        self.attention = MultiHeadSelfAttention(
            embedding_dim, n_heads, context_window, bias, dropout, rotary, initialiser, generator, softmax, causal,
            qk_norm, token_shift,
        )
        if cross:
            self.cross_norm = new_norm(norm, embedding_dim, bias)
            self.cross = MultiHeadAttention(
                embedding_dim, n_heads, None, None, bias, initialiser, generator, softmax, context_window, dropout
            )
        self.mlp_norm = new_norm(norm, embedding_dim, bias)
        self.mlp = MLPBlock(embedding_dim, expansion_ratio, activation, bias, dropout, initialiser, generator)

    def forward(
        self, x: Operand, cache: KeyValueCache | None = None, mask: Mask = None,
        remembered: tuple[Tensor, Tensor] | None = None, remembered_mask: Mask = None,
    ) -> Tensor:
        """(B, T, C) to (B, T, C).

        Args:
            cache: keys and values of earlier tokens, for generation.
            mask: which tokens may be seen, as `attention.additive_mask` takes it.
            remembered: what `cross.remember` gave for an encoder's output; with its mask.
        """
        x = self._add(as_tensor(x), self.attention_norm, lambda x: self.attention(x, cache, mask))
        if remembered is not None:
            x = self._add(x, self.cross_norm, lambda x: self.cross(x, mask=remembered_mask, remembered=remembered))
        return self._add(x, self.mlp_norm, self.mlp)

    def _add(self, x: Tensor, norm: Layer, part: Callable[[Tensor], Tensor]) -> Tensor:
        return x + part(norm(x)) if self.norm_first else norm(x + part(x))


class GPT2TransformerBlock(TransformerBlock):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-norm block of GPT-2 (Radford et al. 2019)."""


def new_norm(name: str, size: int, bias: bool) -> Layer:
    """A norm by its name; only the layer norm can have a bias.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ("layer_norm", "rms_norm"):
        raise ValueError(f"new_norm: expected norm to be one of layer_norm, rms_norm, got {name!r}")
    return LayerNorm(size, bias) if name == "layer_norm" else RMSNorm(size)
