"""Example functions for `tricycle look --graph`, with values of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tricycle.blocks import TransformerBlock
from tricycle.configs.model import ModelConfig
from tricycle.functions import Softmax
from tricycle.layers import RMSNorm
from tricycle.loss import CrossEntropy
from tricycle.ops import tanh
from tricycle.tensor import Tensor


def sums_and_products(a: Tensor, b: Tensor) -> Tensor:
    """Compute (a b + a) b; the gradient of a value that is used twice is the sum of two contributions."""
    return (a * b + a) * b


def neuron(w: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Compute the squared error of one neuron with tanh activation."""
    return (tanh((w * x).sum() + b) - y) ** 2


def softmax_loss(scores: Tensor) -> Tensor:
    """Compute the cross-entropy loss of three scores from softmax and logarithm; the label is the last class."""
    return -Softmax()(scores)[2].log()


def cross_entropy(scores: Tensor) -> Tensor:
    """Compute the cross-entropy loss of three scores as one operation; the label is the last class."""
    return CrossEntropy()(np.array([2]), scores)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the sum of the outputs of attention from elementary operations, with two queries and three keys."""
    weights = Softmax()(q @ k.transpose() * 2**-0.5)
    return (weights @ v).sum()


def norm(x: Tensor) -> Tensor:
    """Compute the largest element of an RMS norm (eps 1e-5) from elementary operations."""
    return (x / ((x * x).mean() + 1e-5).sqrt()).max()


def block(x: Tensor) -> Tensor:
    """Compute the sum of the outputs of a new GPT block (seed 0) for two tokens with four channels."""
    config = ModelConfig(embedding_dim=4, n_heads=2, context_window=2, norm="rms_norm", bias=False, expansion_ratio=2)
    return TransformerBlock(config, generator=0)(x).sum()


def norm_layer(x: Tensor) -> Tensor:
    """Compute the largest element of an RMS norm with a gain (four channels) as one operation."""
    return RMSNorm(4)(x).max()


# By name: a function, whose docstring describes it on the page, and the values of its inputs.
EXAMPLES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "product": (sums_and_products, {"a": 2.0, "b": 3.0}),
    "neuron": (neuron, {"w": [0.5, -1.0], "x": [1.0, 2.0], "b": 0.25, "y": 1.0}),
    "softmax": (softmax_loss, {"scores": [1.0, 2.0, 0.5]}),
    "cross-entropy": (cross_entropy, {"scores": [[1.0, 2.0, 0.5]]}),
    "attention": (attention, {"q": [[1, 0], [0, 1]], "k": [[1, 0], [1, 1], [0, 2]], "v": [[1, 2], [3, 4], [5, 6]]}),
    "norm": (norm, {"x": [1.0, -2.0, 0.5, 3.0]}),
    "norm-layer": (norm_layer, {"x": [1.0, -2.0, 0.5, 3.0]}),
    "block": (block, {"x": [[[0.5, -1.0, 0.25, 1.0], [1.0, 0.5, -0.5, 0.0]]]}),
}
