"""Optimisers: they change parameters in place, given their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

from tricycle import backend, kernels
from tricycle.backend import Array, array_module
from tricycle.layers import Layer
from tricycle.tensor import Tensor

Schedule = Callable[[int], float]
Rule = Callable[[str, Tensor], bool]
Update = Callable[..., None]  # takes weights, gradient, moments, number of updates, decay and perhaps a factor


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay shrinks a parameter: matrices yes; gains, biases, scales, embeddings of position no."""
    return parameter.ndim >= 2 and "position" not in name and "scales" not in name


class Optimiser:
    """Holds what it remembers of each parameter, such as moments.

    Args:
        learning_rate: a number, or a schedule: a function from the number of the step (1, 2, ...) to a number.
        weight_decay: each step multiplies the weights that decay by 1 - learning_rate * weight_decay.
        decays: the rule that says which, from name and parameter.
    """

    moments: tuple[str, ...] = ()

    def __init__(
        self, learning_rate: float | Schedule, weight_decay: float = 0.0, decays: Rule = decays,
    ) -> None:
        kind = type(self).__name__
        if not callable(learning_rate) and not 0 <= learning_rate < math.inf:
            raise ValueError(f"{kind}: expected a learning_rate of 0 or more, got {learning_rate!r}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"{kind}: expected a weight_decay of 0 or more, got {weight_decay!r}")
        self.schedule = learning_rate if callable(learning_rate) else None
        self.learning_rate = learning_rate(1) if callable(learning_rate) else learning_rate
        self.weight_decay = weight_decay
        self.decays = decays
        self.n_steps = 0
        self._step_is_open = False
        # how many updates each parameter had, and its moments (a Tensor is a key by identity)
        self._memory: dict[Tensor, tuple[int, dict[str, Array]]] = {}

    def step(self) -> None:
        """Open a step: count it and set the learning rate of the schedule. `update` opens one if none is open."""
        self.n_steps += 1
        self._step_is_open = True
        if self.schedule is not None:
            self.learning_rate = self.schedule(self.n_steps)

    def update(
        self, named_parameters: Iterable[tuple[str, Tensor]], factor: Array | None = None, n_skipped: Any = 0
    ) -> None:
        """Change every parameter that has a gradient. Called by `Layer.update`.

        Args:
            factor: all gradients are multiplied by it, a 0-d array on their device; where it is not above 0, nothing
                changes. So an update can depend on what the device found without a wait for it.
            n_skipped: how many updates have changed nothing so far; a number, or a 0-d array.
        """
        if not self._step_is_open:
            self.step()
        calls: list[partial] = []
        for name, parameter in named_parameters:
            if parameter.grad is not None and parameter.requires_grad:
                n_updates, moments = self.memory_of(parameter)
                self._memory[parameter] = n_updates + 1, moments
                decay = self.weight_decay if self.decays(name, parameter) else 0.0
                given = parameter.array, parameter.grad.array, moments, n_updates + 1 - n_skipped, decay
                calls.append(partial(self._way(name, parameter), *given, *([] if factor is None else [factor])))
        self._make(calls)
        self._step_is_open = False

    def memory_of(self, parameter: Tensor) -> tuple[int, dict[str, Array]]:
        """How many updates a parameter had, and its moments; fresh ones where there are none or it has moved."""
        n_updates, moments = self._memory.get(parameter, (0, {}))
        for name in self.moments:
            if type(moments.get(name)) is not type(parameter.array):
                held = moments.get(name)
                zeros = parameter.xp.zeros_like(parameter.array)
                moments[name] = zeros if held is None else parameter.xp.asarray(backend.to_cpu(held))
        return n_updates, moments

    def remember(self, parameter: Tensor, n_updates: int, moments: dict[str, Array]) -> None:
        """Set what is remembered of a parameter, as a checkpoint does."""
        for name in self.moments:
            if name not in moments or moments[name].shape != parameter.shape:
                got = moments[name].shape if name in moments else "none"
                kind = type(self).__name__
                raise ValueError(f"{kind}: expected {name} moments of shape {parameter.shape}, got {got}")
        self._memory[parameter] = n_updates, moments

    def _way(self, name: str, parameter: Tensor) -> Update:
        """How a parameter is updated, where not all are alike."""
        return self._update_one

    def _make(self, calls: list[partial]) -> None:
        """Make all updates of a step."""
        for call in calls:
            call()

    def _update_one(self, weights: Array, grad: Array, moments: dict[str, Array], n_updates: int, decay: float) -> None:
        raise NotImplementedError(f"{type(self).__name__} defines no update")


def _guarded(update: Update) -> Update:
    """An update that knows nothing of a factor, as one that takes it as its last argument."""

    @wraps(update)
    def run(self: Optimiser, weights: Array, grad: Array, moments: dict[str, Array], n_updates: Any, decay: float,
            factor: Any = None) -> None:  # fmt: skip
        changed = (weights, *moments.values())
        before = [array.copy() for array in changed if factor is not None]
        update(self, weights, grad if factor is None else grad * factor, moments, n_updates, decay)
        for array, old in zip(changed, before):
            array[...] = array_module(array).where(factor > 0, array, old)

    return run


class StochasticGradientDescent(Optimiser):
    """weights -= learning_rate * velocity, where velocity = momentum * velocity + gradient."""

    def __init__(
        self, learning_rate: float | Schedule, momentum: float = 0.0, weight_decay: float = 0.0,
        decays: Rule = decays,
    ) -> None:
        super().__init__(learning_rate, weight_decay, decays)
        if not 0 <= momentum < 1:
            raise ValueError(f"StochasticGradientDescent: expected a momentum from 0 to below 1, got {momentum!r}")
        self.momentum = momentum
        self.moments = ("velocity",) if momentum else ()

    @_guarded
    def _update_one(self, weights: Array, grad: Array, moments: dict[str, Array], n_updates: int, decay: float) -> None:
        if decay:
            weights *= 1 - self.learning_rate * decay
        if self.momentum:
            velocity = moments["velocity"]
            velocity *= self.momentum
            velocity += grad
            grad = velocity
        weights -= self.learning_rate * grad


class AdamW(Optimiser):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Args:
        betas: how much of the mean of gradients, and of their squares, each step keeps.
        eps: added to the root of the mean square.
    """

    moments = ("first", "second")

    def __init__(
        self, learning_rate: float | Schedule = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, decays: Rule = decays,
    ) -> None:
        super().__init__(learning_rate, weight_decay, decays)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW: expected two betas from 0 to below 1, got {betas!r}")
        if not eps > 0:
            raise ValueError(f"AdamW: expected an eps above 0, got {eps!r}")
        self.betas, self.eps = (betas[0], betas[1]), eps

    def _update_one(
        self, weights: Array, grad: Array, moments: dict[str, Array], n_updates: int, decay: float, *factor: Array
    ) -> None:
        first, second = moments["first"], moments["second"]
        kernels.adamw(weights, grad, first, second, n_updates, self.learning_rate, self.betas, self.eps, decay, *factor)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: matrices between hidden layers; not embeddings, the output layer, or tables."""
    return parameter.ndim == 2 and not any(part in name for part in ("embedding", "head", "scales"))


class Muon(AdamW):
    """Momentum whose singular values are all brought to 1, for matrices between hidden layers; AdamW for the rest.

    A matrix that is a whole number of times wider than tall, or taller than wide, is taken as so many square ones:
    the queries, keys and values of attention are.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; its weights of the iteration
    are those of `kernels.reference.POLAR`.

    Args:
        learning_rate, betas, eps, weight_decay: of AdamW.
        matrix_rate: the learning rate of the matrices, as a multiple of `learning_rate`.
        momentum: how much of the mean gradient a step keeps, of the matrices.
        takes: the rule that says which parameters are matrices, from name and parameter.
        precision: of the products by which matrices are brought there, in `functions.PRECISIONS`.
    """

    def __init__(
        self, learning_rate: float | Schedule = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, decays: Rule = decays, matrix_rate: float = 5.0, momentum: float = 0.95,
        takes: Rule = is_hidden_matrix, precision: str = "float32",
    ) -> None:
        super().__init__(learning_rate, betas, eps, weight_decay, decays)
        if not 0 <= matrix_rate < math.inf or not 0 <= momentum < 1:
            got = f"{matrix_rate!r} and {momentum!r}"
            raise ValueError(f"Muon: expected a matrix_rate of 0 or more and a momentum from 0 to below 1, got {got}")
        self.matrix_rate, self.momentum, self.takes, self.precision = matrix_rate, momentum, takes, precision

    def _way(self, name: str, parameter: Tensor) -> Update:
        return self._update_matrix if self.takes(name, parameter) else self._update_one

    def _make(self, calls: list[partial]) -> None:
        matrices = [call for call in calls if call.func == self._update_matrix]
        super()._make([call for call in calls if call not in matrices])
        if matrices:
            matrices.sort(key=lambda call: -call.args[0].size)
            kernels.each(matrices[0].args[0], matrices)

    @_guarded
    def _update_matrix(
        self, weights: Array, grad: Array, moments: dict[str, Array], n_updates: int, decay: float
    ) -> None:
        rate, velocity = self.learning_rate * self.matrix_rate, moments["first"]  # the second moment stays 0
        velocity *= self.momentum
        velocity += (1 - self.momentum) * grad
        ahead = (1 - self.momentum) * grad + self.momentum * velocity  # as Nesterov does
        ahead = array_module(ahead).ascontiguousarray(ahead)  # so that its blocks are views
        if decay:
            weights *= 1 - self.learning_rate * decay
        blocks, (n_rows, n_columns) = _blocks(ahead), weights.shape
        blocks[...] = kernels.orthogonalise(blocks, self.precision)
        ahead *= rate * math.sqrt(max(1, n_columns / n_rows) / len(blocks))
        weights -= ahead


def _blocks(matrix: Array) -> Array:
    """(N, R, C): the square parts of a matrix, a view; the matrix itself if it has none."""
    n_rows, n_columns = matrix.shape
    if n_columns % n_rows == 0:
        return matrix.reshape(n_rows, -1, n_rows).swapaxes(0, 1)
    return matrix.reshape(-1, n_columns, n_columns) if n_rows % n_columns == 0 else matrix[None]


def gradient_norm(model: Layer) -> Any:
    """The root of the sum of squares of all gradients; infinite where squares leave the range of their dtype.

    Returns:
        a number; for gradients on a GPU a 0-d array there, for to read it would wait for all that made it.
    """
    grads: list[Array] = [p.grad.array for p in model.parameters() if p.grad is not None]
    squares = [kernels.sum_squares(grad) for grad in grads]
    if not squares or not backend.on_gpu(squares[0]):
        return math.sqrt(sum(square.item() for square in squares))
    xp = array_module(squares[0])
    return xp.sqrt(xp.stack(squares).sum())


def clip_gradients(model: Layer, max_norm: float) -> Any:
    """Scale all gradients, in place, so that their common norm is at most `max_norm`.

    Returns:
        the norm before, as `gradient_norm` gives it.

    Raises:
        ValueError: a `max_norm` that is not above 0.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_gradients: expected a max_norm above 0, got {max_norm!r}")
    norm: Any = gradient_norm(model)
    if isinstance(norm, float):
        factor = max_norm / norm if math.isfinite(norm) and norm > max_norm else None
    else:
        xp = array_module(norm)
        factor = xp.where(xp.isfinite(norm), xp.minimum(max_norm / norm, 1), 1)
    for parameter in model.parameters():
        if parameter.grad is not None and factor is not None:
            parameter.grad.array *= factor
    return norm
