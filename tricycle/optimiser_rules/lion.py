"""The Lion optimizer: each update is the sign of a moving average of gradients."""

from __future__ import annotations

from tricycle.devices import Array, array_module
from tricycle.optimisers import Filter, Optimiser, Rate, Rule, State, Step, decays


class LionRule(Rule):
    """The Lion update rule (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2).

    Args:
        betas: the weight of the moving average in the update, and its decay per step.
    """

    state_names = ("first",)
    is_parallelizable = True

    def __init__(self, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Lion: expected two betas from 0 to below 1, got {betas!r}")
        self.betas = betas

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        """Update weights and state in place by Lion: sign(beta1 * momentum + (1 - beta1) * grad), decoupled decay."""
        mean = state["first"]
        beta1, beta2 = self.betas
        direction = array_module(grad).sign(beta1 * mean + (1 - beta1) * grad)
        weights *= step.decay_factor
        weights -= step.learning_rate * direction
        mean *= beta2
        mean += (1 - beta2) * grad


class Lion(Optimiser):
    """The Lion optimizer; use 1/3 to 1/10 of AdamW's learning rate, and 3 to 10 times its weight decay."""

    def __init__(
        self,
        learning_rate: Rate = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        decays: Filter = decays,
    ) -> None:
        super().__init__(learning_rate, LionRule(betas), weight_decay, decays)
