"""RoPE scalings for texts longer than those of training, added to the table `rotary.SCALINGS`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tricycle.attention.rotary import SCALINGS


@dataclass(frozen=True)
class RotaryScaling:
    """A RoPE scaling: reduces the frequencies for texts `factor` times longer than those of training.

    The kind "linear" divides all frequencies by the factor (Chen et al. 2023). "llama3" divides those with fewer
    rotations in the original window than `low_frequency`, and keeps those with more than `high_frequency` (Llama 3.1).
    """

    kind: str
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_window: int = 8192

    def scale_frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Return frequencies in radians per token divided by the factor: all if "linear", else only the low ones."""
        if self.kind == "linear":
            return frequencies / self.factor
        rotations = self.original_window * frequencies / (2 * math.pi)
        kept = ((rotations - self.low_frequency) / (self.high_frequency - self.low_frequency)).clip(0, 1)
        return frequencies * ((1 - kept) / self.factor + kept)


def new_scaling(config: Any) -> RotaryScaling:
    """Make the RoPE scaling of a `ModelConfig`."""
    bounds = config.rotary_low_frequency, config.rotary_high_frequency, config.rotary_original_window
    return RotaryScaling(config.rotary_scaling, config.rotary_factor, *bounds)


SCALINGS["linear"] = SCALINGS["llama3"] = new_scaling
