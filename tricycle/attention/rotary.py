"""Rotary positions: queries and keys are turned by angles that grow with position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tricycle import kernels
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

    def forward(self, x: Operand, offset: int = 0) -> Tensor:
        """(B, T, H, D) queries or keys to the same shape.

        Args:
            offset: position of the first token.

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
        cos, sin = angles(self.base, self.scaling, n_turned, offset, x.shape[1])
        # angles stay exact where what turns has 16 bits
        dtype = np.float64 if array.dtype == np.float64 else np.float32
        cos = x.xp.asarray(cos, dtype=dtype)
        sin = x.xp.asarray(sin, dtype=dtype)

        def turn(heads: Array, sin: Array) -> Array:
            if n_turned == heads.shape[3]:
                return kernels.rotate(heads, cos, sin)
            turned = heads.copy()
            turned[..., :n_turned] = kernels.rotate(heads[..., :n_turned], cos, sin)
            return turned

        # a rotation is undone by the opposite angle: its gradient too
        return record(turn(array, sin), (x,), lambda grad, wanted: (turn(grad, -sin),), "rotary")


def angles(
    base: float, scaling: RotaryScaling | None, n_turned: int, offset: int, n_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines (T, n_turned / 2), read-only."""
    if scaling is None or (type(scaling) is RotaryScaling and RotaryScaling.slowed is _SLOWED):
        return _kept_angles(base, scaling, n_turned, offset, n_tokens)
    return _kept_angles.__wrapped__(base, scaling, n_turned, offset, n_tokens)  # of a user, whose rule may change


_SLOWED = RotaryScaling.slowed


# Cache: a pure function of numbers and of the library's own scaling, for all layers of a pass ask for the same.
@lru_cache(maxsize=16)
def _kept_angles(
    base: float, scaling: RotaryScaling | None, n_turned: int, offset: int, n_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    speeds = base ** (-np.arange(0, n_turned, 2) / max(1, n_turned))
    if scaling is not None:
        speeds = scaling.slowed(speeds)
    angles = np.arange(offset, offset + n_tokens)[:, None] * speeds
    cos, sin = np.cos(angles), np.sin(angles)
    cos.flags.writeable = sin.flags.writeable = False
    return cos, sin
