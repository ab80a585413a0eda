"""Multi-head latent attention: keys and values of all heads are computed from one short vector per token, the latent.

In generation, attention reads the keys and values of all earlier tokens for each new token, so their memory limits the
length of texts and the number of texts in a batch. Usual attention caches 2 H D numbers per token and layer. Here a
token is projected to a latent c of L numbers, and the keys and values of head h are products of it: k = c A_h and
v = c B_h. Only the latent is cached. DeepSeek-V2 has H = 128 heads with D = 128: 32,768 numbers become 576.

RoPE would prevent the second trick below, because it puts a rotation, which depends on the position, between query and
A_h. Therefore each key has two parts: a part for content from the latent, without RoPE, and a part of R channels with
RoPE, which is projected from the token itself and is the same for all heads. The cache stores L + R numbers per token.

There are two ways to compute the same attention to cached latents:

- Expand: compute the keys and values of all cached tokens, S L H (D + E) multiplications. This is best if many queries
  share the result, as for a prompt.
- Absorb: q (c A)^T = (q A^T) c^T, so A is applied to the query in place of the keys, and B to the result in place of
  the values. Then all heads attend to the latents as to one shared head of keys and values, T S H L multiplications
  for scores and again for results, and no key or value is ever computed. This is best for one new token.

Source: DeepSeek-AI 2024, "DeepSeek-V2: a strong, economical, and efficient mixture-of-experts language model",
section 2.1 and appendix C.

Shapes: B batch, T new tokens, S all tokens, C channels, H heads, L latent size; in each head D content channels and R
rotated channels of queries and keys, E channels of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tricycle.activation import ACTIVATIONS
from tricycle.attention.attend import Attention, Mask
from tricycle.attention.cache import KeyValueCache, Segments, concatenate_texts
from tricycle.attention.rotary import POSITIONS
from tricycle.blocks import MultiHeadSelfAttention, TransformerBlock
from tricycle.configs.model import ModelConfig, Norm
from tricycle.configs.presets import GPTConfig
from tricycle.configs.validated import OneOf
from tricycle.devices import Array, array_module
from tricycle.einsum import Einsum
from tricycle.experts import MixtureOfExperts, Routing
from tricycle.extra_ops import concatenate, split_sizes
from tricycle.functions import new_softmax
from tricycle.initialisers import Initialiser, xavier
from tricycle.kernels.dispatch import upcast
from tricycle.layers import Dense, Dropout, Generator, RMSNorm, new_generator
from tricycle.ops import reshape
from tricycle.tensor import Tensor

NORM_EPS = 1e-6  # of the norms of latents
UNSUPPORTED = ("qk_norm", "token_shift", "key_shift", "unrotated_layers", "rotary_local_base")  # fields


@dataclass(frozen=True)
class LatentConfig(ModelConfig):
    """The architecture of a decoder with latent attention, and with experts in all layers but the first.

    `head_size` is D, without the rotated channels; `hidden_size` is that of the first layers. The defaults are those of
    DeepSeek-V2-Lite without its RoPE scaling.
    """

    vocab_size: int = 102_400
    context_window: int = 4096
    embedding_dim: int = 2048
    n_heads: int = 16
    n_layers: int = 27
    head_size: int = 128
    hidden_size: int = 10_944
    activation: OneOf[str, ACTIVATIONS] = "swish"
    n_experts: int = 64
    n_active_experts: int = 6
    normalize_experts: bool = False
    router_loss: float = 0.0
    gated: bool = True
    norm: Norm = "rms_norm"
    norm_eps: float = 1e-6
    positions: OneOf[str, POSITIONS] = "rotary"
    bias: bool = False
    tied: bool = False
    # ---- fields of latent attention
    query_rank: int = 0  # size of the latent of queries; 0 to project queries without one
    latent_size: int = 512  # size of the latent of keys and values, which is cached
    rotary_size: int = 64  # channels of queries and keys with RoPE, beside head_size channels without
    value_size: int = 128  # channels of values per head
    yarn_mscale: float = 0.0  # of yarn: scores are multiplied by (1 + 0.1 yarn_mscale ln(rotary_factor))**2
    # ---- fields of experts
    n_dense_layers: int = 1  # first layers with an MLP of hidden_size in place of experts
    expert_size: int = 1408  # width of the hidden layer of an expert
    n_shared_experts: int = 2  # experts that process every token, as one MLP
    expert_scale: float = 1.0  # factor of the weighted sum of the selected experts
    sigmoid_router: bool = False  # whether the scores of experts are sigmoids, with a correction for the selection
    n_groups: int = 1  # groups of experts
    n_active_groups: int = 1  # groups from which the experts of a token are selected

    def __post_init__(self) -> None:
        """Check the fields as `ModelConfig`, and those of latent attention; ValueError for the first invalid one."""
        super().__post_init__()
        reachable = self.n_experts * self.n_active_groups // self.n_groups if self.n_groups > 0 else 0
        for name, holds, rule in (
            ("latent_size", self.latent_size >= 1, "at least 1"),
            ("value_size", self.value_size >= 1, "at least 1"),
            ("expert_size", self.expert_size >= 1, "at least 1"),
            ("rotary_size", self.rotary_size >= 2 and self.rotary_size % 2 == 0, "an even number above 0"),
            ("head_size", self.head_size >= 1, "at least 1"),
            ("query_rank", self.query_rank >= 0, "0 or more"),
            ("yarn_mscale", self.yarn_mscale >= 0, "0 or more"),
            ("yarn_mscale", self.rotary_scaling == "yarn" or not self.yarn_mscale, "0 without yarn"),
            ("rotary_scaling", self.rotary_scaling != "longrope", "another one than longrope"),
            ("n_dense_layers", self.n_dense_layers >= 0, "0 or more"),
            ("n_shared_experts", self.n_shared_experts >= 0, "0 or more"),
            ("expert_scale", self.expert_scale > 0, "above 0"),
            ("n_groups", self.n_groups >= 1 and self.n_experts % self.n_groups == 0, "a divisor of n_experts"),
            ("n_active_groups", 1 <= self.n_active_groups <= self.n_groups, f"from 1 to n_groups {self.n_groups}"),
            ("n_active_experts", not self.n_experts or self.n_active_experts <= reachable, f"at most {reachable}"),
            ("router_loss", not self.sigmoid_router or not self.router_loss, "0 with sigmoid_router"),
            ("n_key_heads", self.n_key_heads in (0, self.n_heads), f"0 or n_heads {self.n_heads}"),
            ("positions", self.positions == "rotary", "rotary"),
            ("rotary_fraction", self.rotary_fraction == 1, "1, because rotary_size channels are rotated"),
            *((name, not getattr(self, name), "unset in latent attention") for name in UNSUPPORTED),
        ):
            self._require(name, holds, rule)

    @property
    def channels_per_head(self) -> int:
        """The number of channels of queries and keys in a head: D + R."""
        return self.head_size + self.rotary_size

    @property
    def n_mixture_layers(self) -> int:
        """The number of layers with experts: all after the dense ones, or 0 without experts."""
        return max(0, self.n_layers - self.n_dense_layers) if self.n_experts else 0

    @property
    def min_layer_weights(self) -> int:
        """A lower bound of the mean number of weights of a layer: its attention, and an MLP or experts."""
        width, heads = self.embedding_dim, self.n_heads * (self.head_size + self.value_size)
        queries = self.n_heads * self.channels_per_head
        attention = width * (self.latent_size + self.rotary_size + self.n_heads * self.value_size)
        attention += self.latent_size * heads + (self.query_rank * (width + queries) or width * queries)
        hidden = (self.n_layers - self.n_mixture_layers) * self.mlp_width
        hidden += self.n_mixture_layers * (self.n_experts + self.n_shared_experts) * self.expert_size
        return attention + (3 if self.is_gated else 2) * width * hidden // self.n_layers

    def new_block(self, layer: int, **options: Any) -> TransformerBlock:
        """Make the block of a layer: latent attention, and an MLP, or after the dense layers a mixture of experts."""
        attention, mlp = LatentAttention(self, layer, **options), None
        if self.n_experts and layer >= self.n_dense_layers:
            how = self.n_active_experts, self.normalize_experts, self.sigmoid_router
            routing = Routing(*how, self.n_groups, self.n_active_groups, self.expert_scale)
            expert, shared_size = replace(self, hidden_size=self.expert_size), self.n_shared_experts * self.expert_size
            mlp = MixtureOfExperts(expert, routing, shared_size, **options)
        return TransformerBlock(replace(self, n_experts=0), layer, attention=attention, mlp=mlp, **options)


@dataclass(frozen=True)
class LatentTrainingConfig(LatentConfig, GPTConfig):
    """The architecture and the training of a decoder with latent attention."""


class LatentAttention(MultiHeadSelfAttention):
    """Causal self-attention whose keys and values are computed from a latent, which alone is cached.

    Args:
        config: of the model. layer: the index of the block.
        initialiser, generator: of the initial weights; the generator also draws dropout masks.
    """

    caches_latents = True  # the cache stores no keys and values of heads

    def __init__(
        self, config: LatentConfig, layer: int = 0, *, initialiser: Initialiser = xavier, generator: Generator = None
    ) -> None:
        generator = new_generator(generator)
        dense = partial(Dense, initialiser=initialiser, generator=generator)
        width, n_heads, rank, latent_size = config.embedding_dim, config.n_heads, config.query_rank, config.latent_size
        self.embedding_dim, self.n_heads, self.context_window = width, n_heads, config.context_window
        self.content_size, self.rotary_size, self.head_size = config.head_size, config.rotary_size, config.value_size
        self.n_key_heads, self.shift, self.key_shift = n_heads, None, None
        bias, output_bias = (config.bias if own is None else own for own in (config.qkv_bias, config.output_bias))
        self.query_latent: Any = dense(width, rank, bias) if rank else None
        self.query_norm: Any = RMSNorm(rank, NORM_EPS) if rank else None
        n_queries = n_heads * config.channels_per_head
        self.query: Any = None if rank else dense(width, n_queries, False)
        self.query_expansion: Any = dense(rank, n_queries, False) if rank else None
        self.latent = dense(width, latent_size + config.rotary_size, bias)  # and the rotated part of the key
        self.latent_norm = RMSNorm(latent_size, NORM_EPS)
        self.expansion = dense(latent_size, n_heads * (config.head_size + config.value_size), False)  # A and B
        self.rotary = POSITIONS[config.positions].new_rotation(config, layer)
        self.projection = dense(n_heads * config.value_size, width, output_bias)
        self.dropout = Dropout(config.dropout, generator)
        mscale = 1 + 0.1 * config.yarn_mscale * math.log(max(1.0, config.rotary_factor))
        scale = mscale**2 * (config.score_scale or config.channels_per_head**-0.5)
        self.attention = Attention("softmax", True, config.window_size(layer), scale, config.score_cap or None)
        self.use_softmax(new_softmax(config.softmax, config))

    def hidden_dtype(self, x: Tensor) -> Any:
        """Return None: activations keep the dtype of x."""
        return None

    def _project(self, x: Tensor, segments: Segments, cache: KeyValueCache | None, dtype: Any) -> list[Tensor]:
        """Return queries (B, T, H, D + R), keys and values; with a cache, latents and rotated keys in place of these.

        Latents are (B, T, 1, L), and rotated keys (B, T, 1, R).
        """
        q = self.query_expansion(self.query_norm(self.query_latent(x))) if self.query is None else self.query(x)
        q = reshape(q, *x.shape[:2], self.n_heads, self.content_size + self.rotary_size)
        content, rotated = split_sizes(q, (self.content_size, self.rotary_size))
        q = concatenate([content, self.rotary(rotated, segments)], axis=-1)
        latents, k = split_sizes(self.latent(x), (self.latent_norm.size, self.rotary_size))
        latents, k = (reshape(part, *x.shape[:2], 1, part.shape[-1]) for part in (self.latent_norm(latents), k))
        k = self.rotary(k, segments)
        return [q, latents, k] if cache is not None else [q, *self._expand(latents, k)]

    def _expand(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (B, S, H, D + R), values (B, S, H, E) of latents (B, S, 1, L) and rotated keys (B, S, 1, R)."""
        n_items, n_tokens = latents.shape[:2]
        both = reshape(self.expansion(latents), n_items, n_tokens, self.n_heads, self.content_size + self.head_size)
        content, values = split_sizes(both, (self.content_size, self.head_size))
        shared = concatenate([rotated] * self.n_heads, axis=2)
        return concatenate([content, shared], axis=-1), values

    def _attend_to_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache, mask: Mask) -> Tensor:
        """Append latents `k`, rotated keys `v` to the cache; return (B, T, H, E), float32 attention to cached tokens.

        Few queries absorb the expansion, if it is a matrix of floats; others, and adapted or quantized layers, expand.
        """
        weights, results = self.expansion.weights.array, []
        is_plain = type(self.expansion) is Dense and isinstance(weights, array_module(q.array).ndarray)
        for rows, text in cache.texts(q.array.shape[1]):
            queries = Tensor(q.array[:, rows], False)
            appended = text.append(k.array[:, rows], v.array[:, rows])
            latents, rotated = (Tensor(_as_floats(x), False) for x in appended)
            visible = mask
            if mask is not None and mask.shape[-1] == text.length:  # also for tokens that have been dropped
                visible = mask[..., text.length - latents.shape[1] :]
            # Per cached token and head, absorbing takes 2 T L multiplications, and expanding L (D + E).
            is_short = 2 * queries.shape[1] <= self.content_size + self.head_size
            attend = self._attend_absorbed if is_plain and is_short else self._attend_expanded
            results.append(attend(queries, latents, rotated, visible))
        return concatenate_texts(results)

    def _attend_expanded(self, q: Tensor, latents: Tensor, rotated: Tensor, mask: Mask) -> Tensor:
        """Return attention (B, T, H, E), in float32, to the keys and values that latents and rotated keys expand to."""
        return self.attention(q, *self._expand(latents, rotated), mask, self.softmax_scales, "float32")

    def _attend_absorbed(self, q: Tensor, latents: Tensor, rotated: Tensor, mask: Mask) -> Tensor:
        """Return attention (B, T, H, E) to latents as one shared head, without expanding them to keys and values."""
        weights = Tensor(upcast(self.expansion.weights.array), False)
        expansion = reshape(weights, len(weights), self.n_heads, self.content_size + self.head_size)
        to_keys, to_values = split_sizes(expansion, (self.content_size, self.head_size))
        content, of_position = split_sizes(q, (self.content_size, self.rotary_size))
        absorbed = concatenate([Einsum("bthd,lhd->bthl")(content, to_keys), of_position], axis=-1)
        keys = concatenate([latents, rotated], axis=-1)
        out = self.attention(absorbed, keys, latents, mask, self.softmax_scales, "float32")
        return Einsum("bthl,lhe->bthe")(out, to_values)


def _as_floats(cached: Any) -> Array:
    """Return an array of a cache, dequantized if it is quantized, as float32 or float64."""
    return cached.dequantize() if hasattr(cached, "dequantize") else upcast(cached)
