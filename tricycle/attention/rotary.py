"""Rotary positions: queries and keys are turned by angles that grow with position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tricycle import kernels
from tricycle.attention.cache import Segments
from tricycle.devices import Array
from tricycle.ops import Op, as_tensor, floating
from tricycle.tensor import Operand, Tensor, record


@dataclass(frozen=True)
class RotaryScaling:
    """How angles are made smaller, so that a model reads longer texts than it was trained on.

    Attributes:
        kind: "linear" divides all speeds by the factor (Chen et al. 2023); "llama3" those of slow pairs alone, with a
            smooth way over (Llama 3.1's).
        factor: how many times longer the texts are.
        low_frequency: pairs that turn fewer times than this in the original window are slowed down fully.
        high_frequency: pairs that turn more often than this are left alone.
        original_window: of the training before.
    """

    kind: str
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_window: int = 8192

    def slowed(self, speeds: np.ndarray) -> np.ndarray:
        """The speeds after scaling, radians a token."""
        if self.kind == "linear":
            return speeds / self.factor
        turns = self.original_window * speeds / (2 * math.pi)
        share = (turns - self.low_frequency) / (self.high_frequency - self.low_frequency)
        share = share.clip(0, 1)  # of the speed that is left alone
        return speeds * ((1 - share) / self.factor + share)


class Rotary(Op):
    """Turn the pairs of channels of each head by angles that grow with position.

    The product of a query and a key then depends on how far they are apart.

    Source: Su et al. 2021, "RoFormer", with channels paired as i and i + D/2.

    Args:
        base: the slowest pair turns by about 1 / base a token.
        fraction: of the channels of a head that turn: the first of them, paired among themselves.
        scaling: for longer texts than those of training.
    """

    def __init__(self, base: float = 10_000.0, fraction: float = 1.0, scaling: RotaryScaling | None = None) -> None:
        self.base = base
        self.fraction = fraction
        self.scaling = scaling

    def forward(self, x: Operand, offset: int | Segments = 0) -> Tensor:
        """(B, T, H, D) queries or keys to the same shape.

        Args:
            offset: position of the first token; or where the tokens are in their texts, one after another.

        Raises:
            ValueError: another number of axes, or an odd number of channels to turn.
        """
        x = as_tensor(x)
        if x.ndim != 4:
            raise ValueError(f"Rotary: expected shape (batch, tokens, heads, head size), got {x.shape}")
        array = floating(x.array)
        n_turned = int(x.shape[3] * self.fraction)
        if n_turned % 2:
            raise ValueError(f"Rotary: expected an even head size to turn, got {n_turned}")
        segments = ((offset, x.shape[1]),) if isinstance(offset, int) else offset
        # angles stay exact where what turns has 16 bits
        dtype = "float64" if array.dtype == np.float64 else "float32"
        cos, sin = angles(self.base, self.scaling, n_turned, segments, dtype)
        if x.on_gpu:
            cos, sin = x.xp.asarray(cos), x.xp.asarray(sin)

        def turn(heads: Array, sin: Array) -> Array:
            if n_turned == heads.shape[3]:
                return kernels.rotate(heads, cos, sin)
            turned = heads.copy()
            turned[..., :n_turned] = kernels.rotate(heads[..., :n_turned], cos, sin)
            return turned

        # a rotation is undone by the opposite angle: its gradient too
        return record(turn(array, sin), (x,), lambda grad, needs_grad: (turn(grad, -sin),), "rotary")


def angles(
    base: float, scaling: RotaryScaling | None, n_turned: int, segments: Segments, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines (T, n_turned / 2), which are kept for later calls: the caller must not change them."""
    speeds = _speeds(base, n_turned)
    if scaling is not None:  # its rule may be a user's, which may change
        speeds = scaling.slowed(speeds)
    return _angles(speeds.tobytes(), segments, dtype)


# Cache: a pure function of numbers.
@lru_cache(maxsize=16)
def _speeds(base: float, n_turned: int) -> np.ndarray:
    """Return the radians a token by which each pair turns, (n_turned / 2,), read-only."""
    speeds: np.ndarray = base ** (-np.arange(0, n_turned, 2) / max(1, n_turned))
    speeds.flags.writeable = False
    return speeds


# Cache: a pure function of numbers, which are the same for all layers of a pass.
@lru_cache(maxsize=16)
def _angles(speeds: bytes, segments: Segments, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    positions = np.concatenate([np.arange(first, first + n_tokens) for first, n_tokens in segments])
    angles = positions[:, None] * np.frombuffer(speeds)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)  # writable, as compiled kernels want arrays
