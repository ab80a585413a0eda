"""State of an optimiser that several processes share out: each parameter has an owner, who alone remembers its moments.

The owner makes the update, and sends the new weights to all others; so the moments, two thirds of what AdamW works on,
exist once and not once in every process (Rajbhandari et al. 2020, "ZeRO", stage 1). Parameters stay whole, for some
rules need a whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tricycle.devices import Array
from tricycle.distributed.processes import Processes
from tricycle.layers import Layer
from tricycle.tensor import Tensor


class Load(NamedTuple):
    """What a parameter asks of its owner.

    Attributes:
        work: of its update, in any unit; 0 where it takes no more than a few operations a weight.
        n_numbers: that are remembered of it.
    """

    work: int
    n_numbers: int


class Shards:
    """Who owns which parameter of a model.

    First those whose updates are work, the most of it first, each by who has least to do so far: all wait for the last.
    Then the rest, the largest first, each by who remembers least so far.

    Args:
        load_of: what a parameter asks of its owner.

    Attributes:
        owner_of: by parameter, a rank.
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
        """Whether this process owns a parameter."""
        return self.owner_of[parameter] == self.processes.rank

    def spread(self, arrays: list[Array], owners: list[int]) -> None:
        """Give all processes what the owners' arrays hold, in place."""
        pending = [self.processes.start_broadcast(array, owner) for array, owner in zip(arrays, owners)]
        for one in pending:
            one.wait()
