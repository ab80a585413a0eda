"""Learning-rate schedules: functions from the step number (1, 2, ...) to a learning rate."""

from __future__ import annotations

import math


class WarmupCosine:
    """Linear warm-up to `max_rate`, then cosine decay to `min_rate` (Loshchilov and Hutter 2017)."""

    def __init__(self, max_rate: float, min_rate: float, warmup_steps: int, total_steps: int) -> None:
        kind = type(self).__name__
        if not 0 <= min_rate <= max_rate < math.inf:
            raise ValueError(f"{kind}: expected 0 <= min_rate <= max_rate, got {min_rate!r} and {max_rate!r}")
        if not 0 <= warmup_steps <= total_steps:
            raise ValueError(f"{kind}: expected 0 <= warmup_steps <= total_steps, got {warmup_steps} and {total_steps}")
        self.max_rate, self.min_rate = max_rate, min_rate
        self.warmup_steps, self.total_steps = warmup_steps, total_steps

    def __call__(self, step: int) -> float:
        """Return a step's rate (steps from 1): linear warm-up to max_rate, then decay to min_rate at total_steps."""
        if step < self.warmup_steps:
            return self.max_rate * step / self.warmup_steps
        if step >= self.total_steps:
            return self.min_rate
        progress = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.min_rate + (self.max_rate - self.min_rate) * self.decay(progress)

    def decay(self, progress: float) -> float:
        """Return the remaining fraction of the decay (from 1 to 0) after a fraction of the steps since the warm-up."""
        return 0.5 * (1 + math.cos(math.pi * progress))
