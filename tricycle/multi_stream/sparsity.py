"""Activation sparsity by a Gaussian threshold: all but the largest values of a gate are set to 0.

The exact largest values of a token's F hidden channels would require a sort. If they had a normal distribution, then a
fraction p of them would be below mean + z std, where z is the normal quantile of p. This threshold takes two sums over
the channels, and its gradient is simple. With p = 0.95, about one hidden channel in twenty is used for a token.

Source: Google 2025, "Gemma 3n" (code); You et al. 2025, "Spark transformer", which names it statistical top-k.
"""

from __future__ import annotations

from statistics import NormalDist

from tricycle.activation import Activation, ReLU
from tricycle.extra_ops import mean, split
from tricycle.layers import Layer
from tricycle.multi_stream.altup import root
from tricycle.tensor import Tensor


class GaussianTopK(Layer):
    """A gated activation a f(relu(b - threshold)) for x = [a, b], with a threshold for each token.

    Args:
        sparsity: p, the fraction of the values below the threshold, above 0 and below 1.
        activation: f, which must not be gated.
    """

    def __init__(self, sparsity: float, activation: Activation) -> None:
        self.n_deviations = NormalDist().inv_cdf(sparsity)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return a f(relu(b - threshold)), (..., F), for x = [a, b] of shape (..., 2 F)."""
        values, gate = split(x, 2)
        center = mean(gate, axis=-1, keepdims=True)
        deviation = root(mean((gate - center) ** 2, axis=-1, keepdims=True))
        return values * self.activation(ReLU()(gate - (center + deviation * self.n_deviations)))
