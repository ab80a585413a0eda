"""`MixtureOfExperts`: an MLP of several experts, of which a router selects a few for each token.

Batching is dropless: the tokens are sorted by expert, each expert computes its contiguous rows, and the results return
to the order of the tokens, weighted by the router. No expert has a capacity, so the result of a token does not depend
on the other tokens.

In training, a load-balancing loss keeps the router from selecting always the same experts.

Sources: Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformers" (the loss, equations 4 to 6); Gale et al. 2022,
"MegaBlocks" (dropless).

Shapes: N tokens, C channels, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from tricycle import kernels
from tricycle.autograd import NeedsGrad, OwnedGradient, current_modes
from tricycle.create_graph import cast, unfused
from tricycle.devices import Array, array_module, to_cpu
from tricycle.extra_ops import concatenate, split_sizes
from tricycle.functions import Softmax, linear
from tricycle.initialisers import Initialiser, xavier
from tricycle.kernels.dispatch import upcast
from tricycle.layers import MIXTURES, Dense, Dropout, Generator, Layer, new_generator
from tricycle.ops import as_floating, as_tensor, check_last_axis, check_positive, reshape
from tricycle.tensor import Operand, Tensor, record


# -------------------------------------------------------------------- load balancing
class RouterStatistics:
    """How often all routers of one forward pass selected each expert, and the sums of its probabilities.

    Attributes:
        counts, sums: for each expert, (E,).
        n_rows: the number of tokens, times the number of layers.
        factor: that of the gradient of the load-balancing loss, set in its backward pass.
        is_complete: whether the forward pass has ended. Activation checkpointing then runs the routers once more.
    """

    def __init__(self) -> None:
        self.counts: Any = 0
        self.sums: Any = 0
        self.n_rows = 0
        self.factor: Any = 0.0
        self.is_complete = False

    def add(self, probabilities: Array, selected: Array) -> None:
        """Add probabilities (N, E) and the selected experts (N, K) of one layer, unless the forward pass has ended."""
        if not self.is_complete:
            counts = array_module(selected).bincount(selected.reshape(-1), minlength=probabilities.shape[1])
            self.counts = self.counts + counts.astype(probabilities.dtype)
            self.sums = self.sums + probabilities.sum(axis=0)
            self.n_rows += len(probabilities)

    def loss(self) -> Array:
        """Return E times the sum of (assignments per token) x (mean probability) over the experts, a 0-d array."""
        return (self.counts * self.sums).sum() * (len(self.counts) / self.n_rows**2)

    def gradient(self) -> Array:
        """Return the gradient (E,) of each probability, the same for all tokens, as the counts are constants."""
        return self.counts * (self.factor * (len(self.counts) / self.n_rows**2))


# The statistics to which the routers of this thread's forward pass add. A context variable, because models call their
# blocks through functions that pass no further arguments, and activation checkpointing calls them in a saved context.
_statistics: ContextVar[RouterStatistics | None] = ContextVar("router_statistics", default=None)


def add_router_loss(compute_loss: Callable[[], Tensor], weight: Any) -> Tensor:
    """Return `compute_loss()` plus `weight` times the load-balancing loss of all routers that it runs.

    The gradient reaches the routers in the backward pass through `select_experts`, which also works if their
    activations are recomputed.

    Args:
        weight: a number, or a 0-d array on the device.
    """
    statistics = RouterStatistics()
    token = _statistics.set(statistics)
    try:
        loss = compute_loss()
    finally:
        _statistics.reset(token)
        statistics.is_complete = True
    if not statistics.n_rows:
        return loss

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
        statistics.factor = grad * weight
        return (grad,)

    value = loss.array + weight * statistics.loss()
    return record(value.astype(loss.dtype), (loss,), backward, "router_loss")


# -------------------------------------------------------------------- routing
def select_experts(logits: Tensor, n_active: int, normalized: bool) -> tuple[Tensor, Array]:
    """Return the weights (N, K) and indices (N, K) of the K most probable experts by a softmax of logits (N, E).

    Args:
        n_active: K. Of equally probable experts the first is selected.
        normalized: whether the weights of a token are divided by their sum, which equals a softmax of K logits.
    """
    xp, statistics = logits.xp, _statistics.get()
    probabilities = kernels.softmax(upcast(as_floating(logits.array)))
    selected = xp.argsort(-probabilities, axis=-1, kind="stable")[:, :n_active]
    if statistics is not None:
        statistics.add(probabilities, selected)
    places = xp.arange(len(selected))[:, None], selected
    top = probabilities[places]
    total = top.sum(axis=-1, keepdims=True) if normalized else 1
    weights = top / total

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
        if normalized:
            grad = (grad - (grad * weights).sum(axis=-1, keepdims=True)) / total
        slope = xp.zeros_like(probabilities)
        slope[places] = grad
        if statistics is not None:
            slope += statistics.gradient()
        return (kernels.softmax_backward(slope, probabilities),)

    return record(weights, (logits,), backward, "select_experts"), selected


@unfused("tricycle.experts.select_experts")
def _select_experts(node: Tensor, variables: Any) -> Tensor:
    """Compute the weights by other operations; the selection and the router loss are constants."""
    top: Tensor = Softmax()(cast(node.args[0], node.dtype))[variables.places]
    return top / top.sum(axis=-1, keepdims=True) if variables.normalized else top


class Assignment:
    """The order of the N x K pairs of token and expert by expert, and the way back.

    Attributes:
        order: the number of each pair, token x K + k, sorted by expert, then by token.
        inverse: the place of each pair in this order.
        counts: the number of pairs of each expert, in host memory.
    """

    def __init__(self, selected: Array, n_experts: int) -> None:
        """Sort the pairs of token and expert of `selected` (N, K) by expert, and count the pairs of each expert."""
        xp, pairs = array_module(selected), selected.reshape(-1)
        self.n_active = selected.shape[1]
        self.order = xp.argsort(pairs, kind="stable")
        self.inverse = xp.empty_like(self.order)
        self.inverse[self.order] = xp.arange(len(pairs))
        self.counts: list[int] = to_cpu(xp.bincount(pairs, minlength=n_experts)).tolist()

    def by_token(self, rows: Array) -> Array:
        """Return rows (N K, C) in expert order as (N, K, C), in at least float32."""
        return upcast(rows[self.inverse]).reshape(-1, self.n_active, rows.shape[-1])


def gather_rows(x: Tensor, assignment: Assignment) -> Tensor:
    """Return a row of x (N, C) for each pair of token and expert, in expert order (N K, C)."""

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[OwnedGradient]:
        return (OwnedGradient(assignment.by_token(grad).sum(axis=1)),)  # in a fixed order, so deterministic

    return record(x.array[assignment.order // assignment.n_active], (x,), backward, "gather_rows")


@unfused("tricycle.experts.gather_rows")
def _gather_rows(node: Tensor, variables: Any) -> Tensor:
    return node.args[0][variables.assignment.order // variables.assignment.n_active]


def combine_rows(rows: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
    """Return the sum (N, C) of rows (N K, C) in expert order over the experts of each token, times weights (N, K)."""
    array, factors = rows.array, weights.array[..., None]
    y = (assignment.by_token(array) * factors).sum(axis=1).astype(array.dtype, copy=False)

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, Array | None]:
        grad = upcast(grad)[:, None]
        to_rows = (grad * factors).reshape(array.shape)[assignment.order] if needs_grad[0] else None
        to_weights = (grad * assignment.by_token(array)).sum(axis=-1) if needs_grad[1] else None
        return to_rows, to_weights

    return record(y, (rows, weights), backward, "combine_rows")


@unfused("tricycle.experts.combine_rows")
def _combine_rows(node: Tensor, variables: Any) -> Tensor:
    (rows, weights), assignment = node.args, variables.assignment
    by_token = rows[assignment.inverse].reshape(len(weights), assignment.n_active, rows.shape[-1])
    return (by_token * weights.reshape(*weights.shape, 1)).sum(axis=1)


# -------------------------------------------------------------------- layers
class Router(Dense):
    """The linear layer of a mixture that computes logits of the experts, in float32 at any precision of the model."""

    def forward(self, x: Operand, dtype: Any = None) -> Tensor:
        """Map x (..., C) to logits (..., E), of float32 at least; `dtype` has no effect."""
        x = as_tensor(x, self.weights)
        array = upcast(x.array)
        if array is not x.array:
            x = record(array, (x,), lambda grad, needs_grad: (grad,), "router")
        return linear(x, self.weights, self.bias, "router")


class MixtureOfExperts(Layer):
    """A mixture of experts: the sum of the results of K MLPs, selected and weighted by a router for each token.

    Args:
        new_expert: makes an expert from `embedding_dim` and `fields`, such as `blocks.MLPBlock`.
        embedding_dim: C. n_experts: E. n_active_experts: K, at most E.
        normalize_experts: whether the weights of a token's experts are divided by their sum.
        router_bias: whether the router has a bias.
        router_loss: the weight of the load-balancing loss in `add_loss`.
        shared_hidden_size: the hidden width of one more MLP, whose result for every token is added; 0 for none.
        dropout: the dropout probability of the result.
        fields: further fields of `ModelConfig`, such as `hidden_size`, the width of each expert.
    """

    shared: Layer | None = None

    def __init__(
        self,
        new_expert: Callable[..., Layer],
        embedding_dim: int,
        n_experts: int,
        n_active_experts: int = 2,
        *,
        normalize_experts: bool = True,
        router_bias: bool = False,
        router_loss: float = 0.0,
        shared_hidden_size: int = 0,
        dropout: float = 0.0,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
        **fields: Any,
    ) -> None:
        check_positive("MixtureOfExperts", n_experts=n_experts, n_active_experts=n_active_experts)
        if n_active_experts > n_experts:
            rule = f"n_active_experts to be at most {n_experts}"
            raise ValueError(f"MixtureOfExperts: expected {rule}, got {n_active_experts}")
        generator = new_generator(generator)
        options: dict[str, Any] = {**fields, "initialiser": initialiser, "generator": generator}
        self.embedding_dim, self.n_active = embedding_dim, n_active_experts
        self.normalized, self.router_loss = normalize_experts, router_loss
        self.router = Router(embedding_dim, n_experts, router_bias, initialiser, generator, role="router")
        self.experts = [new_expert(embedding_dim, **options) for _ in range(n_experts)]
        if shared_hidden_size:
            self.shared = new_expert(embedding_dim, **{**options, "hidden_size": shared_hidden_size})
        self.dropout = Dropout(dropout, generator)

    def forward(self, x: Operand) -> Tensor:
        """Apply the selected experts to each token of x (..., C); return their weighted sum plus the shared MLP.

        If a graph is built, experts without tokens take part with no rows, so that their gradients are 0, not None.
        """
        x = as_tensor(x)
        shape = x.shape
        check_last_axis(f"MixtureOfExperts(embedding_dim={self.embedding_dim})", x, self.embedding_dim)
        rows = reshape(x, math.prod(shape[:-1]), shape[-1])
        weights, selected = select_experts(self.router(rows), self.n_active, self.normalized)
        assignment = Assignment(selected, len(self.experts))
        builds_graph = all(mode.builds_graph for mode in current_modes.get())
        running = [(e, n) for e, n in zip(self.experts, assignment.counts) if n or builds_graph] or [
            (self.experts[0], 0)
        ]
        parts = split_sizes(gather_rows(rows, assignment), [n for _, n in running], axis=0)
        outputs = concatenate([expert(part) for (expert, _), part in zip(running, parts)])
        out = reshape(combine_rows(outputs, weights, assignment), shape)
        return self.dropout(out if self.shared is None else out + self.shared(x))

    def add_loss(self, compute_loss: Callable[[], Tensor], scale: Any) -> Tensor:
        """Return `compute_loss()`, in training plus `scale` times the weighted load-balancing loss of all mixtures."""
        if not self.training or not self.router_loss:
            return compute_loss()
        return add_router_loss(compute_loss, self.router_loss * scale)


MIXTURES["experts"] = MixtureOfExperts
