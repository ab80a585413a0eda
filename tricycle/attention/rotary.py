"""Rotary position embeddings (RoPE), and the table of position encodings by config name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.attention.cache import Segments
from tricycle.devices import Array, array_module
from tricycle.initialisers import zeros
from tricycle.layers import Embedding
from tricycle.ops import Op, as_floating, as_tensor
from tricycle.tensor import Operand, Tensor, record


class Rotary(Op):
    """Rotary position embeddings (RoPE, Su et al. 2021): rotate channels i and i + D/2 by an angle per position.

    Args:
        base: the lowest frequency is about 1 / base, in radians per token.
        fraction: the fraction of the channels of each head that is rotated: the first ones.
        scaling: an object such as a `RotaryScaling`, for texts longer than those of training.
    """

    def __init__(self, base: float = 10_000.0, fraction: float = 1.0, scaling: Any = None) -> None:
        self.base, self.fraction, self.scaling = base, fraction, scaling

    def forward(self, x: Operand, offset: int | Segments = 0) -> Tensor:
        """Apply RoPE from `offset`, or segments, to pairs i, i + R/2 of x (B, T, H, D); R = int(fraction * D)."""
        x = as_tensor(x)
        array = as_floating(x.array)
        if array.ndim != 4:
            raise ValueError(f"Rotary: expected shape (batch, tokens, heads, head size), got {array.shape}")
        segments = ((offset, array.shape[1]),) if isinstance(offset, int) else offset
        dtype = "float64" if array.dtype == np.float64 else "float32"  # also for 16-bit inputs
        cos, sin = self.angles(array.shape[3], segments, array, dtype)
        backward = lambda grad, needs_grad: (apply_partial_rope(grad, cos, -sin),)  # the transposed matrix
        return record(apply_partial_rope(array, cos, sin), (x,), backward, "rotary")

    def angles(self, head_size: int, segments: Segments, like: Array, dtype: str = "float32") -> tuple[Array, ...]:
        """Return cosines and sines (T, R / 2) of all tokens' angles on the device of `like`; do not change them."""
        n_channels = int(head_size * self.fraction)
        if n_channels % 2:
            raise ValueError(f"Rotary: expected an even number of rotated channels, got {n_channels}")
        scaled = self.scaling and self.scaling.scale_frequencies(_frequencies(self.base, n_channels)).tobytes()
        key = dtype, getattr(self.scaling, "attention_factor", 1), array_module(like), str(like.device)
        return _angles(self.base, n_channels, scaled, segments, *key)


def apply_partial_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Apply RoPE to pairs i, i + A of the first 2 A channels of x (B, T, H, D), by cos, sin (T, A); copy the rest."""
    n_channels = 2 * cos.shape[1]
    if n_channels == x.shape[3]:
        return kernels.apply_rope(x, cos, sin)
    rotated = x.copy()
    rotated[..., :n_channels] = kernels.apply_rope(x[..., :n_channels], cos, sin)
    return rotated


def _frequencies(base: float, n_channels: int) -> np.ndarray:
    """Return the frequency of each channel pair in radians per token, (n_channels / 2,)."""
    frequencies: np.ndarray = base ** (-np.arange(0, n_channels, 2) / max(1, n_channels))
    return frequencies


# Cache: a pure function of numbers, on the current device, that all layers share. Callers must not change the result.
@lru_cache(maxsize=16)
def _angles(
    base: float, n_channels: int, scaled: bytes | None, segments: Segments, dtype: str, factor: float, xp: Any, _: str
) -> tuple[Array, ...]:
    """Return cosines and sines (T, n_channels / 2) times `factor`; `scaled`: scaled frequencies as bytes, if any."""
    frequencies = _frequencies(base, n_channels) if scaled is None else np.frombuffer(scaled)
    positions = np.concatenate([np.arange(first, first + n_tokens) for first, n_tokens in segments])
    angles = positions[:, None] * frequencies
    return tuple(xp.asarray((factor * f(angles)).astype(dtype)) for f in (np.cos, np.sin))  # writable, for kernels


# Constructors of RoPE scalings from a config, by name; `tricycle.attention.scaling` adds more.
SCALINGS: dict[str, Callable[[Any], Any]] = {"none": lambda config: None}


class PositionEncoding(NamedTuple):
    """Constructors, from a config, of position embeddings that are added to token embeddings, and of RoPE."""

    new_embedding: Callable[[Any], Any] = lambda config: None
    new_rotation: Callable[[Any, int], Any] = lambda config, layer: None


def new_position_embedding(config: Any) -> Embedding:
    """Make the embedding of learned positions, (context_window + position_offset, embedding_dim), initially 0."""
    return Embedding(config.context_window + config.position_offset, config.embedding_dim, zeros, role="position")


def new_rotary(config: Any, layer: int) -> Rotary:
    """Make an attention layer's RoPE from a config; windowed layers take the local base, if set, without scaling."""
    is_local = bool(config.rotary_local_base and config.window_size(layer))
    base = config.rotary_local_base if is_local else config.rotary_base
    scaling = None if is_local else SCALINGS[config.rotary_scaling](config)
    return getattr(scaling, "new_rotary", Rotary)(base, config.rotary_fraction, scaling)


POSITIONS = {"learned": PositionEncoding(new_position_embedding), "rotary": PositionEncoding(new_rotation=new_rotary)}
POSITIONS["none"] = PositionEncoding()
