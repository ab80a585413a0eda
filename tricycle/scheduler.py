"""Learning-rate schedules: functions from the number of a step (1, 2, ...) to a rate."""

from __future__ import annotations

import math


class WarmupCosine:
    """A linear rise from 0, then half a cosine down (Loshchilov and Hutter 2017).

    Args:
        max_rate: reached at step `warmup_steps`.
        min_rate: reached at step `total_steps`, and kept afterwards.
    """

    def __init__(self, max_rate: float, min_rate: float, warmup_steps: int, total_steps: int) -> None:
        kind = type(self).__name__
        if not 0 <= min_rate <= max_rate < math.inf:
            raise ValueError(f"{kind}: expected 0 <= min_rate <= max_rate, got {min_rate!r} and {max_rate!r}")
        if not 0 <= warmup_steps <= total_steps:
            got = f"{warmup_steps!r} and {total_steps!r}"
            raise ValueError(f"{kind}: expected 0 <= warmup_steps <= total_steps, got {got}")
        self.max_rate, self.min_rate = max_rate, min_rate
        self.warmup_steps, self.total_steps = warmup_steps, total_steps

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.max_rate * step / self.warmup_steps
        if step >= self.total_steps:
            return self.min_rate
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.min_rate + (self.max_rate - self.min_rate) * self.left(progress)

    def left(self, progress: float) -> float:
        """The share of the way down that is still to go, when so much of the time after the warm-up is over."""
        return 0.5 * (1 + math.cos(math.pi * progress))


class WarmupLinear(WarmupCosine):
    """A linear rise from 0, then a straight line down."""

    def left(self, progress: float) -> float:
        return 1 - progress


SCHEDULES: dict[str, type[WarmupCosine]] = {"cosine": WarmupCosine, "linear": WarmupLinear}
