"""Learning-rate schedules."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from tricycle.optimiser_rules.schedules import SCHEDULES, WarmupLinear
from tricycle.scheduler import WarmupCosine


@pytest.mark.parametrize(
    "step, rate",
    [
        (0, 0.0),
        (1, 0.1),
        (5, 0.5),
        (9, 0.9),
        (10, 1.0),  # the top
        (60, 0.6),  # half way down: the mean of both rates
        (35, 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2),
        (110, 0.2),  # the end
        (111, 0.2),
        (10**9, 0.2),
    ],
)
def test_warmup_linear_values(step: int, rate: float) -> None:
    assert WarmupCosine(1.0, 0.2, warmup_steps=10, total_steps=110)(step) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize(
    "warmup, total, step, rate",
    [
        (0, 100, 0, 1.0),  # no warm-up: the top at once
        (0, 100, 50, 0.6),
        (0, 100, 100, 0.2),
        (1, 100, 1, 1.0),
        (10, 10, 9, 0.9),  # nothing but warm-up
        (10, 10, 10, 0.2),
        (0, 0, 0, 0.2),
        (0, 0, 5, 0.2),
    ],
)
def test_warmup_linear_with_degenerate_lengths(warmup: int, total: int, step: int, rate: float) -> None:
    assert WarmupCosine(1.0, 0.2, warmup, total)(step) == pytest.approx(rate, abs=1e-12)


def test_rate_rises_then_falls_within_bounds() -> None:
    schedule = WarmupCosine(3e-3, 3e-4, 20, 200)
    rates = [schedule(step) for step in range(1, 260)]
    top = rates.index(max(rates))
    assert top == 19 and rates[top] == 3e-3
    assert all(a < b for a, b in pairwise(rates[: top + 1]))
    assert all(a > b for a, b in pairwise(rates[top:200]))
    assert set(rates[199:]) == {3e-4}
    assert min(rates) == rates[0] == pytest.approx(3e-3 / 20)


@pytest.mark.parametrize(
    "step, rate", [(0, 0), (5, 0.5), (10, 1.0), (35, 0.8), (60, 0.6), (85, 0.4), (110, 0.2), (111, 0.2)]
)
def test_linear_decay_values(step: int, rate: float) -> None:
    assert WarmupLinear(1.0, 0.2, warmup_steps=10, total_steps=110)(step) == pytest.approx(rate, abs=1e-12)


def test_schedules_resolve_by_name_and_name_themselves_in_errors() -> None:
    assert {"cosine": WarmupCosine, "linear": WarmupLinear} == SCHEDULES
    with pytest.raises(ValueError, match=r"^WarmupLinear: .*min_rate.*max_rate.*0\.2 and 0\.1"):
        WarmupLinear(0.1, 0.2, 1, 10)


def test_constant_rate() -> None:
    schedule = WarmupCosine(0.5, 0.5, 0, 10)
    assert [schedule(step) for step in (0, 3, 10, 11)] == [0.5] * 4


@pytest.mark.parametrize(
    "args, message",
    [
        ((0.1, 0.2, 1, 10), "min_rate <= max_rate.*got 0.2 and 0.1"),
        ((0.1, -0.1, 1, 10), "min_rate <= max_rate.*got -0.1 and 0.1"),
        ((math.inf, 0.0, 1, 10), "min_rate <= max_rate.*got 0.0 and inf"),
        ((math.nan, 0.0, 1, 10), "min_rate <= max_rate.*got 0.0 and nan"),
        ((0.1, 0.0, 11, 10), "warmup_steps <= total_steps.*got 11 and 10"),
        ((0.1, 0.0, -1, 10), "warmup_steps <= total_steps.*got -1 and 10"),
    ],
)
def test_bad_input(args: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=f"^WarmupCosine: .*{message}"):
        WarmupCosine(*args)
