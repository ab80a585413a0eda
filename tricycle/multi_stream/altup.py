"""AltUp: a residual stream of several parts, of which each block computes one and predicts the others.

A wider residual stream can hold more, but every matrix of a block would have to grow with it. AltUp makes the residual
stream S times as wide, with blocks of the same width: the residual stream consists of S streams of C channels, and
attention and MLP see only the first, the active stream. Around each block there are two cheap steps:

- Predict: each stream is the input plus a weighted sum of all streams, with S^2 weights for each token. For the active
  stream, this is the block's input; for all streams, a prediction of the block's output.
- Correct: the block's output differs from the prediction of the active stream. This difference, times one weight for
  each stream and token, is added to all predictions, as in a Kalman filter.

The weights of both steps are linear functions of tanh(router(norm(x))), S numbers for each token. The steps take
about S^2 C multiplications for each token; a block S times as wide would take S^2 times as many as the block.

Source: Baykal et al. 2023, "Alternating updates for efficient transformers"; with weights for each token and the same
active stream in all blocks as in Gemma 3n.

Shapes: B batch, T tokens, S streams, C channels of a stream.
"""

from __future__ import annotations

from functools import partial

from tricycle.einsum import Einsum
from tricycle.extra_ops import concatenate, mean, where
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Generator, Layer, RMSNorm, new_generator
from tricycle.ops import reshape, tanh
from tricycle.tensor import Tensor

MIN_MEAN_SQUARE = 1e-5  # by which `match_magnitude` divides


class AltUp(Layer):
    """The steps before and after a block: predict all streams, and correct the predictions by the block's output.

    Args:
        size: C. n_streams: S. eps: of the router's norm.
        initialiser, generator: of the initial weights.
    """

    def __init__(
        self, size: int, n_streams: int, eps: float, initialiser: Initialiser = xavier, generator: Generator = None
    ) -> None:
        dense = partial(Dense, bias=False, initialiser=initialiser, generator=new_generator(generator), role="router")
        self.router_norm = RMSNorm(size, eps)
        self.router = dense(size, n_streams)
        self.prediction = dense(n_streams, n_streams**2)
        self.correction = dense(n_streams, n_streams)

    def predict(self, streams: Tensor) -> Tensor:
        """Return streams (B, T, S, C) plus a weighted sum of all streams for each."""
        n_items, n_tokens, n_streams, _ = streams.shape
        weights = self.prediction(self._route(streams[:, :, 0]))
        weights = reshape(weights, n_items, n_tokens, n_streams, n_streams)
        return streams + Einsum("btij,btjc->btic")(weights, streams)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Return predicted streams (B, T, S, C), corrected by what the block computed for the active one (B, T, C)."""
        n_items, n_tokens, n_streams, size = predicted.shape
        weights = reshape(1 + self.correction(self._route(computed)), n_items, n_tokens, n_streams, 1)
        return predicted + weights * reshape(computed - predicted[:, :, 0], n_items, n_tokens, 1, size)

    def _route(self, x: Tensor) -> Tensor:
        """Return S numbers from -1 to 1 for each token of x (B, T, C), from which weights are computed."""
        return tanh(self.router(self.router_norm(x) * (1 / x.shape[-1])))


class StreamProjections(Layer):
    """The streams of the first block, from the token embeddings, and the result of those of the last block.

    Args:
        size: C. n_streams: S.
        initialiser, generator: of the initial weights.
    """

    def __init__(
        self, size: int, n_streams: int, initialiser: Initialiser = xavier, generator: Generator = None
    ) -> None:
        dense = partial(Dense, size, size, False, initialiser, new_generator(generator))
        self.inputs = [dense() for _ in range(n_streams - 1)]
        self.outputs = [dense() for _ in range(n_streams - 1)]

    def expand(self, x: Tensor) -> Tensor:
        """Return the streams (..., S C) of embeddings x (..., C): x and projections of it, of equal magnitude."""
        return concatenate([x, *(match_magnitude(project(x), x) for project in self.inputs)], axis=-1)

    def merge(self, streams: Tensor) -> Tensor:
        """Return the mean (..., C) of the first of streams (..., S, C) and projections of the others to its size."""
        first = total = streams[..., 0, :]
        for i, project in enumerate(self.outputs, 1):
            total = total + match_magnitude(project(streams[..., i, :]), first)
        return total * (1 / (1 + len(self.outputs)))


def match_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Return x (..., C), each row multiplied to have the root mean square of the row of `like` (..., C)."""
    target, square = (mean(y * y, axis=-1, keepdims=True) for y in (like, x))
    return x * root(target) / where(square > MIN_MEAN_SQUARE, square, MIN_MEAN_SQUARE) ** 0.5


def root(x: Tensor) -> Tensor:
    """Return the square root of x elementwise, with a gradient of 0 where x is 0, at which it would be infinite."""
    positive = x.array > 0
    return where(positive, x, 1.0) ** 0.5 * positive
