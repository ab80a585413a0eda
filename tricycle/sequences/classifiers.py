"""Classifiers of sequences (seq2vec): an encoder gives a vector for each token, a pooling makes one of them.

Shapes: B batch, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle.attention import length_mask
from tricycle.devices import Array
from tricycle.extra_ops import concatenate, maximum, where
from tricycle.initialisers import normal
from tricycle.layers import Dense, Dropout, Embedding, Generator, Layer, new_generator
from tricycle.ops import as_tensor
from tricycle.parameter import Parameter
from tricycle.sequences.attentions import AdditiveAttention
from tricycle.sequences.convolution import Conv1d
from tricycle.tensor import Operand, Tensor


class ConvolutionalEncoder(Layer):
    """Embeds tokens and looks for patterns of a few neighbours (Kim 2014): C = n_filters * len(widths).

    Args:
        n_filters: patterns of each width.
        widths: in tokens.
        dropout: probability of dropping an element of the embeddings.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        n_filters: int = 100,
        widths: Sequence[int] = (3, 4, 5),
        dropout: float = 0.0,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        self.embedding = Embedding(vocab_size, embedding_dim, normal(0.1), generator)
        self.filters = [Conv1d(embedding_dim, n_filters, w, padding=w // 2, generator=generator) for w in widths]
        self.dropout = Dropout(dropout, generator)

    def forward(self, tokens: Operand, lengths: Any = None) -> Tensor:
        x, n_tokens = self.dropout(self.embedding(tokens)), as_tensor(tokens).shape[1]
        if lengths is not None:  # padding is nothing, whatever stands there
            x = where(x.xp.asarray(length_mask(lengths, n_tokens)[..., None]), x, 0.0)
        return maximum(concatenate([look(x)[:, :n_tokens] for look in self.filters], axis=-1), 0.0)


# -------------------------------------------------------------------- (B, T, C) to (B, C)
class AttentionPooling(Layer):
    """The mean of the vectors by weights that say how much each matters: additive attention with one learned query.

    Args:
        size: C.
        hidden_size: of the tanh; C unless given.
    """

    def __init__(self, size: int, hidden_size: int | None = None, generator: Generator = None) -> None:
        generator = new_generator(generator)
        self.attention = AdditiveAttention(size, size, hidden_size or size, generator=generator)
        self.query = Parameter(normal(1.0)((1, 1, size), generator), "embedding")

    def forward(self, x: Tensor, mask: Array | None = None) -> tuple[Tensor, Array]:
        """(B, T, C) to (B, C), and the weights (B, T).

        Args:
            mask: (B, T), True where a token is no padding.
        """
        query = self.query + x.xp.zeros((len(x), 1, 1), x.dtype)
        context, weights = self.attention(query, x, mask=mask, return_weights=True)
        return context[:, 0], weights.array[:, 0]


class MaxPooling(Layer):
    """The largest value of each channel. Its weights are the shares of channels that come from a token."""

    def forward(self, x: Tensor, mask: Array | None = None) -> tuple[Tensor, Array]:
        """As of `AttentionPooling`."""
        x = x if mask is None else where(x.xp.asarray(mask[..., None]), x, -np.inf)
        largest = x.max(axis=1)
        is_largest = (x.array == largest.array[:, None]).astype(x.dtype)
        return largest, (is_largest / is_largest.sum(axis=1, keepdims=True)).mean(axis=-1)


class Classifier(Layer):
    """Tokens to the logits of classes.

    Args:
        encoder: of tokens (B, T) and lengths, such as `ConvolutionalEncoder`, or `RecurrentEncoder` and
            `TransformerEncoder` of seq2seq.py.
        pooling: of (B, T, C) and a mask, such as `AttentionPooling` or `MaxPooling`.
        size: C.
        n_classes: how many there are.
        dropout: probability of dropping an element of the pooled vector.
    """

    def __init__(
        self,
        encoder: Layer,
        pooling: Layer,
        size: int,
        n_classes: int,
        dropout: float = 0.0,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        self.encoder, self.pooling, self.dropout = encoder, pooling, Dropout(dropout, generator)
        self.output = Dense(size, n_classes, generator=generator, role="head")

    def forward(self, tokens: Operand, lengths: Any = None, return_weights: bool = False) -> Any:
        """
        Args:
            tokens: whole numbers (B, T).
            lengths: (B,), how many of them are no padding; all unless given.

        Returns:
            (B, n_classes); with `return_weights` also what the pooling made of each token, an array (B, T).
        """
        tokens = as_tensor(tokens)
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"Classifier: expected tokens (batch, tokens) with a token or more, got {tokens.shape}")
        mask = None if lengths is None else length_mask(lengths, tokens.shape[1])
        pooled, weights = self.pooling(self.encoder(tokens, lengths), mask)
        logits = self.output(self.dropout(pooled))
        return (logits, weights) if return_weights else logits
