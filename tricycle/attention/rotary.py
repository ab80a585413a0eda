"""Positional encodings: rotary embeddings (RoPE), and the table of the encodings that a config can name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.attention.cache import Segments
from tricycle.devices import Array
from tricycle.initialisers import zeros
from tricycle.layers import Embedding
from tricycle.ops import Op, as_floating, as_tensor
from tricycle.tensor import Operand, Tensor, record


class Rotary(Op):
    """Rotate the pairs of channels (i, i + D/2) of each head by angles that grow with position (Su et al. 2021).

    The product of a query and a key then depends on the distance between them.

    Args:
        base: the slowest pair rotates by about 1 / base a token.
        fraction: of the channels of a head that are rotated: the first of them, paired among themselves.
        scaling: has a method `scale_frequencies` from speeds to speeds, for longer texts than those of training.
    """

    def __init__(self, base: float = 10_000.0, fraction: float = 1.0, scaling: Any = None) -> None:
        self.base = base
        self.fraction = fraction
        self.scaling = scaling

    def forward(self, x: Operand, offset: int | Segments = 0) -> Tensor:
        """(B, T, H, D) to the same shape; `offset` is the position of the first token, or where tokens are in texts."""
        x = as_tensor(x)
        array = as_floating(x.array)
        if array.ndim != 4:
            raise ValueError(f"Rotary: expected shape (batch, tokens, heads, head size), got {array.shape}")
        n_channels = int(array.shape[3] * self.fraction)
        if n_channels % 2:
            raise ValueError(f"Rotary: expected an even head size to turn, got {n_channels}")
        segments = ((offset, array.shape[1]),) if isinstance(offset, int) else offset
        speeds = (
            None if self.scaling is None else self.scaling.scale_frequencies(_speeds(self.base, n_channels)).tobytes()
        )
        dtype = "float64" if array.dtype == np.float64 else "float32"  # exact where what is rotated has 16 bits
        cos, sin = _angles(self.base, n_channels, speeds, segments, dtype)
        if x.on_gpu:
            cos, sin = x.xp.asarray(cos), x.xp.asarray(sin)
        # a rotation is undone by the opposite angle: its gradient too
        return record(
            apply_partial_rope(array, cos, sin),
            (x,),
            lambda grad, needs_grad: (apply_partial_rope(grad, cos, -sin),),
            "rotary",
        )


def apply_partial_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate as many channels of (B, T, H, D) as there are angles (T, channels / 2), and copy the others."""
    n_channels = 2 * cos.shape[1]
    if n_channels == x.shape[3]:
        return kernels.apply_rope(x, cos, sin)
    rotated = x.copy()
    rotated[..., :n_channels] = kernels.apply_rope(x[..., :n_channels], cos, sin)
    return rotated


def _speeds(base: float, n_channels: int) -> np.ndarray:
    """Return the radians a token by which each pair rotates, (n_channels / 2,)."""
    speeds: np.ndarray = base ** (-np.arange(0, n_channels, 2) / max(1, n_channels))
    return speeds


# Cache: a pure function of numbers, which are the same for all layers of a pass. Callers must not change the result.
@lru_cache(maxsize=16)
def _angles(
    base: float, n_channels: int, scaled: bytes | None, segments: Segments, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines (T, n_channels / 2), by these speeds where they are scaled."""
    speeds = _speeds(base, n_channels) if scaled is None else np.frombuffer(scaled)
    positions = np.concatenate([np.arange(first, first + n_tokens) for first, n_tokens in segments])
    angles = positions[:, None] * speeds
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)  # writable, as compiled kernels want arrays


# What scales the speeds for longer texts, made from a config. `tricycle.attention.scaling` adds others.
SCALINGS: dict[str, Callable[[Any], Any]] = {"none": lambda config: None}


class PositionEncoding(NamedTuple):
    """From a config: a layer of positions, whose result is added to embeddings; an op on queries and keys."""

    new_embedding: Callable[[Any], Any] = lambda config: None
    new_rotation: Callable[[Any, int], Any] = lambda config, layer: None


def new_table(config: Any) -> Embedding:
    """Return the layer of learned positions of a model."""
    return Embedding(config.context_window + config.position_offset, config.embedding_dim, zeros, role="position")


def new_rotary(config: Any, layer: int) -> Rotary:
    """Return the rotation of queries and keys in a layer of a model."""
    is_local = bool(config.rotary_local_base and config.window_size(layer))
    base = config.rotary_local_base if is_local else config.rotary_base
    return Rotary(base, config.rotary_fraction, None if is_local else SCALINGS[config.rotary_scaling](config))


POSITIONS = {
    "learned": PositionEncoding(new_table),
    "rotary": PositionEncoding(new_rotation=new_rotary),
    "none": PositionEncoding(),
}
