"""`MixtureOfExperts`: an MLP of several experts, of which a router selects a few for each token.

Batching is dropless: the tokens are sorted by expert, each expert computes its contiguous rows, and the results return
to the order of the tokens, weighted by the router. No expert has a capacity, so the result of a token does not depend
on the other tokens.

In training, a load-balancing loss keeps the router from selecting always the same experts.

DeepSeek's models add three ideas: a shared MLP processes every token beside the selected experts; a token selects
experts of a few groups only, because each group is on another device; and scores by a sigmoid, to which a correction is
added for the selection alone, balance the experts without a loss.

Sources: Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformers" (the loss, equations 4 to 6); Gale et al. 2022,
"MegaBlocks" (dropless); Dai et al. 2024, "DeepSeekMoE" (shared experts); DeepSeek-AI 2024, "DeepSeek-V2" (groups) and
"DeepSeek-V3" (sigmoid).

Shapes: N tokens, C channels, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.activation import SwiGLU
from tricycle.autograd import NeedsGrad, OwnedGradient, current_modes, is_evaluating
from tricycle.blocks import MLPBlock
from tricycle.configs.model import ModelConfig
from tricycle.create_graph import cast, unfused
from tricycle.devices import Array, array_module, to_cpu
from tricycle.extra_ops import concatenate, split_sizes
from tricycle.functions import Sigmoid, Softmax, linear
from tricycle.initialisers import Initialiser, xavier
from tricycle.kernels.dispatch import upcast
from tricycle.kernels.experts import Routing as Routing
from tricycle.kernels.experts import (
    group_slices,
    grouped_matmul,
    grouped_weight_gradients,
    mix_swiglu_experts,
    route,
    sum_by_token,
    sum_by_token_backward,
)
from tricycle.layers import MIXTURES, Dense, Dropout, Generator, Layer, new_generator
from tricycle.ops import Op, as_floating, as_tensor, check_last_axis, reshape
from tricycle.parameter import Parameter
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
def select_experts(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Array]:
    """Return the weights (N, K), and the indices (N, K) of the experts with the highest scores, from logits (N, E).

    Args:
        correction: (E,), added to the scores for the selection, but not to the weights, so its gradient is 0.
    """
    xp, statistics, normalized = logits.xp, _statistics.get(), routing.normalized
    added = None if correction is None else correction.array
    weights, scores, selected = route(upcast(as_floating(logits.array)), routing, added)
    if statistics is not None:
        statistics.add(scores, selected)

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array, ...]:
        if normalized:
            grad = grad - (grad * weights).sum(axis=-1, keepdims=True) / routing.scale
            grad = grad / xp.take_along_axis(scores, selected, axis=-1).sum(axis=-1, keepdims=True)
        slope = xp.zeros_like(scores)
        slope[xp.arange(len(selected))[:, None], selected] = grad * routing.scale
        if statistics is not None:
            slope += statistics.gradient()
        slope = slope * scores * (1 - scores) if routing.sigmoid else kernels.softmax_backward(slope, scores)
        return (slope,) if added is None else (slope, xp.zeros_like(added))

    args = (logits,) if correction is None else (logits, correction)
    return record(weights, args, backward, "select_experts"), selected


@unfused("tricycle.experts.select_experts")
def _select_experts(node: Tensor, variables: Any) -> Tensor:
    """Recompute the experts' weights on Tensors; the selection is constant, the router loss gives no gradient."""
    scores = Sigmoid() if variables.routing.sigmoid else Softmax()
    places = variables.xp.arange(len(variables.selected))[:, None], variables.selected
    top: Tensor = scores(cast(node.args[0], node.dtype))[places]
    return (top / top.sum(axis=-1, keepdims=True) if variables.normalized else top) * variables.routing.scale


class Assignment:
    """The order of the N x K pairs of token and expert by expert, then by token, and the way back.

    Attributes:
        tokens: the token of each pair in this order, (N K,).
        places: the place of each pair in this order, (N, K).
        counts: the number of pairs of each expert, in host memory.
    """

    def __init__(self, selected: Array, n_experts: int) -> None:
        """Sort the pairs of token and expert of `selected` (N, K) by expert, and count the pairs of each expert."""
        xp, pairs = array_module(selected), selected.reshape(-1)
        order = xp.argsort(pairs, kind="stable")
        self.tokens = order // selected.shape[1]
        self.places = xp.empty_like(order)
        self.places[order] = xp.arange(len(pairs))
        self.places = self.places.reshape(selected.shape)
        self.counts: list[int] = to_cpu(xp.bincount(pairs, minlength=n_experts)).tolist()


def gather_rows(x: Tensor, assignment: Assignment) -> Tensor:
    """Return a row of x (N, C) for each pair of token and expert, in expert order (N K, C)."""

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[OwnedGradient]:
        return (OwnedGradient(sum_by_token(grad, assignment.places)),)  # in a fixed order, so deterministic

    return record(x.array[assignment.tokens], (x,), backward, "gather_rows")


@unfused("tricycle.experts.gather_rows")
def _gather_rows(node: Tensor, variables: Any) -> Tensor:
    """Recompute the rows of x for each pair of token and expert, in expert order, by indexing a Tensor."""
    return node.args[0][variables.assignment.tokens]


def combine_rows(rows: Tensor, weights: Tensor, assignment: Assignment) -> Tensor:
    """Return the sum (N, C) of rows (N K, C) in expert order over the experts of each token, times weights (N, K)."""
    array, factors, places = rows.array, weights.array, assignment.places

    def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array, Array]:
        return sum_by_token_backward(grad, array, places, factors)

    return record(sum_by_token(array, places, factors), (rows, weights), backward, "combine_rows")


@unfused("tricycle.experts.combine_rows")
def _combine_rows(node: Tensor, variables: Any) -> Tensor:
    """Recompute each token's weighted sum of its experts' rows by operations on Tensors."""
    (rows, weights), places = node.args, variables.places
    return (rows[places] * weights.reshape(*weights.shape, 1)).sum(axis=1)


def grouped_linear(x: Tensor, layers: Sequence[Dense], counts: Sequence[int]) -> Tensor:
    """Apply Dense layers of one shape to x (M, from_size), each to the next of its `counts` rows; return (M, to_size).

    The products are in float32. With many small groups, that is faster than to call one layer after the other.
    """
    weights, parts = [layer.weights for layer in layers], group_slices(counts)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    array, matrices = as_floating(x.array), [matrix.array for matrix in weights]
    y = grouped_matmul(array, counts, *matrices)
    for part, bias in zip(parts, biases):
        y[part] += bias.array

    def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | OwnedGradient | None]:
        dx = grouped_matmul(grad, counts, *(matrix.T for matrix in matrices)) if needs_grad[0] else None
        dweights: list[Any] = [None] * len(weights)
        if any(needs_grad[1 : 1 + len(weights)]):
            in_c_order = matrices[0].flags.c_contiguous  # each gradient gets the memory order of its matrix
            left, right = (array, grad) if in_c_order else (grad, array)
            products = grouped_weight_gradients(left, counts, right)
            by_layer = [products[e] for e in range(len(weights))]
            dweights = [OwnedGradient(product if in_c_order else product.T) for product in by_layer]
        return [dx, *dweights, *(kernels.sum_rows(grad[part]) for part, _ in zip(parts, biases))]

    return record(y, (x, *weights, *biases), backward, "grouped_linear")


@unfused("tricycle.experts.grouped_linear")
def _grouped_linear(node: Tensor, variables: Any) -> Tensor:
    """Recompute the results of the layers, one after the other, by operations on Tensors."""
    x, *parameters = node.args
    n_layers = len(variables.weights)
    inputs = split_sizes(x, variables.counts, axis=0)
    results = [part @ matrix for part, matrix in zip(inputs, parameters[:n_layers])]
    biases = parameters[n_layers:]
    return concatenate([y + bias for y, bias in zip(results, biases)] if biases else results)


# -------------------------------------------------------------------- layers
def are_plain_mlps(experts: Sequence[Any], kind: type) -> bool:
    """Return whether all experts compute activation(x U + b) D + c, with equal activations, shapes and type `kind`.

    An MLP with a hook, an adapter, quantized matrices or a layer of another class computes something else.
    """
    activation: Any = experts[0].activation
    expected: Any = None
    if not isinstance(activation, Op) or "forward" in vars(activation):
        return False
    for expert in experts:
        if not (_is_plain(expert, MLPBlock) and _is_plain(expert.dropout, Dropout)):
            return False
        up, down, other = expert.up, expert.projection, expert.activation
        if not (_is_plain(up, Dense) and _is_plain(down, Dense)):
            return False
        if type(up.weights.array) is not kind or type(down.weights.array) is not kind:
            return False
        if type(other) is not type(activation) or vars(other) != vars(activation):
            return False
        made = up.weights.shape, down.weights.shape, up.bias is None, down.bias is None
        if made != (expected or made):
            return False
        expected = made
    return True


def _is_plain(layer: Any, kind: type) -> bool:
    """Return whether a layer computes what the class `kind` defines: neither a subclass's nor a hook's result."""
    return type(layer) is kind and "forward" not in vars(layer)


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

    With `shared_size`, the result of a further MLP is added.

    Args:
        config: of the model; each expert is an `MLPBlock` of this config, without dropout.
        routing: how experts are selected; by default by the fields of the config.
        shared_size: the width of the hidden layer of an MLP that processes every token; 0 for none.
        initialiser, generator: of the initial weights; the generator also draws dropout masks.

    Raises:
        ValueError: a routing to more experts than the config has, or by sigmoids with a load-balancing loss.
    """

    def __init__(
        self,
        config: ModelConfig,
        routing: Routing | None = None,
        shared_size: int = 0,
        *,
        initialiser: Initialiser = xavier,
        generator: Generator = None,
    ) -> None:
        self.routing = routing = routing or Routing(config.n_active_experts, config.normalize_experts)
        if not 0 < routing.n_active <= config.n_experts:
            rule = f"the number of active experts to be from 1 to n_experts {config.n_experts}"
            raise ValueError(f"MixtureOfExperts: expected {rule}, got {routing.n_active}")
        if routing.sigmoid and config.router_loss:
            raise ValueError(f"MixtureOfExperts: expected router_loss to be 0 with sigmoid, got {config.router_loss}")
        generator = new_generator(generator)
        fields: dict[str, Any] = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__}
        fields |= {"dropout": 0.0, "initialiser": initialiser, "generator": generator}
        self.embedding_dim, self.router_loss = config.embedding_dim, config.router_loss
        bias = config.router_bias
        self.router = Router(config.embedding_dim, config.n_experts, bias, initialiser, generator, role="router")
        self.correction = Parameter(np.zeros(config.n_experts, np.float32), "bias") if routing.sigmoid else None
        self.experts = [MLPBlock(**fields) for _ in range(config.n_experts)]
        self.shared = MLPBlock(**fields | {"hidden_size": shared_size}) if shared_size else None
        self.dropout = Dropout(config.dropout, generator)

    def forward(self, x: Operand) -> Tensor:
        """Apply each token's experts to x (..., C); return dropout of their weighted sum plus any shared MLP's result.

        If a graph is built, experts without tokens take part with no rows, so that their gradients are 0, not None.
        """
        x = as_tensor(x)
        shape = x.shape
        check_last_axis(f"MixtureOfExperts(embedding_dim={self.embedding_dim})", x, self.embedding_dim)
        n_rows = math.prod(shape[:-1])
        if n_rows == 1 and is_evaluating():
            y = Tensor(self._mix_one(as_floating(x.array).reshape(1, shape[-1])).reshape(shape), False)
        else:
            y = reshape(self._mix(reshape(x, n_rows, shape[-1])), shape)
        return self.dropout(y if self.shared is None else y + self.run_shared(self.shared, x))

    def run_shared(self, shared: MLPBlock, x: Tensor) -> Tensor:
        """Return the result of the MLP that processes every token."""
        return shared(x)

    def _mix(self, rows: Tensor) -> Tensor:
        """Return the weighted sum (N, C) of the results of the selected experts for rows (N, C)."""
        weights, selected = select_experts(self.router(rows), self.routing, self.correction)
        assignment = Assignment(selected, len(self.experts))
        builds_graph = all(mode.builds_graph for mode in current_modes.get())
        running = [(e, n) for e, n in zip(self.experts, assignment.counts) if n or builds_graph] or [
            (self.experts[0], 0)
        ]
        outputs = self._run_experts(gather_rows(rows, assignment), *zip(*running))
        return combine_rows(outputs, weights, assignment)

    def _run_experts(self, rows: Tensor, experts: Sequence[MLPBlock], counts: Sequence[int]) -> Tensor:
        """Apply each expert to the next of its `counts` rows (M, C); in float32, all experts by one op per layer."""
        if self.precision == "float32" and are_plain_mlps(experts, type(rows.array)):
            hidden = experts[0].activation(grouped_linear(rows, [expert.up for expert in experts], counts))
            return grouped_linear(hidden, [expert.projection for expert in experts], counts)
        return concatenate([expert(part) for expert, part in zip(experts, split_sizes(rows, counts, axis=0))])

    def _mix_one(self, row: Array) -> Array:
        """Return the same as `_mix` for one row (1, C) in evaluation: nothing is sorted, and few kernels are called."""
        router = self.router
        bias = None if router.bias is None else router.bias.array
        if _is_plain(router, Router) and type(router.weights.array) is type(row):
            logits = kernels.matmul(upcast(row), router.weights.array, bias)
        else:
            logits = router(Tensor(row, False)).array
        weights, _, selected = route(logits, self.routing, None if self.correction is None else self.correction.array)
        experts = [self.experts[e] for e in to_cpu(selected)[0].tolist()]
        if are_plain_mlps(experts, type(row)) and type(experts[0].activation) is SwiGLU:
            layers = [layer for expert in experts for layer in (expert.up, expert.projection)]
            if all(layer.bias is None for layer in layers):  # in evaluation, few rows are multiplied in float32
                return mix_swiglu_experts(row, weights, *(layer.weights.array for layer in layers))
        results = array_module(row).concatenate([expert(Tensor(row, False)).array for expert in experts])
        return (weights @ upcast(results)).astype(results.dtype, copy=False)

    def add_loss(self, compute_loss: Callable[[], Tensor], scale: Any) -> Tensor:
        """Return `compute_loss()`, in training plus `scale` times the weighted load-balancing loss of all mixtures."""
        if not self.training or not self.router_loss:
            return compute_loss()
        return add_router_loss(compute_loss, self.router_loss * scale)


MIXTURES["experts"] = MixtureOfExperts
