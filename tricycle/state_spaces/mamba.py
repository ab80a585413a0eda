"""Mamba-2 (Dao and Gu 2024): the block of projections, short convolution, scan, gate and norm.

In hybrids, some layers have attention in place of a Mamba mixer, and all layers may have an MLP.

For generation, a layer's `KeyValueCache` holds no keys and values: its `last` holds the state and the latest inputs of
the convolution, whose size does not depend on the length of the text.

Shapes: B batch, T tokens, C channels, H heads, P channels per head, G groups, N state size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle import extra_ops
from tricycle.activation import Swish
from tricycle.attention.attend import Mask
from tricycle.attention.cache import KeyValueCache
from tricycle.blocks import MLPBlock, TransformerBlock, new_norm
from tricycle.configs.mamba import BLOCKS, MambaConfig
from tricycle.configs.model import ModelConfig
from tricycle.devices import Array, array_module
from tricycle.experts import MixtureOfExperts
from tricycle.extra_ops import split_sizes
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Generator, Layer, RMSNorm, new_generator
from tricycle.ops import as_tensor, reshape
from tricycle.parameter import Parameter
from tricycle.state_spaces.convolution import convolve
from tricycle.state_spaces.scan import StateSpaceScan
from tricycle.tensor import Operand, Tensor

STEP_SIZES = 0.001, 0.1  # the range of the initial step sizes of the heads


class MambaMixer(Layer):
    """The sequence layer of Mamba-2, in the place of attention.

    Args:
        config: of the model.
        initialiser, generator: of the initial weights; the step sizes are drawn log-uniformly from `STEP_SIZES`.
    """

    def __init__(self, config: MambaConfig, *, initialiser: Initialiser = xavier, generator: Generator = None) -> None:
        generator = new_generator(generator)
        inner, n_heads = config.inner_size, config.mamba_heads
        self.config, self.n_heads = config, n_heads
        n_inputs = inner + config.conv_size + n_heads
        self.input = Dense(config.embedding_dim, n_inputs, config.bias, initialiser, generator)
        bound = config.conv_width**-0.5
        shape = config.conv_size, 1, config.conv_width
        self.conv_weights = Parameter(generator.uniform(-bound, bound, shape).astype(np.float32), "scale")
        self.conv_bias = Parameter(np.zeros(config.conv_size, np.float32), "bias") if config.conv_bias else None
        low, high = np.log(STEP_SIZES)
        steps = np.exp(generator.uniform(low, high, n_heads))
        self.step_bias = Parameter(np.log(np.expm1(steps)).astype(np.float32), "bias")  # softplus gives the step size
        self.log_rates = Parameter(np.log(np.arange(1, n_heads + 1, dtype=np.float32)), "scale")
        self.skip = Parameter(np.ones(n_heads, np.float32), "gain")
        self.scan = StateSpaceScan(config.chunk_size)
        self.norm = RMSNorm(inner // config.n_groups, config.norm_eps, gain=False)
        self.norm_gain = Parameter(np.ones(inner, np.float32), "gain")
        self.projection = Dense(inner, config.embedding_dim, config.bias, initialiser, generator)

    def forward(self, x: Operand, cache: KeyValueCache | None = None, mask: Mask = None) -> Tensor:
        """Map x (B, T, C) or (T, C) to its shape; continue from, and update, the cache's state; a mask: ValueError.

        Raises:
            ValueError: a mask, because a state cannot skip tokens.
        """
        if mask is not None:
            raise ValueError("MambaMixer: expected no mask, because a state cannot skip tokens, got one")
        x = as_tensor(x)
        rows = x if x.ndim == 3 else reshape(x, 1, *x.shape)
        config, (n_items, n_tokens) = self.config, rows.shape[:2]
        inner, n_keys, n_heads = config.inner_size, config.n_groups * config.state_size, config.mamba_heads
        gate, mixed, steps = split_sizes(self.input(rows), (inner, config.conv_size, n_heads))
        mixed = Swish()(convolve(mixed, self.conv_weights, self.conv_bias, cache))
        v, k, q = split_sizes(mixed, (inner, n_keys, n_keys))
        steps = extra_ops.softplus(steps + self.step_bias)  # (B, T, H)
        v = reshape(v, n_items, n_tokens, n_heads, config.channels_per_mamba_head)
        scanned = reshape(steps, *steps.shape, 1) * v
        k, q = (reshape(part, n_items, n_tokens, config.n_groups, config.state_size) for part in (k, q))
        decays = extra_ops.negative(steps * extra_ops.exp(self.log_rates))
        y = self.scan.continue_from(cache, scanned, decays, k, q)
        y = reshape(y + v * reshape(self.skip, n_heads, 1), n_items, n_tokens, inner) * Swish()(gate)
        groups = self.norm(reshape(y, n_items, n_tokens, config.n_groups, inner // config.n_groups))
        out = self.projection(reshape(groups, n_items, n_tokens, inner) * self.norm_gain)
        if cache is not None:
            cache.length += n_tokens
        return out if x.ndim == 3 else reshape(out, x.shape)

    def token_weights(self, v: Array, decays: Array, k: Array, q: Array) -> Array:
        """Return the matrix (B, H, T, T) by which the scan, of these arguments, adds convolved tokens to results.

        The arguments have the step sizes as factors of the values, so the matrix of the scan is multiplied by them.
        The direct path from each token to its own result, by `skip`, is not part of it.
        """
        steps = decays / -array_module(decays).exp(self.log_rates.array)  # (B, T, H)
        return self.scan.weights(v, decays, k, q) * steps.swapaxes(1, 2)[:, :, None]


class MambaBlock(Layer):
    """A block of a Mamba-2 model: x + residual_scale * mixer(norm(x)), and in hybrids an MLP in the same manner.

    Args:
        config: of the model. mlp: None for none. initialiser, generator: see `MambaMixer`.
    """

    mlp_norm: Layer | None = None

    def __init__(
        self,
        config: MambaConfig,
        mlp: Layer | None = None,
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        self.norm, self.scale = new_norm(config), config.residual_scale
        self.mixer = MambaMixer(config, initialiser=initialiser, generator=generator)
        self.mlp: Any = mlp
        if mlp is not None:
            self.mlp_norm = new_norm(config)

    def forward(self, x: Operand, cache: KeyValueCache | None = None, mask: Mask = None) -> Tensor:
        """Apply the block to x (B, T, C); continue from the state in the cache, and update it; a mask: ValueError."""
        x = as_tensor(x)
        x = self._add(x, self.mixer(self.norm(x), cache, mask))
        return x if self.mlp_norm is None else self._add(x, self.mlp(self.mlp_norm(x)))

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return x + residual_scale * branch."""
        return x + (branch if self.scale == 1 else branch * self.scale)


def new_block(config: MambaConfig, layer: int, **options: Any) -> Layer:
    """Make a layer's `TransformerBlock` if it has attention, else `MambaBlock`, with any MLP or mixture configured."""
    has_attention = layer in config.attention_layers
    if not has_attention and not config.mamba_mlp:
        return MambaBlock(config, **options)
    mlp: Any
    if config.n_experts:
        mlp = MixtureOfExperts(config, shared_size=config.shared_size, **options)
    else:
        mlp = MLPBlock(**{name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}, **options)
    return TransformerBlock(config, layer, mlp=mlp, **options) if has_attention else MambaBlock(config, mlp, **options)


BLOCKS["mamba"] = new_block
