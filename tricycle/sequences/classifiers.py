"""Sequence classifiers: an encoder computes a vector for each token, and a pooling layer combines them.

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
    """An embedding followed by convolutions of several widths (Kim 2014): C = n_filters * len(widths).

    Args:
        n_filters: the number of filters of each width.
        widths: of the filters, in tokens.
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
        """Return features max(conv, 0) (B, T, C) of tokens (B, T); embeddings after the lengths (B,) are 0."""
        x, n_tokens = self.dropout(self.embedding(tokens)), as_tensor(tokens).shape[1]
        if lengths is not None:  # the embeddings of padding are set to zero
            mask = length_mask(lengths, n_tokens, len(x))
            x = where(x.xp.asarray(mask[..., None]), x, 0.0)
        return maximum(concatenate([convolve(x)[:, :n_tokens] for convolve in self.filters], axis=-1), 0.0)


# -------------------------------------------------------------------- (B, T, C) to (B, C)
class AttentionPooling(Layer):
    """Pooling by additive attention with one learned query: a weighted mean of the token vectors.

    Args:
        size: C.
        hidden_size: of the tanh; C if not given.
    """

    def __init__(self, size: int, hidden_size: int | None = None, generator: Generator = None) -> None:
        generator = new_generator(generator)
        self.attention = AdditiveAttention(size, size, hidden_size or size, generator=generator)
        self.query = Parameter(normal(1.0)((1, 1, size), generator), "embedding")

    def forward(self, x: Tensor, mask: Array | None = None) -> tuple[Tensor, Array]:
        """Return the pooled vectors (B, C) of x (B, T, C), and the attention weights (B, T); mask False = padding.

        Args:
            mask: (B, T), False for padding.
        """
        query = self.query + x.xp.zeros((len(x), 1, 1), x.dtype)
        context, weights = self.attention(query, x, mask=mask, return_weights=True)
        return context[:, 0], weights.array[:, 0]


class MaxPooling(Layer):
    """Max pooling over time: the largest value of each channel."""

    def forward(self, x: Tensor, mask: Array | None = None) -> tuple[Tensor, Array]:
        """Return maxima (B, C) over tokens, and shares (B, T) of channels where each is largest; mask False = padding.

        Args:
            mask: (B, T), False for padding; the maxima of a text with only padding are 0.
        """
        x = x if mask is None else where(x.xp.asarray(mask[..., None]), x, -np.inf)
        largest = x.max(axis=1)
        is_largest = (x.array == largest.array[:, None]).astype(x.dtype)
        largest = largest if mask is None else where(x.xp.asarray(mask.any(axis=1)[:, None]), largest, 0.0)
        return largest, (is_largest / is_largest.sum(axis=1, keepdims=True)).mean(axis=-1)


class Classifier(Layer):
    """A classifier of token sequences: encoder, pooling, and a dense layer to the logits.

    Args:
        encoder: a layer of tokens (B, T) and lengths (B,), such as `ConvolutionalEncoder`, or `RecurrentEncoder` and
            `TransformerEncoder` in seq2seq.py.
        pooling: a layer of (B, T, C) and a mask, such as `AttentionPooling` or `MaxPooling`.
        size: C.
        n_classes: the number of classes.
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
        """Return the logits (B, n_classes); with `return_weights` also the pooling weights, an array (B, T).

        Args:
            tokens: integers (B, T).
            lengths: (B,), the number of tokens of each sequence before the padding; all if not given.
        """
        tokens = as_tensor(tokens)
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"Classifier: expected tokens (batch, tokens) with a token or more, got {tokens.shape}")
        mask = None if lengths is None else length_mask(lengths, tokens.shape[1], len(tokens))
        pooled, weights = self.pooling(self.encoder(tokens, lengths), mask)
        logits = self.output(self.dropout(pooled))
        return (logits, weights) if return_weights else logits
