"""Sharded optimizer state (ZeRO stage 1): each parameter has one owner rank, which alone holds its optimizer state.

The owner updates the parameter and broadcasts the new weights, so the optimizer state exists once and not in every
process (Rajbhandari et al. 2020, "ZeRO", stage 1). Parameters are not split, because some rules need a whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from tricycle import devices
from tricycle.autograd import increment_versions
from tricycle.devices import Array
from tricycle.distributed.processes import ProcessGroup
from tricycle.layers import Layer
from tricycle.optimisers import Optimiser, Rule, State
from tricycle.tensor import Tensor


class UpdateCost(NamedTuple):
    """The cost of owning a parameter.

    Attributes:
        n_operations: of an update, in any unit; 0 for elementwise rules.
        n_state_numbers: the size of the optimizer state.
    """

    n_operations: int
    n_state_numbers: int


def update_cost(optimiser: Optimiser, parameter: Tensor) -> UpdateCost:
    """Return (n_operations, n_state_numbers) of a parameter; 0 operations if its rule has no method of that name."""
    rule = optimiser.rule_of(parameter)
    n_operations: Callable[[tuple[int, ...]], int] | None = getattr(rule, "n_operations", None)
    n_numbers = sum(map(math.prod, rule.state_shapes(parameter.shape).values()))
    return UpdateCost(n_operations(parameter.shape) if n_operations is not None else 0, n_numbers)


class Shards:
    """The assignment of each parameter of a model to an owner rank.

    Parameters with costly updates are assigned first, in descending order of cost, each to the rank with the fewest
    operations so far, because all ranks wait for the slowest. The other parameters follow, the largest first, each to
    the rank with the smallest state so far.

    Args:
        update_cost: a function that returns the cost of owning a parameter.

    Attributes:
        owner_of: the owner rank of each parameter.
    """

    def __init__(self, processes: ProcessGroup, model: Layer, update_cost: Callable[[Tensor], UpdateCost]) -> None:
        self.processes = processes
        self.owner_of: dict[Tensor, int] = {}
        costs = {parameter: update_cost(parameter) for parameter in model.parameters()}
        n_operations, n_numbers = [0] * processes.size, [0] * processes.size
        for parameter, cost in sorted(costs.items(), key=lambda item: item[1], reverse=True):
            loads = zip(n_operations, n_numbers) if cost.n_operations else zip(n_numbers, n_operations)
            owner = min(enumerate(loads), key=lambda item: item[1])[0]
            self.owner_of[parameter] = owner
            n_operations[owner] += cost.n_operations
            n_numbers[owner] += cost.n_state_numbers

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this process owns a parameter."""
        return self.owner_of[parameter] == self.processes.rank

    def broadcast(self, arrays: list[Array], owners: list[int]) -> None:
        """Overwrite each array on every rank with that of its owner rank, and wait; all ranks must call this."""
        pending = [self.processes.start_broadcast(array, owner) for array, owner in zip(arrays, owners)]
        for operation in pending:
            operation.wait()


class ShardedOptimiser(Optimiser):
    """An optimizer that holds the state of only those parameters that this process owns.

    Args:
        optimiser: the optimizer whose rules, learning rate, weight decay and state are used.
    """

    def __init__(self, optimiser: Optimiser, shards: Shards) -> None:
        rate = optimiser.schedule or optimiser.learning_rate
        super().__init__(rate, optimiser.rules, optimiser.weight_decay, optimiser.decays)
        self.shards = shards
        self.n_steps, self.learning_rate = optimiser.n_steps, optimiser.learning_rate
        self.states = {p: (n, state if shards.owns(p) else {}) for p, (n, state) in optimiser.states.items()}

    def update(self, named_parameters: Iterable[tuple[str, Tensor]], factor: Any = None, n_skipped: Any = 0) -> None:
        """Update owned parameters with factor * gradient and broadcast all weights; change nothing if `factor` <= 0."""
        chosen = [(name, p) for name, p in named_parameters if p.grad is not None and p.requires_grad]
        super().update([(name, p) for name, p in chosen if self.shards.owns(p)], factor, n_skipped)
        if factor is not None and not (devices.is_array(factor) and devices.on_gpu(factor)) and not factor > 0:
            return  # no process has changed anything
        parameters = [p for _, p in chosen]
        received = [p for p in parameters if not self.shards.owns(p)]
        for parameter in received:
            self.states[parameter] = self.state_of(parameter)[0] + 1, {}
        self.shards.broadcast([p.array for p in parameters], [self.shards.owner_of[p] for p in parameters])
        increment_versions(received)

    def state_of(self, parameter: Tensor, rule: Rule | None = None) -> tuple[int, State]:
        """Return the number of updates and the state of a parameter; the state is empty if another process owns it."""
        if self.shards.owns(parameter):
            return super().state_of(parameter, rule)
        return self.states.get(parameter, (0, {}))

    def set_state(self, parameter: Tensor, n_updates: int, state: State) -> None:
        """Set a parameter's number of updates, and its optimizer state if this process owns it, else an empty one."""
        super().set_state(parameter, n_updates, state)
        if not self.shards.owns(parameter):
            self.states[parameter] = n_updates, {}


def gather_state(optimiser: Optimiser, model: Layer) -> dict[Tensor, tuple[int, State]] | None:
    """Return {parameter: (n_updates, state)} on rank zero, {} on others (all must call this); None if not sharded."""
    if not isinstance(optimiser, ShardedOptimiser):
        return None
    shards = optimiser.shards
    gathered = {}
    for parameter in model.parameters():
        n_updates, state = optimiser.state_of(parameter)
        if not state:
            shapes = optimiser.rule_of(parameter).state_shapes(parameter.shape)
            dtype = np.promote_types(parameter.dtype, np.float32)
            state = {name: parameter.xp.zeros(shape, dtype) for name, shape in shapes.items()}
        shards.broadcast(list(state.values()), [shards.owner_of[parameter]] * len(state))
        if shards.processes.is_rank_zero:
            gathered[parameter] = n_updates, state
    return gathered


def n_state_bytes(optimiser: Optimiser) -> int:
    """Return the size in bytes of the optimizer state that this process holds."""
    return sum(array.nbytes for _, state in optimiser.states.values() for array in state.values())
