"""A learning-rate range test: the loss over some updates whose learning rate grows from far too small to too large.

Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3; with rates that grow by the same factor
each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.configs import GPTConfig
from tricycle.models import GPT
from tricycle.training import NonFiniteError
from tricycle.training_state import TrainingState, new_state, train_step
from tricycle_lab.plot import COLOURS, new_figure, save_figure
from tricycle_lab.sweep_plot import logarithmic

LOW, HIGH, STEPS = 1e-6, 1.0, 200
SHARE_OF_DIVERGENCE = 0.1  # of the rate where the loss rises again, a rate that is safe for many updates
RISEN = 0.25  # of what the loss had fallen by: then it counts as having risen again
EARLY = 0.7  # how much of the past the running mean keeps that ends a test


@dataclass(frozen=True)
class RangeTest:
    """What a test found.

    Attributes:
        rates: (n,) of the updates that were made.
        losses: (n,) of their batches, before each update; NaN where there was none.
        smoothed: (n,) a mean over neighbours on both sides.
        steepest: the rate where the loss falls fastest, over the logarithm of the rate; None where it never falls.
        diverges: the rate where the loss has clearly risen again; None where it has not.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    steepest: float | None
    diverges: float | None

    @property
    def suggestion(self) -> float | None:
        """A highest learning rate, between where the loss falls fastest and a tenth of where it diverges.

        Halfway over the logarithm; a tenth of where it diverges if that is lower; where it falls fastest if it does
        not diverge.
        """
        if self.steepest is None:
            return None
        most = self.steepest if self.diverges is None else SHARE_OF_DIVERGENCE * self.diverges
        rate = math.sqrt(self.steepest * most) if most > self.steepest else most
        return float(f"{rate:.1e}")


@dataclass
class _Rising(TrainingState):
    """Training whose rates are given."""

    rates: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def learning_rate(self, step: int) -> float:
        return float(self.rates[step - 1])


def range_test(
    config: GPTConfig,
    tokens: Any,
    model: GPT | None = None,
    on_gpu: bool = False,
    low: float = LOW,
    high: float = HIGH,
    n_steps: int = STEPS,
    progress: Callable[[int], None] = lambda step: None,
) -> RangeTest:
    """Make updates with growing rates, by a fresh optimiser; the model is afterwards as it was.

    Args:
        model: a new one unless given.
        n_steps: at most so many; the test ends where the loss is above its first value or not finite.
        progress: is told how many have been made.

    Raises:
        ValueError: a range without an inside, or fewer than 20 steps.
    """
    if not 0 < low < high < math.inf or n_steps < 20:
        raise ValueError(f"range_test: expected 0 < low < high and at least 20 steps, got {low}, {high} and {n_steps}")
    plain = new_state(config, tokens, on_gpu, model)
    values = {one.name: getattr(plain, one.name) for one in fields(plain)}
    state = _Rising(**values, rates=np.geomspace(low, high, n_steps))
    before = {name: parameter.array.copy() for name, parameter in state.model.named_parameters()}
    generator = state.model.generator.bit_generator
    drawn = generator.state
    try:
        losses = _losses(state, n_steps, progress)
    finally:
        for name, parameter in state.model.named_parameters():
            parameter.array[...] = before[name]
        generator.state = drawn
        state.model.zero_grad()
    return read(state.rates[: len(losses)], np.array(losses))


@np.errstate(all="ignore")
def _losses(state: _Rising, n_steps: int, progress: Callable[[int], None]) -> list[float]:
    """Until the loss is above where it began; the last is NaN where it was not finite."""
    losses: list[float] = []
    mean = weight = 0.0
    for step in range(1, n_steps + 1):
        try:
            loss = float(train_step(state)[0])
        except NonFiniteError:
            loss = math.nan
        losses.append(loss)
        progress(step)
        mean, weight = EARLY * mean + (1 - EARLY) * loss, EARLY * weight + 1 - EARLY
        if not math.isfinite(loss) or (step > n_steps // 10 and mean / weight > 1.1 * losses[0]):
            break
    return losses


def read(rates: np.ndarray, losses: np.ndarray) -> RangeTest:
    """What losses over growing rates tell.

    Args:
        rates, losses: (n,); the last loss may be NaN.
    """
    fine = np.isfinite(losses)
    n = int(fine.sum())
    smoothed = np.full(len(losses), np.nan)
    smoothed[:n] = _mean_of_neighbours(losses[:n], max(1, len(losses) // 30))
    lowest = int(np.argmin(smoothed[:n])) if n else 0
    fallen = smoothed[0] - smoothed[lowest]
    if n < 5 or not fallen > 0.02 * smoothed[0]:  # noise: nothing was learnt
        return RangeTest(rates, losses, smoothed, None, None)
    slopes = np.gradient(smoothed[:n], np.log(rates[:n]))
    steepest = float(rates[int(np.argmin(slopes[: lowest + 1]))])
    risen = np.flatnonzero(smoothed[lowest:n] > smoothed[lowest] + RISEN * fallen)
    diverges = None
    if risen.size:
        diverges = float(rates[lowest + int(risen[0])])
    elif n < len(losses):
        diverges = float(rates[n])
    return RangeTest(rates, losses, smoothed, steepest, diverges)


def _mean_of_neighbours(values: np.ndarray, reach: int) -> np.ndarray:
    """Of each value and those at most so far away, as many on both sides."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    reaches = np.minimum(np.minimum(places, len(values) - 1 - places), reach)
    return (sums[places + reaches + 1] - sums[places - reaches]) / (2 * reaches + 1)


def plot_range_test(test: RangeTest, path: Path, title: str = "") -> None:
    """Draw the loss over the rates as a PNG."""
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    axes.plot(test.rates, test.losses, color="#9ecae1", linewidth=0.8)
    axes.plot(test.rates, test.smoothed, color="#3182bd", label="loss, mean of neighbours")
    marks = [
        ("falls fastest", test.steepest, ":"),
        ("diverges", test.diverges, "--"),
        ("suggestion", test.suggestion, "-"),
    ]
    for (name, rate, stroke), colour in zip(marks, COLOURS[1:]):
        if rate is not None:
            axes.axvline(rate, color=colour, linestyle=stroke, linewidth=1.2, label=f"{name}: {rate:.1e}")
    logarithmic(axes)
    finite = test.smoothed[np.isfinite(test.smoothed)]
    if finite.size:
        top = max(float(test.losses[0]), float(finite[0]))
        low = float(finite.min())
        axes.set_ylim(low - 0.08 * (top - low) - 0.01, top + 0.15 * (top - low) + 0.01)
    axes.set(xlabel="learning rate", ylabel="loss of the batch, nats a token", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, path)
