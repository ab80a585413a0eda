"""Per-layer inputs: each block also receives a short vector for each token, from a separate embedding table.

A model's memory for facts about tokens is its embedding table, but only the first block sees its rows. Here a second
table has P numbers for each token and each of L layers, all looked up before the first block. The table is large (in
Gemma 3n a third of all parameters), but a token needs one row of it and no product, so that it may remain on a slower
device. A block multiplies its vector with a gate, so that the context determines which of the P numbers it uses.

The vectors also have a part that is projected from the token embedding, without a table.

Source: Google 2025, "Gemma 3n" (model card and code), which calls them per-layer embeddings.

Shapes: C channels, L layers, P channels of a per-layer input, V rows of the table.
"""

from __future__ import annotations

import numpy as np

from tricycle.activation import new_activation
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Embedding, Generator, Layer, RMSNorm, new_generator
from tricycle.ops import reshape
from tricycle.parameter import Parameter
from tricycle.tensor import Tensor


class PerLayerInputs(Layer):
    """The inputs of all layers for each token: the sum of a row of a table and a projection of the token embedding.

    Args:
        n_rows: V; the row of any token from V on is row 0. width: C. n_layers: L. size: P. eps: of the norm.
        initialiser, generator: of the initial weights.
    """

    def __init__(
        self,
        n_rows: int,
        width: int,
        n_layers: int,
        size: int,
        eps: float,
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        self.embedding = Embedding(n_rows, n_layers * size, initialiser, generator)
        self.projection = Dense(width, n_layers * size, False, initialiser, generator)
        self.norm = RMSNorm(size, eps)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return the inputs (..., L P) of all layers for tokens (...) with embeddings x (..., C)."""
        ids, n_rows, size = tokens.array, self.embedding.from_size, self.norm.size
        stored = self.embedding(Tensor(ids * (ids < n_rows), False)) * size**0.5
        projected = self.projection(x) * x.shape[-1] ** -0.5
        normal = self.norm(reshape(projected, *x.shape[:-1], projected.shape[-1] // size, size))
        return (reshape(normal, projected.shape) + stored) * 0.5**0.5


class PerLayerGate(Layer):
    """The use of a block's per-layer input: norm((f(scale x V) * input) W), with an activation f.

    Args:
        width: C. size: P. activation: the name of f. eps: of the norm.
        initialiser, generator: of the initial weights.
    """

    def __init__(
        self,
        width: int,
        size: int,
        activation: str,
        eps: float,
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        self.scale = Parameter(np.ones(width, np.float32), "gain")
        self.gate = Dense(width, size, False, initialiser, generator)
        self.activation = new_activation(activation)
        self.projection = Dense(size, width, False, initialiser, generator)
        self.norm = RMSNorm(width, eps)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """Return what a per-layer input (..., P) adds to the streams (..., C), given the active stream x (..., C)."""
        return self.norm(self.projection(self.activation(self.gate(x * self.scale)) * own))
