"""The Muon optimizer: orthogonalized momentum for hidden matrices, AdamW for all other parameters."""

from __future__ import annotations

import math

from tricycle.devices import Array, array_module
from tricycle.kernels import muon
from tricycle.optimisers import AdamWRule, Filter, Optimiser, Rate, Rule, State, Step, decays, role_of
from tricycle.tensor import Tensor


def is_hidden_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter has the role "matrix" and two axes, so is no embedding, head or router."""
    return role_of(parameter) == "matrix" and parameter.ndim == 2


def any_parameter(parameter: Tensor) -> bool:
    """Return True: the filter of an optimizer's last rule, which applies to all remaining parameters."""
    return True


class MuonRule(Rule):
    """The Muon update rule for matrices: Nesterov momentum whose singular values are all set to about 1.

    A matrix whose width is a multiple of its height, or the reverse, is split into square blocks, such as the joint
    projection of queries, keys and values.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the coefficients of the
    iteration are those of `kernels.muon.POLAR`.

    Args:
        rate: a factor of the learning rate.
        momentum: the decay of the moving average of gradients.
        precision: of the matrix products of the iteration, in `precision.PRECISIONS`.
    """

    state_names = ("first",)
    is_parallelizable = True
    is_single_threaded = True

    def __init__(self, rate: float = 5.0, momentum: float = 0.95, precision: str = "float32") -> None:
        if not 0 <= rate < math.inf or not 0 <= momentum < 1:
            got = f"{rate!r} and {momentum!r}"
            raise ValueError(f"Muon: expected a matrix_rate of 0 or more and a momentum from 0 to below 1, got {got}")
        self.rate = rate
        self.momentum = momentum
        self.precision = precision

    def n_operations(self, shape: tuple[int, ...]) -> int:
        """Return the number of operations of an update, up to a factor, to balance shards of the optimizer state."""
        return math.prod(shape) * min(shape)

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        """Update weights and state in place by Muon: Nesterov momentum, orthogonalized in blocks, and weight decay."""
        mean = state["first"]
        mean *= self.momentum
        mean += (1 - self.momentum) * grad
        ahead = (1 - self.momentum) * grad + self.momentum * mean  # Nesterov momentum
        ahead = array_module(ahead).ascontiguousarray(ahead)  # makes its blocks views
        if step.weight_decay:
            weights *= step.decay_factor
        blocks = _square_blocks(ahead)
        blocks[...] = muon.orthogonalize(blocks, self.precision)
        n_rows, n_columns = weights.shape
        ahead *= step.learning_rate * self.rate * math.sqrt(max(1, n_columns / n_rows) / len(blocks))
        weights -= ahead


def _square_blocks(matrix: Array) -> Array:
    """Return a view of the square blocks of a matrix, (N, R, R); or (1, R, C) if it cannot be split."""
    n_rows, n_columns = matrix.shape
    if n_columns % n_rows == 0:
        return matrix.reshape(n_rows, -1, n_rows).swapaxes(0, 1)
    if n_rows % n_columns == 0:
        return matrix.reshape(-1, n_columns, n_columns)
    return matrix[None]


class Muon(Optimiser):
    """The Muon optimizer for hidden matrices, with AdamW for all other parameters.

    Args:
        learning_rate, betas, eps: of AdamW.
        matrix_rate: the learning rate of Muon, as a multiple of `learning_rate`.
        momentum: of Muon, the decay of the moving average of gradients.
        uses_muon: a filter that selects the parameters that Muon updates.
        precision: of Muon's matrix products, in `precision.PRECISIONS`.
    """

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decays: Filter = decays,
        matrix_rate: float = 5.0,
        momentum: float = 0.95,
        uses_muon: Filter = is_hidden_matrix,
        precision: str = "float32",
    ) -> None:
        matrices = uses_muon, MuonRule(matrix_rate, momentum, precision)
        others = any_parameter, AdamWRule(betas, eps)
        super().__init__(learning_rate, [matrices, others], weight_decay, decays)
