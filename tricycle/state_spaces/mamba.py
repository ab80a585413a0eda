"""Mamba-2 (Dao and Gu 2024): the config, and the block of projections, short convolution, scan, gate and norm.

In hybrids, some layers have attention in place of a Mamba mixer, and all layers may have an MLP.

For generation, a layer's `KeyValueCache` holds no keys and values: its `last` holds the state and the latest inputs of
the convolution, whose size does not depend on the length of the text.

Shapes: B batch, T tokens, C channels, H heads, P channels per head, G groups, N state size.
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
from tricycle.blocks import MLPBlock, TransformerBlock, new_norm
from tricycle.configs.model import ModelConfig, Norm
from tricycle.configs.validated import OneOf
from tricycle.devices import Array, array_module
from tricycle.experts import MixtureOfExperts
from tricycle.extra_ops import split_sizes
from tricycle.functions import add_residual
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Generator, Layer, RMSNorm, new_generator
from tricycle.ops import as_tensor, reshape
from tricycle.parameter import Parameter
from tricycle.state_spaces.scan import StateSpaceScan
from tricycle.tensor import Operand, Tensor

# Layers with attention are the usual transformer blocks, so all fields of `ModelConfig` are about them.


@dataclass(frozen=True)
class MambaConfig(ModelConfig):
    """The architecture of a Mamba-2 model: n_heads heads of head_size channels, with a state of head_size x state_size.

    The defaults are those of the model with 130M parameters (Dao and Gu 2024).
    """

    vocab_size: int = 50_288
    context_window: int = 2**20
    n_heads: int = 24
    head_size: int = 64
    n_layers: int = 24
    norm: Norm = "rms_norm"
    positions: OneOf[str, POSITIONS] = "none"
    bias: bool = False
    # ---- fields of Mamba only
    state_size: int = 128  # channels of keys and queries (B and C)
    n_groups: int = 1  # groups of heads that share keys and queries
    conv_width: int = 4  # tokens that the convolution before the scan sees
    conv_bias: bool = True  # whether the convolution has a bias
    chunk_size: int = 32  # tokens that the scan computes as attention
    attention_layers: tuple[int, ...] = ()  # layers, counted from 0, that are transformer blocks
    n_mamba_heads: int = 0  # heads of a Mamba layer; 0 for n_heads
    mamba_head_size: int = 0  # channels per head of a Mamba layer; 0 for those of attention
    mamba_mlp: bool = False  # whether Mamba layers, too, have an MLP (or experts)
    shared_hidden_size: int = 0  # hidden width of an MLP that processes all tokens beside the experts; 0 for none

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("state_size", "n_groups", "conv_width", "chunk_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("n_mamba_heads", "mamba_head_size", "shared_hidden_size"):
            self._require(name, getattr(self, name) >= 0, "0 or more")
        n_heads = self.mamba_heads
        self._require("n_groups", n_heads % self.n_groups == 0, f"a divisor of the {n_heads} heads of a Mamba layer")
        self._require("shared_hidden_size", self.n_experts > 0 or self.shared_hidden_size == 0, "0 without n_experts")
        last = self.n_layers - 1
        self._require(
            "attention_layers", all(0 <= layer <= last for layer in self.attention_layers), f"layers from 0 to {last}"
        )

    @property
    def mamba_heads(self) -> int:
        """The number of heads of a Mamba layer."""
        return self.n_mamba_heads or self.n_heads

    @property
    def channels_per_mamba_head(self) -> int:
        """The number of channels of a head of a Mamba layer."""
        return self.mamba_head_size or self.channels_per_head

    @property
    def inner_size(self) -> int:
        """The number of channels of all heads of a Mamba layer."""
        return self.mamba_heads * self.channels_per_mamba_head

    @property
    def conv_size(self) -> int:
        """The number of channels of the convolution: values, keys and queries."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def mixer_weights(self) -> int:
        """A lower bound of the number of weights of a Mamba mixer."""
        return self.embedding_dim * (2 * self.inner_size + self.conv_size + self.mamba_heads)

    def new_block(self, layer: int, **options: Any) -> Any:
        """Make the block of a layer: a `MambaBlock`, or a `TransformerBlock` for layers with attention."""
        has_attention = layer in self.attention_layers
        if not has_attention and not self.mamba_mlp:
            return MambaBlock(self, **options)
        fields = {name: getattr(self, name) for name in ModelConfig.__dataclass_fields__}
        if self.n_experts:
            mlp: Layer = MixtureOfExperts(MLPBlock, shared_hidden_size=self.shared_hidden_size, **fields, **options)
        else:
            mlp = MLPBlock(**fields, **options)
        return TransformerBlock(self, layer, mlp=mlp, **options) if has_attention else MambaBlock(self, mlp, **options)


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
        """Map x (B, T, C) or (T, C) to the same shape; continue from, and update, the state in the cache.

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
        v, k, q = split_sizes(Swish()(self._convolve(mixed, cache)), (inner, n_keys, n_keys))
        steps = extra_ops.softplus(steps + self.step_bias)  # (B, T, H)
        v = reshape(v, n_items, n_tokens, n_heads, config.channels_per_mamba_head)
        scanned = reshape(steps, *steps.shape, 1) * v
        k, q = (reshape(part, n_items, n_tokens, config.n_groups, config.state_size) for part in (k, q))
        y = self._scan(scanned, extra_ops.negative(steps * extra_ops.exp(self.log_rates)), k, q, cache)
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

    def _convolve(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return the convolution of each channel of x (B, T, E) with the latest `conv_width` tokens."""
        n_tokens, width = x.shape[1], self.config.conv_width
        before = None if cache is None else cache.last.get("conv")
        if before is None:
            before = x.xp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype)
        padded = extra_ops.concatenate([Tensor(before, False), x], axis=1)
        if cache is not None:
            cache.last["conv"] = padded.array[:, n_tokens:].copy()
        parts = [padded[:, i : i + n_tokens] * self.conv_weights[:, 0, i] for i in range(width)]
        out = parts[0]
        for part in parts[1:]:
            out = out + part
        return out if self.conv_bias is None else out + self.conv_bias

    def _scan(self, v: Tensor, decays: Tensor, k: Tensor, q: Tensor, cache: KeyValueCache | None) -> Tensor:
        if cache is None:
            return self.scan(v, decays, k, q)
        out, cache.last["state"] = self.scan.scan(v.array, decays.array, k.array, q.array, cache.last.get("state"))
        return Tensor(out, False)


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
        return add_residual(x, branch if self.scale == 1 else branch * self.scale)
