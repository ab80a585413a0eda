"""Learning-rate range test: a short training run with a rising learning rate, which suggests a learning rate.

`tricycle train --find-learning-rate` calls `range_test` and `plot_range_test`.

Source: Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3. Here the rate grows by the same
factor in each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.configs import GPTConfig
from tricycle.models import GPT
from tricycle.training import NonFiniteError
from tricycle.training_state import TrainingState, new_state, train_step
from tricycle_lab.plot import COLOURS, new_figure, save_figure
from tricycle_lab.sweep_plot import use_log_x_axis

MIN_RATE, MAX_RATE, N_STEPS = 1e-6, 1.0, 200
DIVERGENCE_FRACTION = 0.1  # the fraction of the divergence rate that is safe for many updates
RISE_FRACTION = 0.25  # the loss diverges where it has risen by this fraction of its decrease
EARLY_STOP_DECAY = 0.7  # of the exponential moving average of the loss that ends a test


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test.

    Attributes:
        rates: (n,), the learning rates of the updates.
        losses: (n,), the batch losses before each update; NaN if not finite.
        smoothed: (n,), a centered moving average of the losses.
        steepest_rate: the rate at which the loss falls fastest per logarithm of the rate; None if it does not fall.
        divergence_rate: the rate at which the loss has clearly risen again; None if it has not.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    steepest_rate: float | None
    divergence_rate: float | None

    @property
    def suggestion(self) -> float | None:
        """Return the steepest rate, its geometric mean with divergence / 10, or that if lower; None if no descent."""
        if self.steepest_rate is None:
            return None
        limit = self.steepest_rate if self.divergence_rate is None else DIVERGENCE_FRACTION * self.divergence_rate
        rate = math.sqrt(self.steepest_rate * limit) if limit > self.steepest_rate else limit
        return float(f"{rate:.1e}")


def range_test(
    config: GPTConfig,
    tokens: Any,
    model: GPT | None = None,
    on_gpu: bool = False,
    low: float = MIN_RATE,
    high: float = MAX_RATE,
    n_steps: int = N_STEPS,
    progress: Callable[[int], None] = lambda step: None,
) -> RangeTest:
    """Run a learning-rate range test from `low` to `high` or divergence, restore the weights; ValueError if invalid.

    Args:
        config: the config of the model and of training.
        tokens: the training tokens.
        model: the model; default: a new one.
        low, high: the first and the last learning rate.
        n_steps: the maximum number of updates; the test ends early if the smoothed loss is 10% above the first loss,
            or a loss is not finite.
        progress: called with the number of updates after each one.

    Raises:
        ValueError: an empty range, or fewer than 20 steps.
    """
    if not 0 < low < high < math.inf or n_steps < 20:
        raise ValueError(f"range_test: expected 0 < low < high and at least 20 steps, got {low}, {high} and {n_steps}")
    state, rates = new_state(config, tokens, on_gpu, model), np.geomspace(low, high, n_steps)
    state.learning_rate = lambda step: float(rates[step - 1])  # type: ignore[method-assign]
    before = {name: parameter.array.copy() for name, parameter in state.model.named_parameters()}
    generator = state.model.generator.bit_generator
    generator_state = generator.state
    try:
        losses = _losses(state, n_steps, progress)
    finally:
        for name, parameter in state.model.named_parameters():
            parameter.array[...] = before[name]
        generator.state = generator_state
        state.model.zero_grad()
    return analyze_losses(rates[: len(losses)], np.array(losses))


@np.errstate(all="ignore")
def _losses(state: TrainingState, n_steps: int, progress: Callable[[int], None]) -> list[float]:
    """Train until the smoothed loss is 10% above the first; return the losses, the last one NaN if not finite."""
    losses: list[float] = []
    mean = weight = 0.0
    for step in range(1, n_steps + 1):
        try:
            loss = float(train_step(state)[0])
        except NonFiniteError:
            loss = math.nan
        losses.append(loss)
        progress(step)
        mean = EARLY_STOP_DECAY * mean + (1 - EARLY_STOP_DECAY) * loss
        weight = EARLY_STOP_DECAY * weight + 1 - EARLY_STOP_DECAY
        if not math.isfinite(loss) or (step > n_steps // 10 and mean / weight > 1.1 * losses[0]):
            break
    return losses


def analyze_losses(rates: np.ndarray, losses: np.ndarray) -> RangeTest:
    """Return a `RangeTest` with smoothed losses, and the rates of steepest descent and divergence, None if absent.

    Args:
        rates, losses: (n,); the last loss may be NaN.
    """
    n = int(np.isfinite(losses).sum())
    smoothed = np.full(len(losses), np.nan)
    smoothed[:n] = _moving_average(losses[:n], max(1, len(losses) // 30))
    lowest = int(np.argmin(smoothed[:n])) if n else 0
    decrease = smoothed[0] - smoothed[lowest]
    if n < 5 or not decrease > 0.02 * smoothed[0]:  # not more than noise
        return RangeTest(rates, losses, smoothed, None, None)
    slopes = np.gradient(smoothed[:n], np.log(rates[:n]))
    steepest_rate = float(rates[int(np.argmin(slopes[: lowest + 1]))])
    risen = np.flatnonzero(smoothed[lowest:n] > smoothed[lowest] + RISE_FRACTION * decrease)
    diverged = lowest + int(risen[0]) if risen.size else n
    divergence_rate = float(rates[diverged]) if diverged < len(losses) else None
    return RangeTest(rates, losses, smoothed, steepest_rate, divergence_rate)


def _moving_average(values: np.ndarray, radius: int) -> np.ndarray:
    """Compute a centered moving average of at most `radius` values on each side; its window is smaller at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    indices = np.arange(len(values))
    radii = np.minimum(np.minimum(indices, len(values) - 1 - indices), radius)
    return (sums[indices + radii + 1] - sums[indices - radii]) / (2 * radii + 1)


def plot_range_test(test: RangeTest, path: Path, title: str = "") -> None:
    """Plot losses and their moving average against the learning rates, with marked rates as lines, as a PNG."""
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, color="#9ecae1", linewidth=0.8)
    axes.plot(test.rates, test.smoothed, color="#3182bd", label="loss (moving average)")
    rates = {"steepest descent": test.steepest_rate, "divergence": test.divergence_rate, "suggestion": test.suggestion}
    for (name, rate), linestyle, colour in zip(rates.items(), (":", "--", "-"), COLOURS[1:]):
        if rate is not None:
            axes.axvline(rate, color=colour, linestyle=linestyle, linewidth=1.2, label=f"{name}: {rate:.1e}")
    use_log_x_axis(axes)
    finite = test.smoothed[np.isfinite(test.smoothed)]
    if finite.size:
        top = max(float(test.losses[0]), float(finite[0]))
        low = float(finite.min())
        axes.set_ylim(low - 0.08 * (top - low) - 0.01, top + 0.15 * (top - low) + 0.01)
    axes.set(xlabel="learning rate", ylabel="training loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, path)
