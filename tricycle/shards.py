"""State of an optimiser that several processes share out: each parameter has an owner, who alone remembers its moments.

The owner makes the update, and sends the new weights to all others; so the moments, two thirds of what AdamW works on,
exist once and not once in every process (Rajbhandari et al. 2020, "ZeRO", stage 1). Parameters stay whole, for some
rules need a whole matrix.
"""

from __future__ import annotations

from tricycle.devices import Array
from tricycle.layers import Layer
from tricycle.processes import Processes
from tricycle.tensor import Tensor


class Shards:
    """Who owns which parameter of a model: the largest first, each by who has least so far.

    Attributes:
        owner_of: by parameter, a rank.
    """

    def __init__(self, processes: Processes, model: Layer) -> None:
        self.processes = processes
        self.owner_of: dict[Tensor, int] = {}
        sizes = [0] * processes.size
        for parameter in sorted(model.parameters(), key=lambda parameter: -parameter.size):
            owner = sizes.index(min(sizes))
            self.owner_of[parameter] = owner
            sizes[owner] += parameter.size

    def is_own(self, parameter: Tensor) -> bool:
        """Whether this process owns a parameter."""
        return self.owner_of[parameter] == self.processes.rank

    def spread(self, arrays: list[Array], owners: list[int]) -> None:
        """Give all processes what the owners' arrays hold, in place."""
        pending = [self.processes.start_broadcast(array, owner) for array, owner in zip(arrays, owners)]
        for one in pending:
            one.wait()
