"""LAuReL: a residual connection with a learned part of low rank.

A residual connection adds x itself to a sublayer's output, f(x) + x. LAuReL generalizes this to f(x) + g(x), with a
g that is learned and cheap: here x + norm(x A B), for matrices A (C, R) and B (R, C) of a low rank R. It adds 2 C R
parameters to a block: with R = 64 and C = 2048 channels, less than one percent.

Source: Menghani, Kumar and Kumar 2024, "LAuReL: learned augmented residual layer", the low-rank variant.

Shapes: C channels, R rank.
"""

from __future__ import annotations

from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Generator, Layer, RMSNorm, new_generator
from tricycle.tensor import Tensor


class LowRankResidual(Layer):
    """The learned part of a residual connection, x + norm(x A B).

    Args:
        size: C. rank: R. eps: of the norm.
        initialiser, generator: of the initial weights.
    """

    def __init__(
        self, size: int, rank: int, eps: float, initialiser: Initialiser = xavier, generator: Generator = None
    ) -> None:
        generator = new_generator(generator)
        self.down = Dense(size, rank, False, initialiser, generator)
        self.projection = Dense(rank, size, False, initialiser, generator)
        self.norm = RMSNorm(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return x + norm(x A B) for x (..., C)."""
        return x + self.norm(self.projection(self.down(x)))
