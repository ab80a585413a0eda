"""Optimizers: a `Rule` updates one parameter in place; an `Optimiser` selects the rule of each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, Union

from tricycle import devices, kernels
from tricycle.autograd import increment_versions
from tricycle.devices import Array, array_module
from tricycle.layers import Layer
from tricycle.tensor import Tensor

Rate = float | Callable[[int], float]  # a number, or a schedule: a function of the step number (1, 2, ...)
Filter = Callable[[Tensor], bool]
State = dict[str, Array]
Rules = Union["Rule", Sequence[tuple[Filter, "Rule"]]]


def role_of(parameter: Tensor) -> str:
    """Return the role of a parameter; by default "matrix" for two axes or more, "bias" for fewer."""
    return getattr(parameter, "role", None) or ("matrix" if parameter.ndim >= 2 else "bias")


def decays(parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, embeddings, heads and routers, not to others."""
    return role_of(parameter) in ("matrix", "embedding", "head", "router")


class Step(NamedTuple):
    """The step number, learning rate and weight decay of one update of a parameter."""

    number: Any  # of updates of this parameter, including this one: an int or a 0-d array
    learning_rate: float
    weight_decay: float  # 0 for a parameter without weight decay

    @property
    def decay_factor(self) -> float:
        """The factor of the weights by decoupled weight decay: 1 - learning_rate * weight_decay."""
        return 1 - self.learning_rate * self.weight_decay


class Rule:
    """The update rule of one parameter; subclasses define `update`."""

    state_names: tuple[str, ...] = ()  # names of its state arrays, which are initialized to zeros
    is_parallelizable = False  # whether updates may run in several threads: they change only weights and state
    is_single_threaded = False  # whether an update uses one thread, however large the parameter is

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state array by name for a parameter of this shape; by default the same."""
        return dict.fromkeys(self.state_names, shape)

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        """Update weights and state in place, not the gradient; NotImplementedError unless a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} defines no update")

    def scaled_update(self, weights: Array, grad: Array, state: State, step: Step, factor: Any) -> None:
        """Update with `factor` times the gradient; change nothing if the factor, a 0-d array, is 0 or less."""
        changed = () if isinstance(factor, float) else (weights, *state.values())
        before = [(array, array.copy()) for array in changed]
        self.update(weights, grad * factor, state, step)
        for array, old in before:
            array[...] = array_module(array).where(factor > 0, array, old)


class SGDRule(Rule):
    """SGD: weights -= learning_rate * velocity, where velocity = momentum * velocity + gradient."""

    is_parallelizable = True

    def __init__(self, momentum: float = 0.0) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"StochasticGradientDescent: expected a momentum from 0 to below 1, got {momentum!r}")
        self.momentum, self.state_names = momentum, ("velocity",) if momentum else ()

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        """Make one SGD update in place: v = momentum * v + grad; w -= learning_rate * v; with decoupled decay."""
        if step.weight_decay:
            weights *= step.decay_factor
        if self.momentum:
            state["velocity"] *= self.momentum
            state["velocity"] += grad
            grad = state["velocity"]
        weights -= step.learning_rate * grad


class AdamWRule(Rule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    state_names = ("first", "second")
    is_parallelizable = True

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW: expected two betas from 0 to below 1, got {betas!r}")
        if not eps > 0:
            raise ValueError(f"AdamW: expected an eps above 0, got {eps!r}")
        self.betas, self.eps = (betas[0], betas[1]), eps

    def update(self, weights: Array, grad: Array, state: State, step: Step, factor: Any = None) -> None:
        """Make one AdamW update in place, with `factor` (None for 1) times the gradient; none if it is <= 0."""
        number, rate, decay = step
        kernels.adamw(weights, grad, state["first"], state["second"], number, rate, self.betas, self.eps, decay, factor)

    scaled_update = update


class Optimiser:
    """An optimizer: updates each parameter by the first rule whose predicate accepts it, and stores the state."""

    def __init__(self, learning_rate: Rate, rules: Rules, weight_decay: float = 0.0, decays: Filter = decays) -> None:
        title = type(self).__name__
        is_number = isinstance(learning_rate, Real) and 0 <= learning_rate < math.inf
        if isinstance(learning_rate, Layer) or not (is_number or callable(learning_rate)):
            got = repr(learning_rate).partition("\n")[0]
            raise ValueError(f"{title}: expected a learning_rate of 0 or more, or a schedule, got {got}")
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"{title}: expected a weight_decay of 0 or more, got {weight_decay!r}")
        pairs = rules if isinstance(rules, (list, tuple)) else ()
        valid = [isinstance(p, tuple) and len(p) == 2 and callable(p[0]) and isinstance(p[1], Rule) for p in pairs]
        if not isinstance(rules, Rule) and not (valid and all(valid)):
            raise TypeError(f"{title}: expected a Rule, or pairs of a predicate and a Rule, got {rules!r}")
        self.rules = rules if isinstance(rules, Rule) else tuple(rules)
        self.weight_decay, self.decays = weight_decay, decays
        self.schedule = learning_rate if callable(learning_rate) else None
        self.learning_rate = learning_rate(1) if callable(learning_rate) else learning_rate
        self.n_steps, self._step_is_open = 0, False
        self.n_replayed: Any = 0  # updates that are not in `states`, an input on the device while an update is recorded
        self.states: dict[Tensor, tuple[int, State]] = {}  # number of updates and state arrays of each parameter

    def step(self) -> None:
        """Begin a step: count it, and set the learning rate from the schedule. `update` calls it if needed."""
        self.n_steps += 1
        self._step_is_open = True
        if self.schedule is not None:
            self.learning_rate = self.schedule(self.n_steps)

    def update(self, named_parameters: Iterable[tuple[str, Tensor]], factor: Any = None, n_skipped: Any = 0) -> None:
        """Update trainable parameters in place, each by its rule with `factor` times its gradient; no change if <= 0.

        A 0-d factor on a GPU is not read; `n_skipped` is the number of earlier updates that it disabled.
        """
        if not self._step_is_open:
            self.step()
        if factor is not None and not (devices.is_array(factor) and devices.on_gpu(factor)):
            factor = None if factor == 1 else float(factor)
        changes = not isinstance(factor, float) or factor > 0
        chosen = [(name, p) for name, p in named_parameters if changes and p.grad is not None and p.requires_grad]
        counts = {self.states.get(p, (0, {}))[0] for _, p in chosen}
        jobs, numbers = [], {n: n + 1 + self.n_replayed - n_skipped for n in counts}  # on a GPU, each is computed once
        for p, rule in [(p, self.rule_of(p, name)) for name, p in chosen]:
            n_updates, state = self.state_of(p, rule)
            self.states[p] = n_updates + 1, state
            decay = self.weight_decay if self.weight_decay and self.decays(p) else 0.0
            step = Step(numbers[n_updates], self.learning_rate, decay)
            update: Any = rule.update if factor is None else partial(rule.scaled_update, factor=factor)
            call = partial(update, p.array, kernels.upcast(p.grad.array), state, step)  # type: ignore[union-attr]
            jobs.append((call, p.size, rule.is_parallelizable, rule.is_single_threaded))
        if jobs:
            kernels.run_independent(p.array, jobs)
        increment_versions(p for _, p in chosen)
        self._step_is_open = False

    def rule_of(self, parameter: Tensor, name: str = "a parameter") -> Rule:
        """Return a parameter's rule: the only one, or the first whose predicate accepts it; else raise ValueError."""
        if isinstance(self.rules, Rule):
            return self.rules
        for accepts, rule in self.rules:
            if accepts(parameter):
                return rule
        what = f"{name}, a {role_of(parameter)} of shape {parameter.shape}"
        raise ValueError(f"{type(self).__name__}: expected a rule that accepts {what}, got none")

    def state_of(self, parameter: Tensor, rule: Rule | None = None) -> tuple[int, State]:
        """Return a parameter's (update count, state) on its device, a stored state completed; (0, zeros) if new."""
        n_updates, state = self.states.get(parameter, (0, {}))
        for name, shape in (rule or self.rule_of(parameter)).state_shapes(parameter.shape).items():
            if name not in state:
                state[name] = parameter.xp.zeros_like(kernels.upcast(parameter.array), shape=shape)
            elif state[name].device != parameter.array.device:
                host = devices.to_cpu(state[name])
                state[name] = devices.to_gpu(host, parameter.array.device.id) if parameter.on_gpu else host
        return n_updates, state

    def set_state(self, parameter: Tensor, n_updates: int, state: State) -> None:
        """Set a parameter's update count and state arrays by name, uncopied; ValueError if missing or misshapen."""
        shapes = self.rule_of(parameter).state_shapes(parameter.shape)
        for name, shape in shapes.items():
            if (got := state[name].shape if name in state else "none") != shape:
                raise ValueError(f"{type(self).__name__}: expected optimizer state {name} of shape {shape}, got {got}")
        self.states[parameter] = n_updates, {name: state[name] for name in shapes}


class StochasticGradientDescent(Optimiser):
    """Stochastic gradient descent with optional momentum and weight decay."""

    def __init__(
        self, learning_rate: Rate, momentum: float = 0.0, weight_decay: float = 0.0, decays: Filter = decays
    ) -> None:
        super().__init__(learning_rate, SGDRule(momentum), weight_decay, decays)


class AdamW(Optimiser):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decays: Filter = decays,
    ) -> None:
        super().__init__(learning_rate, AdamWRule(betas, eps), weight_decay, decays)


def gradient_norm(model: Layer) -> Any:
    """Return the global L2 norm of all gradients: a float, or for a model on a GPU a 0-d array, not synchronized."""
    grads = [p.grad.array for p in model.parameters() if p.grad is not None]
    jobs = [(partial(kernels.sum_squares, grad), grad.size, True, False) for grad in grads]
    squares = kernels.run_independent(grads[0], jobs) if grads else []
    if not grads or not devices.on_gpu(grads[0]):
        return math.sqrt(sum(square.item() for square in squares))
    return array_module(squares[0]).sqrt(sum(squares))


def clip_gradients(model: Layer, max_norm: float) -> Any:
    """Scale gradients in place to a global L2 norm <= `max_norm`, unless infinite or NaN; return the norm before."""
    if not max_norm > 0:
        raise ValueError(f"clip_gradients: expected a max_norm above 0, got {max_norm!r}")
    norm: Any = gradient_norm(model)
    is_long = (max_norm < norm) & (norm < math.inf)
    if isinstance(norm, float) and not is_long:
        return norm
    factor = max_norm / norm if isinstance(norm, float) else array_module(norm).where(is_long, max_norm / norm, 1)
    for grad in [p.grad for p in model.parameters() if p.grad is not None]:
        grad.array *= factor
    return norm
