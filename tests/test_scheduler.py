"""Learning-rate schedules."""

from __future__ import annotations

import math

import pytest

from tricycle.optimiser_rules.schedules import WarmupLinear
from tricycle.scheduler import WarmupCosine

COSINE = {0: 0.0, 1: 0.1, 5: 0.5, 9: 0.9, 10: 1.0, 60: 0.6, 110: 0.2, 111: 0.2, 10**9: 0.2}
COSINE[35] = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
LINEAR = {0: 0.0, 5: 0.5, 10: 1.0, 35: 0.8, 60: 0.6, 85: 0.4, 110: 0.2, 111: 0.2}


@pytest.mark.parametrize(
    "schedule, warmup, total, rates",
    [
        (WarmupCosine, 10, 110, COSINE),
        (WarmupLinear, 10, 110, LINEAR),
        (WarmupCosine, 0, 100, {0: 1.0, 50: 0.6, 100: 0.2}),
        (WarmupCosine, 1, 100, {1: 1.0}),
        (WarmupCosine, 10, 10, {9: 0.9, 10: 0.2}),  # only warm-up
        (WarmupCosine, 0, 0, {0: 0.2, 5: 0.2}),
    ],
)
def test_rates(schedule: type, warmup: int, total: int, rates: dict[int, float]) -> None:
    rate = schedule(1.0, 0.2, warmup_steps=warmup, total_steps=total)
    assert {step: rate(step) for step in rates} == pytest.approx(rates, abs=1e-12)


def test_rates_stay_within_bounds_exactly() -> None:
    schedule = WarmupCosine(3e-3, 3e-4, 20, 200)
    rates = [schedule(step) for step in range(20, 260)]
    assert rates[0] == max(rates) == 3e-3
    assert set(rates[180:]) == {min(rates)} == {3e-4}


@pytest.mark.parametrize(
    "schedule, args, message",
    [
        (WarmupLinear, (0.1, 0.2, 1, 10), "min_rate <= max_rate.*got 0.2 and 0.1"),
        (WarmupCosine, (0.1, -0.1, 1, 10), "min_rate <= max_rate.*got -0.1 and 0.1"),
        (WarmupCosine, (math.inf, 0.0, 1, 10), "min_rate <= max_rate.*got 0.0 and inf"),
        (WarmupCosine, (math.nan, 0.0, 1, 10), "min_rate <= max_rate.*got 0.0 and nan"),
        (WarmupCosine, (0.1, 0.0, 11, 10), "warmup_steps <= total_steps.*got 11 and 10"),
        (WarmupCosine, (0.1, 0.0, -1, 10), "warmup_steps <= total_steps.*got -1 and 10"),
    ],
)
def test_bad_input(schedule: type, args: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{schedule.__name__}: .*{message}"):
        schedule(*args)
