"""Attention by scores of several kinds, from plain operations: the lecture's, to be read and changed.

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
    """Weights softmax(score(query, key)), score = q . k / sqrt(D) (Vaswani et al. 2017, section 3.2.1).

    Plain operations, one node each, to be read and changed; `CrossAttention` is the fused form. The base of those
    with other scores, which define `scores`.

    Args:
        softmax: what turns scores into weights: a name in `softmaxes.SOFTMAXES`, or an object.
    """

    def __init__(self, softmax: str | RowSoftmax = "softmax") -> None:
        self.softmax = new_softmax(softmax)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, T, D) and what `project_keys` gave for the keys to (B, T, S)."""
        return query @ key.transpose(0, 2, 1) * (1 / math.sqrt(query.shape[-1]))

    def project_keys(self, key: Tensor) -> Tensor:
        """What the scores need of the keys: computed once where queries come one after the other."""
        return key

    def weights(self, query: Tensor, projected_keys: Tensor, mask: Mask = None) -> Tensor:
        """(B, T, S); a row that sees no key is all zeros."""
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
        """
        Args:
            query: (B, T, query_size). key: (B, S, key_size). value: (B, S, E), the keys unless given.
            mask: which keys may be seen, as `additive_mask` takes it.

        Returns:
            (B, T, E), the mean of the values by their weights; with `return_weights` also these, (B, T, S).

        Raises:
            ValueError: shapes that do not belong together.
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
    """score = v . tanh(W_q q + W_k k) (Bahdanau et al. 2015, appendix A.1.2).

    Args:
        query_size, key_size: may differ.
        hidden_size: of the tanh.
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
        return self.key(key)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        hidden = tanh(self.query(query)[:, :, None] + key[:, None])  # (B, T, S, hidden_size)
        return self.vector(hidden)[..., 0]


class LuongAttention(ScaledDotProductAttention):
    """score = q . k ("dot"), q W k ("general") or v . tanh(W [q; k]) ("concat") (Luong et al. 2015, section 3.1).

    Args:
        query_size, key_size: equal for "dot".
        hidden_size: of the tanh in "concat"; the query's unless given.
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
        if self.score == "concat":
            return self.concat.project_keys(key)
        return self.key(key) if self.score == "general" else key

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.concat.scores(query, key) if self.score == "concat" else query @ key.transpose(0, 2, 1)


class HardAttention(Layer):
    """Attention to one key for each query, drawn with the weights that soft attention would give (Xu et al. 2015, 4.1).

    A draw has no gradient. What trains the weights is REINFORCE (Williams 1992): `reinforce` makes likelier what was
    better than expected. The values get gradients as usual. In `eval` the key of the largest weight is taken.

    Args:
        soft: gives the weights.
    """

    def __init__(self, soft: ScaledDotProductAttention, generator: Generator = None) -> None:
        self.soft = soft
        self.generator = new_generator(generator)

    def forward(
        self, query: Operand, key: Operand, value: Operand | None = None, mask: Mask = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            query, key, value, mask: as of soft attention.

        Returns:
            (B, T, E), the values of the chosen keys, zeros where there is none to choose; and the log of the
            probability of each choice (B, T).
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
    """-mean((reward - baseline) log p): its gradient raises the expected reward (Williams 1992).

    Args:
        log_probability: of what was chosen, any shape.
        reward: how good it was, an array that broadcasts to that shape; no gradient flows to it.
        baseline: what was expected, such as a running mean of rewards: it takes noise away and no gradient.
    """
    return -(log_probability * (reward - baseline)).mean()
