"""Optimizer state sharded over processes: each parameter has one owner, which alone holds its state.

The owner makes the update and broadcasts the new weights; so the state, two thirds of what AdamW works on, exists once
and not once in every process (Rajbhandari et al. 2020, "ZeRO", stage 1). Parameters are not split, because some rules
need a whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tricycle import devices
from tricycle.autograd import increment_versions
from tricycle.devices import Array
from tricycle.distributed.processes import Processes
from tricycle.layers import Layer
from tricycle.optimisers import Optimiser, Rule, State
from tricycle.tensor import Tensor


class Load(NamedTuple):
    """What a parameter costs its owner.

    Attributes:
        work: of its update, in any unit; 0 where it takes no more than a few operations a weight.
        n_numbers: in its state.
    """

    work: int
    n_numbers: int


def load_of(optimiser: Optimiser, parameter: Tensor) -> Load:
    """Return the load of a parameter; a rule whose updates are costly has a method `work(shape)`."""
    rule = optimiser.rule_of(parameter)
    work: Callable[[tuple[int, ...]], int] | None = getattr(rule, "work", None)
    n_numbers = sum(map(math.prod, rule.state_shapes(parameter.shape).values()))
    return Load(work(parameter.shape) if work is not None else 0, n_numbers)


class Shards:
    """The owner of each parameter of a model.

    Parameters with costly updates are assigned first, in descending order of work, each to the process with the least
    work so far, because all processes wait for the slowest. Then the rest, the largest first, each to the process with
    the least state so far.

    Args:
        load_of: what a parameter costs its owner.

    Attributes:
        owner_of: the rank, by parameter.
    """

    def __init__(self, processes: Processes, model: Layer, load_of: Callable[[Tensor], Load]) -> None:
        self.processes = processes
        self.owner_of: dict[Tensor, int] = {}
        loads = {parameter: load_of(parameter) for parameter in model.parameters()}
        work, n_numbers = [0] * processes.size, [0] * processes.size
        for parameter, load in sorted(loads.items(), key=lambda item: item[1], reverse=True):
            least = zip(work, n_numbers) if load.work else zip(n_numbers, work)
            owner = min(enumerate(least), key=lambda item: item[1])[0]
            self.owner_of[parameter] = owner
            work[owner] += load.work
            n_numbers[owner] += load.n_numbers

    def is_own(self, parameter: Tensor) -> bool:
        """Return whether this process owns a parameter."""
        return self.owner_of[parameter] == self.processes.rank

    def broadcast(self, arrays: list[Array], owners: list[int]) -> None:
        """Give all processes the contents of the owners' arrays, in place."""
        pending = [self.processes.start_broadcast(array, owner) for array, owner in zip(arrays, owners)]
        for one in pending:
            one.wait()


class ShardedOptimiser(Optimiser):
    """An optimiser of which this process holds the state of the parameters that it owns.

    Args:
        optimiser: its rules, rates, decay and state are taken over.
    """

    def __init__(self, optimiser: Optimiser, shards: Shards) -> None:
        rate = optimiser.schedule or optimiser.learning_rate
        super().__init__(rate, optimiser.rules, optimiser.weight_decay, optimiser.decays)
        self.shards = shards
        self.n_steps, self.learning_rate = optimiser.n_steps, optimiser.learning_rate
        self.states = {p: (n, state if shards.is_own(p) else {}) for p, (n, state) in optimiser.states.items()}

    def update(self, named_parameters: Iterable[tuple[str, Tensor]], factor: Any = None, n_skipped: Any = 0) -> None:
        """Update the parameters that this process owns, and receive the weights that others have updated."""
        chosen = [(name, p) for name, p in named_parameters if p.grad is not None and p.requires_grad]
        super().update([(name, p) for name, p in chosen if self.shards.is_own(p)], factor, n_skipped)
        if factor is not None and not (devices.is_array(factor) and devices.on_gpu(factor)) and not factor > 0:
            return  # no process has changed anything
        parameters = [p for _, p in chosen]
        received = [p for p in parameters if not self.shards.is_own(p)]
        for parameter in received:
            self.states[parameter] = self.state_of(parameter)[0] + 1, {}
        self.shards.broadcast([p.array for p in parameters], [self.shards.owner_of[p] for p in parameters])
        increment_versions(received)

    def state_of(self, parameter: Tensor, rule: Rule | None = None) -> tuple[int, State]:
        """Return the number of updates and the state of a parameter; no arrays for one that another process owns."""
        if self.shards.is_own(parameter):
            return super().state_of(parameter, rule)
        return self.states.get(parameter, (0, {}))

    def set_state(self, parameter: Tensor, n_updates: int, state: State) -> None:
        super().set_state(parameter, n_updates, state)
        if not self.shards.is_own(parameter):
            self.states[parameter] = n_updates, {}


def gather_state(optimiser: Optimiser, model: Layer) -> dict[Tensor, tuple[int, State]] | None:
    """Collect a sharded state on rank 0; all processes call this together.

    Returns:
        on rank 0 the number of updates and the state of each parameter of the model, elsewhere an empty dict; None
        where the state is not sharded.
    """
    if not isinstance(optimiser, ShardedOptimiser):
        return None
    shards = optimiser.shards
    gathered = {}
    for parameter in model.parameters():
        n_updates, state = optimiser.state_of(parameter)
        if not state:
            shapes = optimiser.rule_of(parameter).state_shapes(parameter.shape)
            state = {name: parameter.xp.zeros(shape, parameter.dtype) for name, shape in shapes.items()}
        shards.broadcast(list(state.values()), [shards.owner_of[parameter]] * len(state))
        if shards.processes.is_first:
            gathered[parameter] = n_updates, state
    return gathered


def n_state_bytes(optimiser: Optimiser) -> int:
    """Return the size of the optimizer state in this process."""
    return sum(array.nbytes for _, state in optimiser.states.values() for array in state.values())
