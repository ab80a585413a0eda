"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2025) as in Qwen3-Next: the config and the layers of its blocks.

Most layers have linear attention by the gated delta rule, the others gated attention. For generation, the
`KeyValueCache` of a layer with linear attention holds no keys and values: its `last` holds the state and the latest
inputs of the convolution, whose size does not depend on the length of the text.

Shapes: B batch, T tokens, C channels, H heads, P channels per head, G key heads, N channels per key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tricycle import extra_ops
from tricycle.activation import Swish
from tricycle.attention.attend import Mask
from tricycle.attention.cache import KeyValueCache
from tricycle.attention.rotary import POSITIONS
from tricycle.blocks import MLPBlock, MultiHeadSelfAttention, TransformerBlock
from tricycle.configs.model import ModelConfig, Norm
from tricycle.configs.presets import GPTConfig
from tricycle.configs.validated import OneOf
from tricycle.devices import Array, array_module
from tricycle.experts import MixtureOfExperts
from tricycle.extra_ops import split_sizes
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Generator, Layer, RMSNorm, new_generator
from tricycle.ops import as_tensor, reshape, sigmoid
from tricycle.parameter import Parameter
from tricycle.state_spaces.convolution import convolve
from tricycle.state_spaces.delta_rule import GatedDeltaRule
from tricycle.state_spaces.mamba import STEP_SIZES
from tricycle.tensor import Operand, Tensor


@dataclass(frozen=True)
class DeltaNetConfig(ModelConfig):
    """The architecture of a Gated DeltaNet, in which some layers have attention; other fields are about the latter.

    The defaults of the fields that it adds are those of Qwen3-Next with 80B parameters.
    """

    norm: Norm = "rms_norm"
    positions: OneOf[str, POSITIONS] = "rotary"
    bias: bool = False
    # ---- fields of Gated DeltaNet only
    n_linear_heads: int = 32  # heads of linear attention per layer
    n_linear_key_heads: int = 16  # query and key heads of linear attention, each for a group of its heads
    linear_head_size: int = 128  # channels per head of linear attention
    linear_key_size: int = 128  # channels per query and key head of linear attention
    conv_width: int = 4  # tokens that the convolution before linear attention sees
    chunk_size: int = 32  # tokens whose updates of the state are computed together
    attention_layers: tuple[int, ...] = ()  # layers, counted from 0, with attention
    shared_size: int = 0  # width of the expert that processes all tokens; 0 for none

    def __post_init__(self) -> None:
        """Check the fields as `ModelConfig`, and those of linear attention; ValueError for the first invalid one."""
        super().__post_init__()
        n_heads, last = self.n_linear_heads, self.n_layers - 1
        for name in ("n_linear_heads", "n_linear_key_heads", "linear_head_size", "linear_key_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name, holds, rule in (
            ("n_linear_key_heads", n_heads % self.n_linear_key_heads == 0, f"a divisor of n_linear_heads {n_heads}"),
            ("conv_width", self.conv_width >= 1, "at least 1"),
            ("chunk_size", self.chunk_size >= 1, "at least 1"),
            ("attention_layers", all(0 <= i <= last for i in self.attention_layers), f"layers from 0 to {last}"),
            ("shared_size", self.shared_size >= 0, "0 or more"),
            ("shared_size", self.n_experts > 0 or not self.shared_size, "0 without n_experts"),
            ("key_shift", not self.key_shift, "False"),
        ):
            self._require(name, holds, rule)

    @property
    def inner_size(self) -> int:
        """The number of channels of all heads of linear attention."""
        return self.n_linear_heads * self.linear_head_size

    @property
    def keys_size(self) -> int:
        """The number of channels of all key heads of linear attention."""
        return self.n_linear_key_heads * self.linear_key_size

    @property
    def min_layer_weights(self) -> int:
        """A lower bound of the mean number of weights of a layer."""
        linear = 2 * self.keys_size + 3 * self.inner_size + 2 * self.n_linear_heads
        attention = (3 * self.n_heads + 2 * self.key_heads) * self.channels_per_head
        n_attention = len({*self.attention_layers})
        mixers = (n_attention * attention + (self.n_layers - n_attention) * linear) // self.n_layers
        mlps = max(1, self.n_experts) * self.mlp_width * (3 if self.is_gated else 2)
        kernels = (self.n_layers - n_attention) * self.conv_width * (2 * self.keys_size + self.inner_size)
        return self.embedding_dim * (mixers + mlps + 2 * self.shared_size) + kernels // self.n_layers

    def new_block(self, layer: int, **options: Any) -> TransformerBlock:
        """Make a layer's block: `GatedAttention` or `GatedDeltaNet`, and an MLP or mixture, with any shared expert."""
        if layer in self.attention_layers:
            fields = {name: getattr(self, name) for name in ModelConfig.__dataclass_fields__}
            attention: Layer = GatedAttention(**fields, **options, layer=layer)
        else:
            attention = GatedDeltaNet(self, **options)
        mlp = SharedExpertMixture(self, **options) if self.shared_size else None
        return TransformerBlock(self, layer, attention=attention, mlp=mlp, **options)


@dataclass(frozen=True)
class DeltaNetTrainingConfig(DeltaNetConfig, GPTConfig):
    """The architecture and the training of a Gated DeltaNet."""


class GatedAttention(MultiHeadSelfAttention):
    """Multi-head self-attention whose output is multiplied by sigmoids of a projection of the input, for each channel.

    The gates are outputs of `qkv`, between queries and keys (Qiu et al. 2025, "Gated attention").
    """

    gates_output = True


class SharedExpertMixture(MixtureOfExperts):
    """A mixture of experts and a shared MLP, whose result is multiplied by a sigmoid for each token.

    Args:
        config: of the model. initialiser, generator: see `MixtureOfExperts`.
    """

    def __init__(
        self, config: DeltaNetConfig, *, initialiser: Initialiser = xavier, generator: Generator = None
    ) -> None:
        generator = new_generator(generator)
        super().__init__(config, None, config.shared_size, initialiser=initialiser, generator=generator)
        self.shared_gate = Dense(config.embedding_dim, 1, False, initialiser, generator)

    def run_shared(self, shared: MLPBlock, x: Tensor) -> Tensor:
        """Return the result of the shared MLP, multiplied by the sigmoid of its gate for each token."""
        return shared(x) * sigmoid(self.shared_gate(x))


class GatedDeltaNet(Layer):
    """Linear attention by the gated delta rule: projections, short convolution, `GatedDeltaRule`, norm and gate.

    Args:
        config: of the model.
        initialiser, generator: of the initial weights; the step sizes are drawn log-uniformly from `STEP_SIZES`.
    """

    def __init__(
        self, config: DeltaNetConfig, *, initialiser: Initialiser = xavier, generator: Generator = None
    ) -> None:
        generator = new_generator(generator)
        self.config, width, n_heads = config, config.embedding_dim, config.n_linear_heads
        n_mixed = 2 * config.keys_size + config.inner_size
        self.input = Dense(width, n_mixed + config.inner_size, False, initialiser, generator)
        self.rates = Dense(width, 2 * n_heads, False, initialiser, generator)
        bound = config.conv_width**-0.5
        weights = generator.uniform(-bound, bound, (n_mixed, 1, config.conv_width))
        self.conv_weights = Parameter(weights.astype(np.float32), "scale")
        low, high = np.log(STEP_SIZES)
        steps = np.exp(generator.uniform(low, high, n_heads))
        self.step_bias = Parameter(np.log(np.expm1(steps)).astype(np.float32), "bias")  # softplus gives the step size
        self.log_rates = Parameter(np.log(np.arange(1, n_heads + 1, dtype=np.float32)), "scale")
        self.scan, self.n_heads = GatedDeltaRule(config.chunk_size), n_heads
        self.key_norm = RMSNorm(config.linear_key_size, 1e-6 / config.linear_key_size, gain=False)
        self.output = GatedOutput(config, initialiser, generator)

    def forward(self, x: Operand, cache: KeyValueCache | None = None, mask: Mask = None) -> Tensor:
        """Map x (B, T, C) or (T, C) to its shape; continue from, and update, the cache's state; a mask: ValueError.

        Raises:
            ValueError: a mask, because a state cannot skip tokens.
        """
        if mask is not None:
            raise ValueError("GatedDeltaNet: expected no mask, because a state cannot skip tokens, got one")
        x = as_tensor(x)
        rows = x if x.ndim == 3 else reshape(x, 1, *x.shape)
        config, n_keys, inner = self.config, self.config.keys_size, self.config.inner_size
        mixed, gate = split_sizes(self.input(rows), (2 * n_keys + inner, inner))
        mixed = Swish()(convolve(mixed, self.conv_weights, None, cache))
        q, k, v = split_sizes(mixed, (n_keys, n_keys, inner))
        v, gate = (reshape(y, *y.shape[:2], config.n_linear_heads, config.linear_head_size) for y in (v, gate))
        q, k = (reshape(y, *y.shape[:2], config.n_linear_key_heads, config.linear_key_size) for y in (q, k))
        # Keys have length 1; queries 1 / sqrt(N), in place of a factor of the scores.
        q, k = self.key_norm(q) * (1 / config.linear_key_size), self.key_norm(k) * config.linear_key_size**-0.5
        y = self.output(self._apply_rule(v, k, q, self.rates(rows), cache), gate)
        if cache is not None:
            cache.length += rows.shape[1]
        return y if x.ndim == 3 else reshape(y, x.shape)

    def token_weights(self, v: Array, decays: Array, k: Array, q: Array, strengths: Array) -> Array:
        """Return the matrix (B, H, T, T) by which the rule, of these arguments, adds the values of tokens to results.

        The result is linear in the values, so that of the values of an identity matrix is the matrix.
        """
        xp, (n_items, n_tokens, n_heads) = array_module(v), v.shape[:3]
        one_hot = xp.broadcast_to(xp.eye(n_tokens, dtype=v.dtype)[:, None], (n_items, n_tokens, n_heads, n_tokens))
        weights: Array = self.scan.scan(one_hot, decays, k, q, strengths)[0].swapaxes(1, 2)
        return weights

    def _apply_rule(self, v: Tensor, k: Tensor, q: Tensor, rates: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return the rule's result (B, T, H, P); `rates` (B, T, 2 H) give strengths, decays; update the cache."""
        strengths, steps = split_sizes(rates, (v.shape[2], v.shape[2]))
        steps = extra_ops.softplus(steps + self.step_bias)
        decays, strengths = extra_ops.negative(steps * extra_ops.exp(self.log_rates)), sigmoid(strengths)
        return self.scan.continue_from(cache, v, decays, k, q, strengths)


class GatedOutput(Layer):
    """The output of a `GatedDeltaNet`: the RMS norm of each head, multiplied by the swish of a gate, and a projection.

    Args:
        config: of the model. initialiser, generator: of the initial weights.
    """

    def __init__(self, config: DeltaNetConfig, initialiser: Initialiser, generator: Generator) -> None:
        self.norm = RMSNorm(config.linear_head_size, config.norm_eps)
        self.projection = Dense(config.inner_size, config.embedding_dim, False, initialiser, generator)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Map y and a gate (B, T, H, P) to (B, T, C): the projection of norm(y) swish(gate)."""
        gated = self.norm(y) * Swish()(gate)
        return self.projection(reshape(gated, *gated.shape[:2], gated.shape[2] * gated.shape[3]))
