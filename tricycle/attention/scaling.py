"""Scalings of rotary embeddings for texts longer than those of training, added to the table `rotary.SCALINGS`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tricycle.attention.rotary import SCALINGS


@dataclass(frozen=True)
class RotaryScaling:
    """Smaller angles, so that a model reads texts that are `factor` times longer than those of its training.

    The kind "linear" divides all speeds by the factor (Chen et al. 2023); "llama3" those of pairs with fewer turns in
    the original window than `low_frequency`, and not those with more than `high_frequency` (Llama 3.1).
    """

    kind: str
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_window: int = 8192

    def scale_frequencies(self, speeds: np.ndarray) -> np.ndarray:
        """Return the speeds after scaling, radians a token."""
        if self.kind == "linear":
            return speeds / self.factor
        turns = self.original_window * speeds / (2 * math.pi)
        kept = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clip(0, 1)
        return speeds * ((1 - kept) / self.factor + kept)


def new_scaling(config: Any) -> RotaryScaling:
    """Return the scaling of a `ModelConfig`."""
    bounds = config.rotary_low_frequency, config.rotary_high_frequency, config.rotary_original_window
    return RotaryScaling(config.rotary_scaling, config.rotary_factor, *bounds)


SCALINGS["linear"] = SCALINGS["llama3"] = new_scaling
