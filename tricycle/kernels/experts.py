"""Kernels of mixtures of experts: the selection of experts, and the weighted sum of their results.

Shapes: N tokens, C channels, E experts, K experts per token, H hidden channels of an expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tricycle import kernels
from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import upcasting_kernel


class Routing(NamedTuple):
    """How a router selects experts.

    Attributes:
        n_active: K, the number of experts of each token.
        normalized: whether the weights of a token are divided by their sum.
        sigmoid: whether the scores are sigmoids of the logits; by default they are a softmax.
        n_groups: the number of groups of consecutive experts, a divisor of E.
        n_active_groups: the number of groups from which the experts of a token are selected: those with the highest
            score, or, with sigmoid, those with the highest sum of two scores.
        scale: the factor of the weights.
    """

    n_active: int
    normalized: bool = True
    sigmoid: bool = False
    n_groups: int = 1
    n_active_groups: int = 1
    scale: float = 1.0

    def select(self, scores: Array) -> Array:
        """Return the indices (N, K) of the experts with the highest scores (N, E); of equal ones the first."""
        xp = array_module(scores)
        if self.n_active_groups < self.n_groups:
            groups = scores.reshape(len(scores), self.n_groups, -1)
            best = xp.sort(groups, axis=-1)[..., -2 if self.sigmoid else -1 :].sum(axis=-1)
            excluded = xp.argsort(-best, axis=-1, kind="stable")[:, self.n_active_groups :]
            groups = groups.copy()
            groups[xp.arange(len(groups))[:, None], excluded] = -xp.inf
            scores = groups.reshape(scores.shape)
        return xp.argsort(-scores, axis=-1, kind="stable")[:, : self.n_active]


@upcasting_kernel(0)
def route(logits: Array, routing: Routing, correction: Array | None = None) -> tuple[Array, Array, Array]:
    """Return the weights (N, K), scores (N, E), and indices (N, K) of the selected experts, from logits (N, E).

    Args:
        correction: (E,), added to the scores for the selection, but not to the weights.
    """
    scores = kernels.sigmoid(logits) if routing.sigmoid else kernels.softmax(logits)
    selected = routing.select(scores if correction is None else scores + correction)
    weights = array_module(scores).take_along_axis(scores, selected, axis=-1)
    if routing.normalized:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights if routing.scale == 1 else weights * routing.scale, scores, selected


@upcasting_kernel(1)
def mix_swiglu_experts(x: Array, weights: Array, *matrices: Array) -> Array:
    """Return the sum over K experts of their weights (N, K) times swiglu(x U) D (N, C), all for each row of x (N, C).

    Args:
        matrices: U (C, 2 H) and D (H, C) of the first expert, of the second, and so on.
    """
    total: Any = 0
    for k, (up, down) in enumerate(zip(matrices[::2], matrices[1::2])):
        total += weights[:, k, None] * kernels.matmul(kernels.swiglu(kernels.matmul(x, up)), down)
    return total
