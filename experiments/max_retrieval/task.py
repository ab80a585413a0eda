"""The task, the model and its loss.

Each of n items has a priority and a class; the answer is the class of the item with the highest priority.

Shapes: B batch, N items, C channels = width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tricycle.activation import GeLU
from tricycle.layers import Dense, Layer, Sequential
from tricycle.loss import CrossEntropy
from tricycle.sequences.cross_attention import MultiHeadAttention
from tricycle.tensor import Tensor

N_CLASSES = 10


class Batch(NamedTuple):
    """
    Attributes:
        items: (B, N, 1 + N_CLASSES): a priority, uniform in [0, 1), beside a class as one of 0 and 1.
        query: (B, 1, 1), uniform in [0, 1), which says nothing.
        targets: (B,), the class of the item with the highest priority.
    """

    items: np.ndarray
    query: np.ndarray
    targets: np.ndarray


def new_batch(n_items: int, size: int, generator: np.random.Generator) -> Batch:
    priorities = generator.random((size, n_items), dtype=np.float32)
    classes = generator.integers(0, N_CLASSES, (size, n_items))
    items = np.concatenate([priorities[..., None], np.eye(N_CLASSES, dtype=np.float32)[classes]], axis=-1)
    query = generator.random((size, 1, 1), dtype=np.float32)
    return Batch(items, query, classes[np.arange(size), priorities.argmax(axis=1)])


def lecun(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Normal with variance 1 / inputs (LeCun et al. 1998), which flax's layers start from."""
    return generator.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[0]))


class MaxRetrieval(Layer):
    """Two layers for each item and two for the query, one head of attention, two layers for the answer."""

    def __init__(self, generator: np.random.Generator, width: int = 128) -> None:
        def dense(from_size: int, to_size: int) -> Dense:
            return Dense(from_size, to_size, initialiser=lecun, generator=generator)

        self.read_items = Sequential(dense(1 + N_CLASSES, width), GeLU(), dense(width, width), GeLU())
        self.read_query = Sequential(dense(1, width), GeLU(), dense(width, width), GeLU())
        self.attention = MultiHeadAttention(width, n_heads=1, initialiser=lecun, generator=generator)
        self.answer = Sequential(dense(width, width), GeLU(), dense(width, N_CLASSES))

    def forward(self, items: np.ndarray, query: np.ndarray) -> Tensor:
        """(B, N, 1 + N_CLASSES) and (B, 1, 1) to logits (B, N_CLASSES)."""
        return self.answer(self.attention(self.read_query(query), self.read_items(items))[:, 0])

    def project(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """What attention makes of a batch before its softmax: queries (B, 1, C), keys and values (B, N, C)."""
        items, query = self.read_items(batch.items), self.read_query(batch.query)
        return self.attention.query(query), self.attention.key(items), self.attention.value(items)

    def finish(self, mixed: Tensor) -> np.ndarray:
        """From the mixture of values (B, 1, C) to logits (B, N_CLASSES)."""
        return self.answer(self.attention.projection(mixed)[:, 0]).array


def loss_of(model: MaxRetrieval, batch: Batch, l2: float) -> Tensor:
    """The cross entropy, and l2 times the squares of all parameters.

    The squares are part of the loss, so Adam divides their gradient as any other: this is no decoupled weight decay.
    """
    loss = CrossEntropy()(batch.targets, model(batch.items, batch.query))
    for parameter in model.parameters():
        loss = loss + l2 * (parameter * parameter).sum()
    return loss
