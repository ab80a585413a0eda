"""Optimisers: they change parameters in place, given their gradients.

How one parameter changes is a `Rule`; an `Optimiser` chooses the rule of each parameter, remembers its state and knows
the learning rate. A rule of one's own is a class with an `update`:

    class SignDescent(Rule):
        def update(self, weights, grad, state, step):
            weights -= step.learning_rate * array_module(grad).sign(grad)

    optimiser = Optimiser(1e-3, SignDescent())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tricycle import devices, kernels
from tricycle.autograd import increment_versions
from tricycle.devices import Array, array_module
from tricycle.distributed.shards import Load, Shards
from tricycle.kernels import muon
from tricycle.layers import Layer
from tricycle.tensor import Tensor

Schedule = Callable[[int], float]
Predicate = Callable[[Tensor], bool]
State = dict[str, Array]
Memory = dict[Tensor, tuple[int, State]]  # of each parameter how many updates it had, and its state

DECAYING = ("matrix", "embedding", "head")
FEW = 2**18  # weights of a model that has changed before another thread would be awake
LARGE = 2**22  # weights of a parameter that is worth all threads; smaller ones are one thread's work, several at once


def role_of(parameter: Tensor) -> str:
    """What a parameter says it is; where it says nothing, "matrix" with two axes or more, else "bias"."""
    return getattr(parameter, "role", None) or ("matrix" if parameter.ndim >= 2 else "bias")


def decays(parameter: Tensor) -> bool:
    """Whether weight decay shrinks a parameter: matrices, embeddings and heads; no positions, gains, biases, scales."""
    return role_of(parameter) in DECAYING


def is_hidden_matrix(parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: matrices between hidden layers."""
    return role_of(parameter) == "matrix" and parameter.ndim == 2


# -------------------------------------------------------------------- rules
class Step(NamedTuple):
    """What a rule needs to know of an update besides the parameter itself.

    Attributes:
        number: how many updates the parameter will have had, this one included; a number, or a 0-d array.
        learning_rate: of this update.
        weight_decay: weights shrink by `learning_rate * weight_decay`; 0 for a parameter that does not decay.
    """

    number: Any
    learning_rate: float
    weight_decay: float

    @property
    def kept(self) -> float:
        """What decay leaves of the weights: they are multiplied by it."""
        return 1 - self.learning_rate * self.weight_decay


class Rule:
    """How one parameter changes. A subclass defines `update`.

    Attributes:
        state_names: the arrays that it remembers of a parameter. They have its shape and begin as zeros.
        on_one_thread: an update keeps no more than one thread busy, however large the parameter is.
        at_once: an update changes nothing but weights and state, so that threads may make several at the same time.
    """

    state_names: tuple[str, ...] = ()
    on_one_thread = False
    at_once = False

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        """Change weights and state in place. The gradient stays as it is."""
        raise NotImplementedError(f"{type(self).__name__} defines no update")

    def work(self, shape: tuple[int, ...]) -> int:
        """What an update of a parameter costs, in any unit; 0 for a few operations a weight."""
        return 0

    def scaled_update(self, weights: Array, grad: Array, state: State, step: Step, factor: Any) -> None:
        """The update with `factor` times the gradient; where that is not above 0, nothing changes.

        Args:
            factor: a number, or a 0-d array on the device of the weights, which is not read.
        """
        if not _is_on_device(factor):
            if factor > 0:
                self.update(weights, grad * float(factor), state, step)
            return
        changed = (weights, *state.values())
        before = [array.copy() for array in changed]
        self.update(weights, grad * factor, state, step)
        for array, old in zip(changed, before):
            array[...] = array_module(array).where(factor > 0, array, old)


class GradientRule(Rule):
    """weights -= learning_rate * velocity, where velocity = momentum * velocity + gradient.

    Args:
        momentum: from 0 to below 1.
    """

    at_once = True

    def __init__(self, momentum: float = 0.0) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"StochasticGradientDescent: expected a momentum from 0 to below 1, got {momentum!r}")
        self.momentum = momentum
        self.state_names = ("velocity",) if momentum else ()

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        if step.weight_decay:
            weights *= step.kept
        if self.momentum:
            velocity = state["velocity"]
            velocity *= self.momentum
            velocity += grad
            grad = velocity
        weights -= step.learning_rate * grad


class AdamWRule(Rule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Args:
        betas: how much of the mean of gradients, and of their squares, each step keeps.
        eps: added to the root of the mean square.
    """

    state_names = ("first", "second")
    at_once = True

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.betas = _two_betas("AdamW", betas)
        if not eps > 0:
            raise ValueError(f"AdamW: expected an eps above 0, got {eps!r}")
        self.eps = eps

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        self.scaled_update(weights, grad, state, step, None)

    def scaled_update(self, weights: Array, grad: Array, state: State, step: Step, factor: Any) -> None:
        first, second = state["first"], state["second"]
        rate, decay = step.learning_rate, step.weight_decay
        kernels.adamw(weights, grad, first, second, step.number, rate, self.betas, self.eps, decay, factor)


class LionRule(Rule):
    """The sign of a mean of gradients (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2).

    Args:
        betas: how much of the mean counts in the sign, and how much of it a step keeps.
    """

    state_names = ("first",)
    at_once = True

    def __init__(self, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.betas = _two_betas("Lion", betas)

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        mean = state["first"]
        beta1, beta2 = self.betas
        direction = array_module(grad).sign(beta1 * mean + (1 - beta1) * grad)
        weights *= step.kept
        weights -= step.learning_rate * direction
        mean *= beta2
        mean += (1 - beta2) * grad


class MuonRule(Rule):
    """Momentum whose singular values are all brought to 1. For matrices.

    A matrix that is a whole number of times wider than tall, or taller than wide, is taken as so many square ones:
    the queries, keys and values of attention are.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; its weights of the iteration
    are those of `kernels.muon.POLAR`.

    Args:
        rate: the learning rate is multiplied by it.
        momentum: how much of the mean gradient a step keeps.
        precision: of the products by which singular values are brought there, in `precision.PRECISIONS`.
    """

    state_names = ("first",)
    on_one_thread = True
    at_once = True

    def __init__(self, rate: float = 5.0, momentum: float = 0.95, precision: str = "float32") -> None:
        if not 0 <= rate < math.inf or not 0 <= momentum < 1:
            got = f"{rate!r} and {momentum!r}"
            raise ValueError(f"Muon: expected a matrix_rate of 0 or more and a momentum from 0 to below 1, got {got}")
        self.rate = rate
        self.momentum = momentum
        self.precision = precision

    def work(self, shape: tuple[int, ...]) -> int:
        """Products of square parts, or of a matrix with itself: so many operations, but for a factor."""
        return math.prod(shape) * min(shape)

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        mean = state["first"]
        mean *= self.momentum
        mean += (1 - self.momentum) * grad
        ahead = (1 - self.momentum) * grad + self.momentum * mean  # as Nesterov does
        ahead = array_module(ahead).ascontiguousarray(ahead)  # so that its blocks are views
        if step.weight_decay:
            weights *= step.kept
        blocks = _blocks(ahead)
        blocks[...] = muon.orthogonalise(blocks, self.precision)
        n_rows, n_columns = weights.shape
        ahead *= step.learning_rate * self.rate * math.sqrt(max(1, n_columns / n_rows) / len(blocks))
        weights -= ahead


def _two_betas(title: str, betas: Any) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{title}: expected two betas from 0 to below 1, got {betas!r}")
    return betas[0], betas[1]


def _blocks(matrix: Array) -> Array:
    """(N, R, C): the square parts of a matrix, a view; the matrix itself if it has none."""
    n_rows, n_columns = matrix.shape
    if n_columns % n_rows == 0:
        return matrix.reshape(n_rows, -1, n_rows).swapaxes(0, 1)
    if n_rows % n_columns == 0:
        return matrix.reshape(-1, n_columns, n_columns)
    return matrix[None]


# -------------------------------------------------------------------- optimisers
def anything(parameter: Tensor) -> bool:
    """The predicate of a group that takes every parameter."""
    return True


class Optimiser:
    """Chooses the rule of each parameter, and holds what rules remember: their state, such as moments.

    Args:
        learning_rate: a number, or a schedule: a function from the number of the step (1, 2, ...) to a number.
        rules: a rule, or groups: pairs of a predicate on parameters and a rule. The first group that takes a parameter
            has it.
        weight_decay: each step multiplies the weights that decay by 1 - learning_rate * weight_decay.
        decays: a predicate that says which parameters decay.

    Raises:
        TypeError: something else for rules.
        ValueError: a rate or a decay that is negative or not finite.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        rules: Rule | Sequence[tuple[Predicate, Rule]],
        weight_decay: float = 0.0,
        decays: Predicate = decays,
    ) -> None:
        kind = type(self).__name__
        if not callable(learning_rate) and not 0 <= learning_rate < math.inf:
            raise ValueError(f"{kind}: expected a learning_rate of 0 or more, got {learning_rate!r}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"{kind}: expected a weight_decay of 0 or more, got {weight_decay!r}")
        self.groups = [(anything, rules)] if isinstance(rules, Rule) else _checked_groups(kind, rules)
        self.schedule = learning_rate if callable(learning_rate) else None
        self.learning_rate = learning_rate(1) if callable(learning_rate) else learning_rate
        self.weight_decay = weight_decay
        self.decays = decays
        self.n_steps = 0
        self._step_is_open = False
        # how many updates each parameter had, and its state (a Tensor is a key by identity)
        self._memory: Memory = {}
        self.shards: Shards | None = None  # where several processes share the state out

    def step(self) -> None:
        """Open a step: count it and set the learning rate of the schedule. `update` opens one if none is open."""
        self.n_steps += 1
        self._step_is_open = True
        if self.schedule is not None:
            self.learning_rate = self.schedule(self.n_steps)

    def update(
        self, named_parameters: Iterable[tuple[str, Tensor]], factor: Array | float | None = None, n_skipped: Any = 0
    ) -> None:
        """Change every parameter that has a gradient. Called by `Layer.update`.

        Args:
            factor: all gradients are multiplied by it, a number or a 0-d array; where it is not above 0, nothing
                changes. One on a device is not read: so an update can depend on what the device found without a wait.
            n_skipped: how many updates were left out so far because a factor on a device was not above 0, which nobody
                here knows; a number, or a 0-d array.

        Raises:
            ValueError: no group takes a parameter.
        """
        if not self._step_is_open:
            self.step()
        if factor is not None and not _is_on_device(factor):
            factor = float(factor)
        if not isinstance(factor, float) or factor > 0:
            chosen = [(name, p) for name, p in named_parameters if p.grad is not None and p.requires_grad]
            own = chosen if self.shards is None else [(name, p) for name, p in chosen if self.owns(p)]
            rules = [self.rule_of(parameter, name) for name, parameter in own]
            few = _are_few([parameter.array for _, parameter in own])
            together = []
            for (_, parameter), rule in zip(own, rules):
                update, arguments = self._update_of(parameter, rule, factor, n_skipped)
                if few or not rule.at_once or (parameter.size >= LARGE and not rule.on_one_thread):
                    update(*arguments)
                else:
                    together.append((parameter.array, partial(update, *arguments)))
            _make_together(together)
            if self.shards is not None:
                self._take_over([p for _, p in chosen], self.shards)
            increment_versions(parameter for _, parameter in chosen)
        self._step_is_open = False

    def owns(self, parameter: Tensor) -> bool:
        """Whether the state of a parameter is kept here."""
        return self.shards is None or self.shards.is_own(parameter)

    def load_of(self, parameter: Tensor) -> Load:
        """What a parameter asks of the process that owns its state."""
        rule = self.rule_of(parameter)
        return Load(rule.work(parameter.shape), len(rule.state_names) * parameter.size)

    def _take_over(self, parameters: list[Tensor], shards: Shards) -> None:
        """The weights that other processes have updated, which are counted here too."""
        for parameter in parameters:
            if not shards.is_own(parameter):
                self._memory[parameter] = self._memory.get(parameter, (0, {}))[0] + 1, {}
        shards.spread([parameter.array for parameter in parameters], [shards.owner_of[p] for p in parameters])

    def whole_memory(self, model: Layer) -> Memory | None:
        """What is remembered of all parameters of a model, where processes share it out: all call this, and rank 0
        gets it. None where nothing is shared out.
        """
        if self.shards is None:
            return None
        memory: Memory = {}
        for parameter in model.parameters():
            n_updates, state = (
                self._memory.get(parameter, (0, {})) if not self.owns(parameter) else self.memory_of(parameter)
            )
            if not state:
                names = self.rule_of(parameter).state_names
                state = {name: parameter.xp.zeros_like(parameter.array) for name in names}
            self.shards.spread(list(state.values()), [self.shards.owner_of[parameter]] * len(state))
            if self.shards.processes.is_first:
                memory[parameter] = n_updates, state
        return memory

    @property
    def n_bytes(self) -> int:
        """How much memory the state takes here."""
        return sum(array.nbytes for _, state in self._memory.values() for array in state.values())

    def rule_of(self, parameter: Tensor, name: str = "a parameter") -> Rule:
        """The rule of the first group that takes a parameter.

        Raises:
            ValueError: none does.
        """
        for takes, rule in self.groups:
            if takes(parameter):
                return rule
        what = f"{name}, a {role_of(parameter)} of shape {parameter.shape}"
        raise ValueError(f"{type(self).__name__}: expected a group that takes {what}, got none")

    def _update_of(
        self, parameter: Tensor, rule: Rule, factor: Any, n_skipped: Any
    ) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The function that updates a parameter, and its arguments. The update is counted."""
        n_updates, state = self.memory_of(parameter, rule)
        self._memory[parameter] = n_updates + 1, state
        decay = self.weight_decay if self.weight_decay and self.decays(parameter) else 0.0
        step = Step(n_updates + 1 - n_skipped, self.learning_rate, decay)
        grad: Any = parameter.grad
        arguments = parameter.array, grad.array, state, step
        if factor is None or (isinstance(factor, float) and factor == 1):
            return rule.update, arguments
        return rule.scaled_update, (*arguments, factor)

    def memory_of(self, parameter: Tensor, rule: Rule | None = None) -> tuple[int, State]:
        """How many updates a parameter had, and its state; fresh arrays where there are none.

        Arrays follow a parameter that has moved to another device.

        Args:
            rule: that of the parameter, where it is known.
        """
        n_updates, state = self._memory.get(parameter, (0, {}))
        for name in (rule or self.rule_of(parameter)).state_names:
            held = state.get(name)
            if held is None:
                state[name] = parameter.xp.zeros_like(parameter.array)
            elif not _together(held, parameter.array):
                state[name] = _moved(held, parameter.array)
        return n_updates, state

    def remember(self, parameter: Tensor, n_updates: int, state: State) -> None:
        """Set what is remembered of a parameter, as a checkpoint does. What its rule has no use for is left out.

        Raises:
            ValueError: an array is missing or has another shape.
        """
        needed = {}
        for name in self.rule_of(parameter).state_names:
            if name not in state or state[name].shape != parameter.shape:
                got = state[name].shape if name in state else "none"
                kind = type(self).__name__
                raise ValueError(f"{kind}: expected {name} moments of shape {parameter.shape}, got {got}")
            needed[name] = state[name]
        self._memory[parameter] = n_updates, needed if self.owns(parameter) else {}


def _checked_groups(kind: str, groups: Any) -> list[tuple[Predicate, Rule]]:
    """
    Raises:
        TypeError: something that is no list of pairs of a predicate and a rule.
    """
    wanted = f"{kind}: expected a Rule, or pairs of a predicate and a Rule"
    if not isinstance(groups, (list, tuple)) or not groups:
        raise TypeError(f"{wanted}, got {groups!r}")
    for pair in groups:
        if not isinstance(pair, tuple) or len(pair) != 2 or not callable(pair[0]) or not isinstance(pair[1], Rule):
            raise TypeError(f"{wanted}, got {pair!r} among them")
    return list(groups)


def _is_on_device(value: Any) -> bool:
    return devices.is_array(value) and devices.on_gpu(value)


def _together(a: Array, b: Array) -> bool:
    """Whether two arrays lie in the memory of one device."""
    if type(a) is not type(b):
        return False
    return not devices.on_gpu(a) or a.device.id == b.device.id


def _moved(array: Array, like: Array) -> Array:
    """An array where another one lies."""
    host = devices.to_cpu(array)
    return devices.to_gpu(host, like.device.id) if devices.on_gpu(like) else host


def _are_few(arrays: Sequence[Array]) -> bool:
    return sum(array.size for array in arrays) < FEW


def _make_together(calls: Sequence[tuple[Array, Callable[[], None]]]) -> None:
    """A call for each of some arrays: large ones first, each by the first thread that is free."""
    if calls:
        calls = sorted(calls, key=lambda pair: -pair[0].size)
        kernels.each(calls[0][0], [call for _, call in calls])


class StochasticGradientDescent(Optimiser):
    """`GradientRule` for every parameter."""

    def __init__(
        self,
        learning_rate: float | Schedule,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decays: Predicate = decays,
    ) -> None:
        super().__init__(learning_rate, GradientRule(momentum), weight_decay, decays)


class AdamW(Optimiser):
    """`AdamWRule` for every parameter."""

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decays: Predicate = decays,
    ) -> None:
        super().__init__(learning_rate, AdamWRule(betas, eps), weight_decay, decays)


class Lion(Optimiser):
    """`LionRule` for every parameter. Its rates are a third to a tenth of AdamW's, and its decays so much larger."""

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        decays: Predicate = decays,
    ) -> None:
        super().__init__(learning_rate, LionRule(betas), weight_decay, decays)


class Muon(Optimiser):
    """`MuonRule` for matrices between hidden layers, `AdamWRule` for the rest.

    Args:
        learning_rate, betas, eps, weight_decay: of AdamW.
        matrix_rate: the learning rate of the matrices, as a multiple of `learning_rate`.
        momentum: how much of the mean gradient a step keeps, of the matrices.
        takes: a predicate that says which parameters are such matrices.
        precision: of the products by which matrices are brought there, in `precision.PRECISIONS`.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decays: Predicate = decays,
        matrix_rate: float = 5.0,
        momentum: float = 0.95,
        takes: Predicate = is_hidden_matrix,
        precision: str = "float32",
    ) -> None:
        matrices = takes, MuonRule(matrix_rate, momentum, precision)
        others = anything, AdamWRule(betas, eps)
        super().__init__(learning_rate, [matrices, others], weight_decay, decays)


# -------------------------------------------------------------------- clipping
def gradient_norm(model: Layer) -> Any:
    """The root of the sum of squares of all gradients; infinite where squares leave the range of their dtype.

    Returns:
        a number; for gradients on a GPU a 0-d array there, for to read it would wait for all that made it.
    """
    grads: list[Array] = [p.grad.array for p in model.parameters() if p.grad is not None]
    squares = _squares(grads)
    if not squares or not devices.on_gpu(squares[0]):
        return math.sqrt(sum(square.item() for square in squares))
    xp = array_module(squares[0])
    return xp.sqrt(xp.stack(squares).sum())


def _squares(grads: list[Array]) -> list[Array]:
    """The sum of squares of each."""
    if _are_few(grads):
        return [kernels.sum_squares(grad) for grad in grads]
    squares: dict[int, Array] = {}

    def square(i: int) -> None:
        squares[i] = kernels.sum_squares(grads[i])

    together = []
    for i, grad in enumerate(grads):
        if grad.size >= LARGE:
            square(i)
        else:
            together.append((grad, partial(square, i)))
    _make_together(together)
    return [squares[i] for i in range(len(grads))]


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
