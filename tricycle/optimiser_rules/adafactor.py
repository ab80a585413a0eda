"""The Adafactor optimizer, whose second moment of a matrix is stored as row means and column means."""

from __future__ import annotations

import math
from typing import Any

from tricycle.devices import Array, array_module
from tricycle.optimisers import Filter, Optimiser, Rate, Rule, State, Step, decays


class AdafactorRule(Rule):
    """The Adafactor update rule (Shazeer and Stern 2018, "Adafactor", algorithms 4 and 5).

    The second moment of a matrix (R, C) is approximated by the product of its row means (R,) and column means (C,),
    divided by its mean; the second moment of a vector is stored in full. There is no first moment.

    Args:
        beta2_decay: update t keeps 1 - t ** beta2_decay of the second moment.
        eps: added to squared gradients; and the least scale of a parameter, for relative steps.
        clip_threshold: an update with a larger root mean square is scaled down to it.
        relative_step: multiply the learning rate by the root mean square of the weights.
    """

    is_parallelizable = True

    def __init__(
        self,
        beta2_decay: float = -0.8,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        relative_step: bool = False,
    ) -> None:
        if not -math.inf < beta2_decay <= 0:
            raise ValueError(f"Adafactor: expected a beta2_decay of 0 or less, got {beta2_decay!r}")
        if not isinstance(eps, (tuple, list)) or len(eps) != 2 or not all(0 < number < math.inf for number in eps):
            raise ValueError(f"Adafactor: expected two numbers above 0 as eps, got {eps!r}")
        if not clip_threshold > 0:
            raise ValueError(f"Adafactor: expected a clip_threshold above 0, got {clip_threshold!r}")
        self.beta2_decay, self.eps = beta2_decay, (eps[0], eps[1])
        self.clip_threshold, self.relative_step = clip_threshold, relative_step

    def state_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the state arrays' shapes by name: "rows" and "columns" from 2 axes on, "second" for fewer."""
        if len(shape) < 2:
            return {"second": shape}
        return {"rows": shape[:-1], "columns": (*shape[:-2], shape[-1])}

    def update(self, weights: Array, grad: Array, state: State, step: Step) -> None:
        """Update weights and state in place by Adafactor: row, column means of squares, clipping, decoupled decay."""
        xp = array_module(grad)
        new = step.number**self.beta2_decay  # the weight of this gradient in the moving average
        squares = xp.square(grad, out=xp.empty_like(grad))  # an array, also for 0-d gradients
        squares += self.eps[0]
        if "second" in state:
            _mix(state["second"], squares, new)
            scale = xp.sqrt(state["second"])
        else:
            rows, columns = state["rows"], state["columns"]
            _mix(rows, squares.mean(axis=-1), new)
            _mix(columns, squares.mean(axis=-2), new)
            shares = rows / rows.mean(axis=-1, keepdims=True)  # before the product, which could leave float32's range
            scale = xp.sqrt(shares)[..., None] * xp.sqrt(columns)[..., None, :]
        change = xp.divide(grad, scale, out=squares)
        rate = step.learning_rate / xp.maximum(1, _root_mean_square(change) / self.clip_threshold)
        if self.relative_step:
            rate = rate * xp.maximum(self.eps[1], _root_mean_square(weights))
        weights *= step.decay_factor
        change *= rate
        weights -= change


def _mix(mean: Array, values: Array, new: Any) -> None:
    """Update a moving average in place: (1 - new) * mean + new * values."""
    mean *= 1 - new
    mean += new * values


def _root_mean_square(array: Array) -> Any:
    """Return the root mean square of all elements, a 0-d value."""
    xp = array_module(array)
    return xp.sqrt(xp.square(array).mean())


class Adafactor(Optimiser):
    """The Adafactor optimizer: its state is one number for each row and each column of a matrix."""

    def __init__(
        self,
        learning_rate: Rate = 1e-3,
        beta2_decay: float = -0.8,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        decays: Filter = decays,
        relative_step: bool = False,
    ) -> None:
        rule = AdafactorRule(beta2_decay, eps, clip_threshold, relative_step)
        super().__init__(learning_rate, rule, weight_decay, decays)
