"""Attention with dot-product, additive and Luong scores, and hard attention, written with plain operations.

These layers are for reading and changing; `MultiHeadAttention` and `GPT` use a fused attention kernel.

Shapes: B batch, T queries, S keys, D their size, E size of the values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tricycle.attention import Mask, additive_mask
from tricycle.devices import Array
from tricycle.extra_ops import log
from tricycle.functions import RowSoftmax
from tricycle.initialisers import Initialiser, xavier
from tricycle.layers import Dense, Generator, Layer, new_generator
from tricycle.ops import as_tensor, as_tensors, tanh
from tricycle.softmaxes import new_softmax
from tricycle.tensor import Operand, Tensor


class ScaledDotProductAttention(Layer):
    """Attention with the weights softmax(q . k / sqrt(D)) (Vaswani et al. 2017, section 3.2.1).

    Subclasses with other scores override `scores`, and `project_keys` if they project the keys.

    Args:
        softmax: the attention normalizer: a name in `softmaxes.SOFTMAXES`, or an object.
    """

    def __init__(self, softmax: str | RowSoftmax = "softmax") -> None:
        self.softmax = new_softmax(softmax)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores q . k / sqrt(D), (B, T, S), of queries (B, T, D) and projected keys (B, S, D)."""
        return query @ key.transpose(0, 2, 1) * (1 / math.sqrt(query.shape[-1]))

    def project_keys(self, key: Tensor) -> Tensor:
        """Return the keys in the form that `scores` takes, here unchanged; in decoding this is called once."""
        return key

    def weights(self, query: Tensor, projected_keys: Tensor, mask: Mask = None) -> Tensor:
        """Return the attention weights (B, T, S); a mask is True for visible keys, and a row without one is zero."""
        scores = self.scores(query, projected_keys)
        hidden = additive_mask(type(self).__name__, mask, scores.array, *scores.shape[1:])
        if hidden is not None:
            scores = scores + Tensor(hidden[:, 0], requires_grad=False)
        return self.softmax(scores)

    def forward(
        self,
        query: Operand,
        key: Operand,
        value: Operand | None = None,
        mask: Mask = None,
        return_weights: bool = False,
    ) -> Any:
        """Return attention to `value` (else key), (B, T, E), with `return_weights` also (B, T, S); mask True: visible.

        Args:
            query: (B, T, query_size). key: (B, S, key_size). value: (B, S, E); the keys if not given.
            mask: True where a query may attend to a key, in a form that `additive_mask` accepts.

        Raises:
            ValueError: the shapes do not match.
        """
        query, key = as_tensors(query, key)
        value = key if value is None else as_tensor(value)
        shapes = query.shape, key.shape, value.shape
        if {len(shape) for shape in shapes} != {3} or len({s[0] for s in shapes}) > 1 or key.shape[1] != value.shape[1]:
            wanted = "query (B, T, .), key and value (B, S, .)"
            got = f"{query.shape}, {key.shape} and {value.shape}"
            raise ValueError(f"{type(self).__name__}: expected {wanted}, got shapes {got}")
        weights = self.weights(query, self.project_keys(key), mask)
        context = weights @ value
        return (context, weights) if return_weights else context


class AdditiveAttention(ScaledDotProductAttention):
    """Additive attention, score = v . tanh(W_q q + W_k k) (Bahdanau et al. 2015, appendix A.1.2).

    Args:
        query_size, key_size: the sizes of queries and keys, which may differ.
        hidden_size: the size of the tanh.
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        hidden_size: int,
        softmax: str | RowSoftmax = "softmax",
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        super().__init__(softmax)
        generator = new_generator(generator)
        self.query = Dense(query_size, hidden_size, False, initialiser, generator)
        self.key = Dense(key_size, hidden_size, False, initialiser, generator)
        self.vector = Dense(hidden_size, 1, False, initialiser, generator)

    def project_keys(self, key: Tensor) -> Tensor:
        """Return W_k k, (B, S, hidden_size), of keys (B, S, key_size)."""
        return self.key(key)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores v . tanh(W_q q + k), (B, T, S), of queries and keys from `project_keys`."""
        hidden = tanh(self.query(query)[:, :, None] + key[:, None])  # (B, T, S, hidden_size)
        return self.vector(hidden)[..., 0]


class LuongAttention(ScaledDotProductAttention):
    """Attention with the three scores of Luong et al. 2015, section 3.1.

    Args:
        query_size, key_size: the sizes of queries and keys; equal for "dot".
        score: "dot" for q . k, "general" for q W k, "concat" for v . tanh(W [q; k]).
        hidden_size: the size of the tanh in "concat"; query_size if not given.
    """

    def __init__(
        self,
        query_size: int,
        key_size: int,
        score: str = "general",
        hidden_size: int | None = None,
        softmax: str | RowSoftmax = "softmax",
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        super().__init__(softmax)
        if score not in ("dot", "general", "concat"):
            raise ValueError(f"LuongAttention: expected score to be dot, general or concat, got {score!r}")
        if score == "dot" and query_size != key_size:
            got = f"{query_size} and {key_size}"
            raise ValueError(f"LuongAttention: expected query and key of one size with score dot, got {got}")
        self.score = score
        if score == "general":
            self.key = Dense(key_size, query_size, False, initialiser, generator)
        elif score == "concat":  # W [q; k] is W_q q + W_k k
            size = hidden_size or query_size
            self.concat = AdditiveAttention(query_size, key_size, size, softmax, initialiser, generator)

    def project_keys(self, key: Tensor) -> Tensor:
        """Return W k, (B, S, query_size), or (B, S, hidden_size) for "concat"; the keys themselves for "dot"."""
        if self.score == "concat":
            return self.concat.project_keys(key)
        return self.key(key) if self.score == "general" else key

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scores (B, T, S) of keys from `project_keys`: dot products, additive if score="concat"."""
        return self.concat.scores(query, key) if self.score == "concat" else query @ key.transpose(0, 2, 1)


class HardAttention(Layer):
    """Hard attention: each query attends to one key, sampled with soft attention's weights (Xu et al. 2015, 4.1).

    Sampling has no gradient; the loss `reinforce` trains the weights (REINFORCE, Williams 1992). The values get
    gradients as usual. In evaluation mode the key of the largest weight is chosen.

    Args:
        soft: the soft attention that computes the weights.
    """

    def __init__(self, soft: ScaledDotProductAttention, generator: Generator = None) -> None:
        self.soft = soft
        self.generator = new_generator(generator)

    def forward(
        self, query: Operand, key: Operand, value: Operand | None = None, mask: Mask = None
    ) -> tuple[Tensor, Tensor]:
        """Return a key's value (B, T, E) per query, sampled (evaluation: argmax), and its log probability (B, T).

        Args:
            query, key, value, mask: see `ScaledDotProductAttention`; a row whose keys are all masked gives zeros.
        """
        _, weights = self.soft(query, key, value, mask, return_weights=True)
        value = as_tensor(key if value is None else value)
        xp, n_items = weights.xp, len(weights)
        sums = weights.array.cumsum(axis=-1)
        if self.training:
            draw = xp.asarray(self.generator.random(sums.shape[:-1], dtype=np.float32)) * sums[..., -1]
            chosen = xp.minimum((sums <= draw[..., None]).sum(axis=-1), sums.shape[-1] - 1)
        else:
            chosen = weights.array.argmax(axis=-1)
        items, queries = xp.arange(n_items)[:, None], xp.arange(weights.shape[1])[None]
        seen = (sums[..., -1] > 0).astype(weights.dtype)
        probability = weights[items, queries, chosen] * seen + (1 - seen)
        return value[items, chosen] * seen[..., None], log(probability)


def reinforce(log_probability: Tensor, reward: Array, baseline: Array | float) -> Tensor:
    """Compute the REINFORCE loss, -mean((reward - baseline) * log_probability) (Williams 1992).

    Args:
        log_probability: of the sampled choices, any shape.
        reward: an array that broadcasts to that shape; it gets no gradient.
        baseline: the expected reward, such as a running mean, which reduces the variance; it gets no gradient.
    """
    return -(log_probability * (reward - baseline)).mean()
