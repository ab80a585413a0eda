"""Kernels of mixtures of experts: the selection of experts, their products, and the weighted sum of their results.

Shapes: N tokens, C channels, E experts, K experts per token, H hidden channels of an expert; M rows, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tricycle import kernels
from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel, upcasting_kernel


class Routing(NamedTuple):
    """The options of a router that selects experts.

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
        """Return indices (N, K) of the highest of scores (N, E), in the best groups if grouped; ties: the first."""
        xp = array_module(scores)
        if self.n_active_groups < self.n_groups:
            groups = scores.reshape(len(scores), self.n_groups, scores.shape[1] // self.n_groups)
            best = xp.sort(groups, axis=-1)[..., -2 if self.sigmoid else -1 :].sum(axis=-1)
            excluded = xp.argsort(-best, axis=-1, kind="stable")[:, self.n_active_groups :]
            groups = groups.copy()
            groups[xp.arange(len(groups))[:, None], excluded] = -xp.inf
            scores = groups.reshape(scores.shape)
        return xp.argsort(-scores, axis=-1, kind="stable")[:, : self.n_active]


@upcasting_kernel(1)
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


# -------------------------------------------------------------------- rows sorted by expert
def group_slices(counts: Sequence[int]) -> list[slice]:
    """Return the slices of consecutive groups with `counts` rows each."""
    return [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]


@kernel
def grouped_matmul(a: Array, counts: Sequence[int], *matrices: Array) -> Array:
    """Return (M, C_out): each of E groups of `counts` rows of a (M, C_in) times its matrix, (C_in, C_out)."""
    parts = [kernels.matmul(a[part], matrix) for part, matrix in zip(group_slices(counts), matrices)]
    return array_module(a).concatenate(parts)


@kernel
def grouped_weight_gradients(a: Array, counts: Sequence[int], grad: Array) -> Array:
    """Return (E, C_in, C_out), the gradients of the matrices of `grouped_matmul`, from `grad` (M, C_out)."""
    return array_module(a).stack([kernels.matmul(a[part].T, grad[part]) for part in group_slices(counts)])


@upcasting_kernel(1)
def sum_by_token(rows: Array, places: Array, weights: Array | None = None) -> Array:
    """Return the sums (N, C) over K of each token's rows at `places` (N, K) in rows (M, C), times weights (N, K)."""
    total: Any = 0
    for k in range(places.shape[1]):  # all rows at once would be written to memory, and read again
        part = rows[places[:, k]]
        total += part if weights is None else part * weights[:, k, None]
    return total


@upcasting_kernel(1)
def sum_by_token_backward(grad: Array, rows: Array, places: Array, weights: Array) -> tuple[Array, Array]:
    """Return the gradients (M, C) and (N, K) of rows and weights of `sum_by_token`, from `grad` (N, C).

    Each row is in `places` once.
    """
    to_rows, to_weights = array_module(rows).empty_like(rows), array_module(rows).empty_like(weights)
    for k in range(places.shape[1]):
        to_weights[:, k] = (grad * rows[places[:, k]]).sum(axis=-1)
        to_rows[places[:, k]] = grad * weights[:, k, None]
    return to_rows, to_weights
