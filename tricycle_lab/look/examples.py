"""Small functions to see gradients go back through, each with values for its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tricycle.blocks import TransformerBlock
from tricycle.configs.model import ModelConfig
from tricycle.functions import Softmax
from tricycle.layers import RMSNorm
from tricycle.loss import CrossEntropy
from tricycle.ops import tanh
from tricycle.tensor import Tensor


class Example(NamedTuple):
    """A function of Tensors, and the values to call it with, by name."""

    said: str
    function: Callable[..., Tensor]
    values: dict[str, Any]


def sums_and_products(a: Tensor, b: Tensor) -> Tensor:
    """A value that is used twice gets the sum of two gradients."""
    return (a * b + a) * b


def neuron(w: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """One neuron and its squared error."""
    return (tanh((w * x).sum() + b) - y) ** 2


def softmax_loss(scores: Tensor) -> Tensor:
    """The loss of three scores, of which the last should win, by softmax and logarithm one after the other."""
    return -Softmax()(scores)[2].log()


def cross_entropy(scores: Tensor) -> Tensor:
    """The same as one operation."""
    return CrossEntropy()(np.array([2]), scores)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention from plain operations: two queries, three keys."""
    weights = Softmax()(q @ k.transpose() * 2**-0.5)
    return (weights @ v).sum()


def norm(x: Tensor) -> Tensor:
    """An RMS norm from plain operations."""
    return (x / ((x * x).mean() + 1e-5).sqrt()).max()


def block(x: Tensor) -> Tensor:
    """A whole block of a GPT on two tokens of four channels."""
    config = ModelConfig(embedding_dim=4, n_heads=2, context_window=2, norm="rms_norm", bias=False, expansion_ratio=2)
    return TransformerBlock(config, generator=0)(x).sum()


def norm_layer(x: Tensor) -> Tensor:
    """The same as one operation, with a gain."""
    return RMSNorm(4)(x).max()


EXAMPLES: dict[str, Example] = {
    name: Example((function.__doc__ or "").strip(), function, values)
    for name, function, values in (
        ("product", sums_and_products, {"a": 2.0, "b": 3.0}),
        ("neuron", neuron, {"w": [0.5, -1.0], "x": [1.0, 2.0], "b": 0.25, "y": 1.0}),
        ("softmax", softmax_loss, {"scores": [1.0, 2.0, 0.5]}),
        ("cross-entropy", cross_entropy, {"scores": [[1.0, 2.0, 0.5]]}),
        ("attention", attention, {"q": [[1, 0], [0, 1]], "k": [[1, 0], [1, 1], [0, 2]], "v": [[1, 2], [3, 4], [5, 6]]}),
        ("norm", norm, {"x": [1.0, -2.0, 0.5, 3.0]}),
        ("norm-layer", norm_layer, {"x": [1.0, -2.0, 0.5, 3.0]}),
        ("block", block, {"x": [[[0.5, -1.0, 0.25, 1.0], [1.0, 0.5, -0.5, 0.0]]]}),
    )
}
