"""RoPE scalings for texts longer than those of training, added to the table `rotary.SCALINGS`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tricycle.attention.cache import Segments, concatenate_texts
from tricycle.attention.rotary import SCALINGS, Rotary
from tricycle.ops import as_tensor
from tricycle.tensor import Operand, Tensor


@dataclass(frozen=True)
class RotaryScaling:
    """A RoPE scaling: reduces the frequencies for texts `factor` times longer than those of training.

    The kind "linear" divides all frequencies by the factor (Chen et al. 2023). "llama3" divides those with fewer
    rotations in the original window than `low_frequency`, and keeps those with more than `high_frequency` (Llama 3.1).
    "yarn" does so too, but in between it interpolates by the number of the channel pair (Peng et al. 2023).

    Attributes:
        rounded: whether "yarn" rounds the numbers of the first and last interpolated pair outward.
        attention_factor: factor of all rotated queries and keys.
    """

    kind: str
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_window: int = 8192
    rounded: bool = True
    attention_factor: float = 1.0

    def scale_frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Return frequencies in radians per token divided by the factor: all if "linear", else low ones, blended."""
        if self.kind == "linear":
            return frequencies / self.factor
        rotations = self.original_window * frequencies / (2 * math.pi)
        if self.kind == "yarn":
            kept = self._kept_by_pair(rotations)
        else:
            kept = ((rotations - self.low_frequency) / (self.high_frequency - self.low_frequency)).clip(0, 1)
        return frequencies * ((1 - kept) / self.factor + kept)

    def _kept_by_pair(self, rotations: np.ndarray) -> np.ndarray:
        """Return the share (0 to 1) of each frequency that "yarn" keeps, from the rotations in the original window."""
        n_pairs = len(rotations)
        if n_pairs < 2:
            return np.ones(n_pairs)
        step = math.log(rotations[0] / rotations[1])  # pair i rotates exp(i step) times less often than pair 0
        first, last = (math.log(rotations[0] / bound) / step for bound in (self.high_frequency, self.low_frequency))
        if self.rounded:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * n_pairs - 1)
        return 1 - ((np.arange(n_pairs) - first) / (last - first or 0.001)).clip(0, 1)


def new_scaling(config: Any) -> RotaryScaling:
    """Make the RoPE scaling of a `ModelConfig`; ValueError for yarn with a base of 1, of which all pairs are equal."""
    if config.rotary_scaling == "yarn" and config.rotary_base == 1:
        raise ValueError("RotaryScaling: expected rotary_base (rope_theta) to differ from 1 with yarn, got 1")
    bounds = config.rotary_low_frequency, config.rotary_high_frequency, config.rotary_original_window
    more = config.rotary_rounded, config.rotary_attention_factor
    return RotaryScaling(config.rotary_scaling, config.rotary_factor, *bounds, *more)


# -------------------------------------------------------------------- LongRoPE
@dataclass(frozen=True)
class LongRotaryScaling:
    """A RoPE scaling with a divisor for each frequency, one list for short texts and one for long texts ("longrope").

    Source: Ding et al. 2024, "LongRoPE".

    Attributes:
        divisors: of the frequencies of texts in the original window. long_divisors: of longer texts.
        original_window: the maximum number of tokens of a short text.
        attention_factor: factor of all rotated queries and keys.
    """

    divisors: tuple[float, ...]
    long_divisors: tuple[float, ...]
    original_window: int
    attention_factor: float = 1.0

    def scale_frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Return frequencies in radians per token, each divided by its entry in `divisors`."""
        return frequencies / np.array(self.divisors)

    def new_rotary(self, base: float, fraction: float, scaling: LongRotaryScaling) -> LongRotary:
        """Make RoPE with this scaling; the arguments are those of `Rotary`."""
        return LongRotary(base, fraction, scaling)


class LongRotary:
    """RoPE with a `LongRotaryScaling`: the number of all tokens of a text, with the cached ones, selects its divisors.

    All tokens of a text need the same divisors. So a cached text that becomes longer than the original window must be
    processed again from its first token, as `generate.DecodingState` does.

    Args:
        base, fraction: see `Rotary`.
    """

    def __init__(self, base: float, fraction: float, scaling: LongRotaryScaling) -> None:
        self.window = scaling.original_window
        self.short = Rotary(base, fraction, scaling)
        self.long = Rotary(base, fraction, replace(scaling, divisors=scaling.long_divisors))

    def __call__(self, x: Operand, segments: Segments) -> Tensor:
        """Apply RoPE to x (B, T, H, D), with each text's long or short divisors; `segments`: (start, new tokens)."""
        for first, n_tokens in segments:
            if 0 < first <= self.window < first + n_tokens:
                rule = f"a cached text to stay within {self.window} tokens, or to be processed again from its first"
                raise ValueError(f"LongRotary: expected {rule}, got {n_tokens} tokens after {first} cached ones")
        is_long = [first + n_tokens > self.window for first, n_tokens in segments]
        if len(set(is_long)) == 1:
            return (self.long if is_long[0] else self.short)(x, segments)
        x, rotated, start = as_tensor(x), [], 0
        for segment, long in zip(segments, is_long):
            rows = slice(start, start := start + segment[1])
            rotated.append((self.long if long else self.short)(x[:, rows], (segment,)))
        return concatenate_texts(rotated)


def new_long_scaling(config: Any) -> LongRotaryScaling:
    """Make the RoPE scaling "longrope" of a `ModelConfig`; ValueError for a wrong number of divisors."""
    n_pairs, divisors = int(config.channels_per_head * config.rotary_fraction) // 2, config.rotary_divisors
    if len(divisors) != 2 * n_pairs or min(divisors) <= 0:
        rule = f"twice {n_pairs} numbers above 0, one for each frequency"
        raise ValueError(f"ModelConfig: expected rotary_divisors to be {rule}, got {len(divisors)}: {divisors!r:.60}")
    window, factor = config.rotary_original_window, config.rotary_attention_factor
    return LongRotaryScaling(divisors[:n_pairs], divisors[n_pairs:], window, factor)


SCALINGS["linear"] = SCALINGS["llama3"] = SCALINGS["yarn"] = new_scaling
SCALINGS["longrope"] = new_long_scaling
