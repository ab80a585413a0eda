"""Transformer blocks: multi-head self-attention, MLP, norms and residual connections.

Shapes: B batch, T tokens, C channels, H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

from tricycle import kernels
from tricycle.activation import new_activation
from tricycle.attention.attend import SHIFTS, Attention, Mask, merge_heads
from tricycle.attention.cache import KeyValueCache, Segments, takes_ragged
from tricycle.attention.rotary import POSITIONS
from tricycle.autograd import is_evaluating
from tricycle.configs.model import ModelConfig
from tricycle.functions import RowSoftmax, new_softmax
from tricycle.initialisers import Initialiser, xavier
from tricycle.kernels import FEW_ROWS
from tricycle.layers import MIXTURES, Dense, Dropout, Generator, Layer, LayerNorm, RMSNorm, new_generator
from tricycle.ops import as_tensor, reshape, sigmoid, split_heads
from tricycle.tensor import Operand, Tensor

# By the type of a sublayer or block, a function for a few tokens without gradients: see `tricycle.decoding.sublayers`.
FUSED: dict[type, Any] = {}


def activation_dtype(x: Tensor, precision: str, *layers: Any) -> Any:
    """Return the 16-bit dtype for activations of `layers`; None (as x) for few rows in evaluation, or no `dtype`."""
    is_short = math.prod(x.shape[:-1]) <= FEW_ROWS and is_evaluating()
    if precision == "float32" or is_short or not all(accepts_argument(layer, "dtype") for layer in layers):
        return None
    dtype = kernels.matmul_operand(x.array[:0], precision).dtype
    return None if dtype == x.dtype else dtype


def accepts_argument(layer: Any, parameter: str) -> bool:
    """Return whether a function, or a layer's `forward`, has a parameter of this name."""
    forward = getattr(layer, "forward", layer)
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and parameter in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def call_with_dtype(layer: Any, x: Tensor, dtype: Any) -> Tensor:
    """Return `layer(x, dtype=dtype)` if the layer has the argument and `dtype` is given, else `layer(x)`."""
    result: Tensor = layer(x) if dtype is None or not accepts_argument(layer, "dtype") else layer(x, dtype=dtype)
    return result


class MultiHead(Layer):
    """The base of multi-head attention layers: the attention operation and the output projection."""

    attention: Attention
    projection: Dense
    n_heads: int
    context_window: Any  # an integer, or None for no limit

    def use_softmax(self, softmax: str | RowSoftmax) -> None:
        """Replace `attention` by one with another softmax, and `softmax_scales` by its new parameter, or None."""
        now = self.attention
        chosen, scales = new_softmax(softmax).for_layer(self.n_heads, self.context_window)
        self.attention = Attention(chosen, now.causal, now.window, now.scale, now.softcap)
        if scales is not None and self.projection.weights.on_gpu:
            scales.to_gpu(self.projection.weights.array.device.id)
        self.softmax_scales = scales

    def _attend_to_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache, mask: Mask) -> Tensor:
        """Append keys and values to the cache; return each text's attention to its cached ones."""
        return cache.attend(self.attention, q, k, v, mask, self.softmax_scales, precision=self.precision)


class MultiHeadSelfAttention(MultiHead):
    """Multi-head self-attention with query, key, value and output projections.

    Args:
        embedding_dim: C. n_heads: H, a divisor of C. context_window: the maximum number of tokens.
        layer, causal: see `TransformerBlock`.
        softmax: a softmax variant: a name in `functions.SOFTMAXES`, or an object.
        initialiser, generator: of the initial weights; the generator also draws dropout masks.
        fields: further fields of `ModelConfig`, such as `n_key_heads`, `window`, `qk_norm`; by default no positions.
    """

    qk_norm_per_head: bool = True  # for models pickled before the option existed
    gates_output = False  # whether each head's output is multiplied by sigmoids, computed with the queries (subclasses)
    uses_shift = property(lambda self: self.shift is not None or self.key_shift is not None)  # a token or key shift

    def __init__(
        self,
        embedding_dim: int,
        n_heads: int,
        context_window: int,
        *,
        layer: int = 0,
        causal: bool = True,
        softmax: str | RowSoftmax = "softmax",
        initialiser: Initialiser = xavier,
        generator: Generator = None,
        **fields: Any,
    ) -> None:
        fields = {"positions": "none", **fields, "embedding_dim": embedding_dim, "n_heads": n_heads}
        config = ModelConfig(context_window=context_window, **fields)
        generator = new_generator(generator)
        self.embedding_dim, self.n_heads, self.context_window = embedding_dim, n_heads, context_window
        self.n_key_heads, self.head_size = config.key_heads, config.channels_per_head
        window = config.window_size(layer) if causal else None
        self.attention = Attention("softmax", causal, window, config.score_scale or None, config.score_cap or None)
        self.shift = SHIFTS["token_shift"](embedding_dim) if config.token_shift else None
        n_channels = (n_heads * (1 + self.gates_output) + 2 * self.n_key_heads) * self.head_size
        bias = config.bias if config.qkv_bias is None else config.qkv_bias
        self.qkv = Dense(embedding_dim, n_channels, bias, initialiser, generator)
        self.key_shift = SHIFTS["key_shift"](self.n_key_heads, self.head_size) if config.key_shift else None
        self.qk_norm_per_head = config.qk_norm_per_head
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            sizes = [self.head_size * (1 if self.qk_norm_per_head else n) for n in (n_heads, self.n_key_heads)]
            self.query_norm, self.key_norm = (
                RMSNorm(size, config.qk_norm_eps, config.qk_norm_gain, config.norm_unit_offset) for size in sizes
            )
        positions = "none" if layer in config.unrotated_layers else config.positions
        self.rotary = POSITIONS[positions].new_rotation(config, layer)
        bias = config.bias if config.output_bias is None else config.output_bias
        self.projection = Dense(n_heads * self.head_size, embedding_dim, bias, initialiser, generator)
        self.dropout = Dropout(config.dropout, generator)
        self.use_softmax(new_softmax(softmax, config))

    @takes_ragged
    def forward(self, x: Operand, cache: KeyValueCache | None = None, mask: Mask = None, dtype: Any = None) -> Tensor:
        """Apply self-attention to x (B, T, C) or (T, C), in x's shape; extend the cache; `mask`: True for visible keys.

        Args:
            cache: the KV cache, for generation; without gradients.
            mask: a further boolean mask, see `attend.additive_mask`.
            dtype: of the result; by default the dtype of x.
        """
        x = as_tensor(x)
        shape = x.array.shape
        if len(shape) < 2 or shape[-1] != self.embedding_dim or shape[-2] == 0:
            title = f"MultiHeadSelfAttention(embedding_dim={self.embedding_dim})"
            raise ValueError(f"{title}: expected shape (batch, tokens, {self.embedding_dim}), got {shape}")
        rows = x if len(shape) == 3 else reshape(x, -1, *shape[-2:])
        segments = ((0, shape[-2]),) if cache is None else cache.segments(shape[-2])
        if (longest := max(first + n_tokens for first, n_tokens in segments)) > self.context_window:
            title = f"MultiHeadSelfAttention(context_window={self.context_window})"
            raise ValueError(f"{title}: expected at most {self.context_window} tokens, got {longest}")
        dtype = x.dtype if dtype is None and self.precision != "float32" else dtype
        q, *gates, k, v = self._project(rows, segments, cache, self.hidden_dtype(x) if cache is None else dtype)
        if cache is None:
            out = self.attention(q, k, v, mask, self.softmax_scales, self.precision)
        else:
            out = self._attend_to_cached(q, k, v, cache, mask)
        out = merge_heads(out * sigmoid(gates[0]) if gates else out)
        out = self.dropout(call_with_dtype(self.projection, out, dtype))
        return out if len(shape) == 3 else reshape(out, shape)

    def hidden_dtype(self, x: Tensor) -> Any:
        """Return the dtype of activations between the projections of x, or None for the dtype of x."""
        is_fused = getattr(self.attention.softmax, "fused", False) and not self.uses_shift
        return activation_dtype(x, self.precision, self.qkv, self.projection) if is_fused else None

    def _project(self, x: Tensor, segments: Segments, cache: KeyValueCache | None, dtype: Any) -> list[Tensor]:
        """Return queries, any gates (B, T, H, D), keys, values (B, T, K, D) of x (B, T, C), normalized, with RoPE."""
        x = x if self.shift is None else self.shift(x, cache)
        n_heads = [self.n_heads] * (1 + self.gates_output) + [self.n_key_heads] * 2
        q, *gates, k, v = split_heads(call_with_dtype(self.qkv, x, dtype), n_heads, self.head_size)
        if self.key_shift is not None:
            k = reshape(self.key_shift(merge_heads(k), cache), k.shape)
        if self.query_norm is not None and self.key_norm is not None:
            joined = [q, k] if self.qk_norm_per_head else [merge_heads(q), merge_heads(k)]
            normal = self.query_norm(joined[0]), self.key_norm(joined[1])
            q, k = normal if self.qk_norm_per_head else (reshape(y, x.shape) for x, y in zip((q, k), normal))
        if self.rotary is not None:
            q, k = self.rotary(q, segments), self.rotary(k, segments)
        return [q, *gates, k, v]


class MLPBlock(Layer):
    """The MLP of a block: a wider hidden layer with an activation, for each token; `fields` are of `ModelConfig`."""

    def __init__(
        self,
        embedding_dim: int,
        expansion_ratio: float = 4,
        activation: Any = "gelu",
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
        **fields: Any,
    ) -> None:
        fields = {"n_heads": 1, **fields, "expansion_ratio": expansion_ratio, "activation": activation}
        config = ModelConfig(embedding_dim=embedding_dim, **fields)
        generator = new_generator(generator)
        self.activation = new_activation(activation, config.gated)
        bias = config.bias if config.mlp_bias is None else config.mlp_bias
        self.up = Dense(embedding_dim, config.mlp_width * (2 if config.is_gated else 1), bias, initialiser, generator)
        self.projection = Dense(config.mlp_width, embedding_dim, bias, initialiser, generator)
        self.dropout = Dropout(config.dropout, generator)

    def hidden_dtype(self, x: Tensor) -> Any:
        """Return the dtype of the hidden layer for input x, or None for the dtype of x."""
        is_exact = getattr(self.activation, "computes_in_float32", False)
        return activation_dtype(x, self.precision, self.up, self.projection) if is_exact else None

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """Apply the MLP to x (..., C); the result has `dtype`, by default the dtype of x."""
        x = as_tensor(x)
        hidden = self.activation(call_with_dtype(self.up, x, self.hidden_dtype(x)))
        dtype = x.dtype if dtype is None and self.precision != "float32" else dtype
        return self.dropout(call_with_dtype(self.projection, hidden, dtype))


def new_norm(config: ModelConfig) -> Layer:
    """Make the norm layer of a config, `LayerNorm` or `RMSNorm`."""
    if config.norm == "layer_norm":
        return LayerNorm(config.embedding_dim, config.bias, config.norm_eps)
    return RMSNorm(config.embedding_dim, config.norm_eps, unit_offset=config.norm_unit_offset)


class TransformerBlock(Layer):
    """A transformer block: self-attention and MLP, each added to the residual stream.

    Sources: Vaswani et al. 2017, section 3.1; pre-norm: Xiong et al. 2020; parallel: Wang and Komatsuzaki 2021.

    Args:
        config: of the model. layer: the index of the block in the model, from 0.
        causal: whether each token attends only to itself and earlier tokens.
        attention, mlp: sublayers to use in place of new ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        *,
        causal: bool = True,
        attention: Layer | None = None,
        mlp: Layer | None = None,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        options: dict[str, Any] = {"initialiser": initialiser, "generator": new_generator(generator)}
        fields = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__} | options
        both = config.norm_placement == "both"
        self.norm_placement, self.parallel, self.scale = config.norm_placement, config.parallel, config.residual_scale
        self.attention_norm = new_norm(config)
        self.attention: Any = attention or MultiHeadSelfAttention(**fields, layer=layer, causal=causal)
        self.attention_post_norm: Any = new_norm(config) if both else None
        self.mlp_norm = None if config.shared_norm else new_norm(config)
        self.mlp: Any = mlp or (MIXTURES["experts"](config, **options) if config.n_experts else MLPBlock(**fields))
        self.mlp_post_norm = new_norm(config) if both else None

    @takes_ragged
    def forward(self, x: Operand, cache: KeyValueCache | None = None, mask: Mask = None) -> Tensor:
        """Apply attention, MLP, norms and residuals to x (B, T, C); extend the cache; `mask`: True for visible keys."""
        x = as_tensor(x)
        if self.parallel:
            normal = self._normalize(self.attention_norm, self.attention, x)
            attended = self._add(x, self._run(self.attention, normal, x.dtype, cache, mask))
            normal = normal if self.mlp_norm is None else self._normalize(self.mlp_norm, self.mlp, x)
            return self._add(attended, self._run(self.mlp, normal, x.dtype))
        x = self.add_sublayer(x, self.attention, self.attention_norm, self.attention_post_norm, cache, mask)
        return self.add_sublayer(x, self.mlp, self.mlp_norm, self.mlp_post_norm)

    def add_sublayer(self, x: Tensor, part: Any, norm: Any, post_norm: Any, *args: Any) -> Tensor:
        """Return x + post_norm(part(norm(x), *args)), or norm(x + part(x)) or x + norm(part(x)) by `norm_placement`."""
        if self.norm_placement == "after":
            return norm(self._add(x, self._run(part, x, x.dtype, *args)))
        if self.norm_placement == "output":
            norm, post_norm = None, norm
        fused = FUSED.get(type(part))
        if fused and (y := fused(x, part, (norm, post_norm), self.scale, *args)) is not None:
            return y
        out = self._run(part, x if norm is None else self._normalize(norm, part, x), x.dtype, *args)
        return self._add(x, out if post_norm is None else post_norm(out))

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return x + branch, the branch times `residual_scale` of the config."""
        return x + (branch if self.scale == 1 else branch * self.scale)

    def _normalize(self, norm: Any, part: Any, x: Tensor) -> Tensor:
        """Return norm(x) for a sublayer, in the sublayer's hidden dtype if it can return the dtype of x."""
        if self.precision == "float32" or not hasattr(part, "hidden_dtype") or not accepts_argument(part, "dtype"):
            return norm(x)
        return call_with_dtype(norm, x, part.hidden_dtype(x))

    def _run(self, part: Any, x: Tensor, dtype: Any, cache: KeyValueCache | None = None, *mask: Any) -> Tensor:
        """Return part(x, cache, mask), or part(x) without cache and mask, in a dtype if the part has the argument."""
        options = {"dtype": dtype} if x.array.dtype != dtype and accepts_argument(part, "dtype") else {}
        if cache is not None:
            return cache.call(part, x, *mask, **options)
        return part(x, None, *mask, **options) if mask else part(x, **options)


class GPT2TransformerBlock(TransformerBlock):
    """The pre-norm block of GPT-2 (Radford et al. 2019), with fields of `ModelConfig` as arguments."""

    def __init__(self, embedding_dim: int, n_heads: int, context_window: int, **fields: Any) -> None:
        options = {name: fields.pop(name) for name in ("initialiser", "generator") if name in fields}
        config = ModelConfig(embedding_dim=embedding_dim, n_heads=n_heads, context_window=context_window, **fields)
        super().__init__(config, **options)
