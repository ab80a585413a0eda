"""A limit in minutes does not count set clocks, closed lids, and stopped programs."""

import ctypes
import sys
import time
import types
from dataclasses import replace

import pytest
from test_training import CONFIG, TOKENS, new_run, train

from tricycle.training_state import new_state
from tricycle_cli import clock, updates


def test_the_clock_is_independent_of_the_date(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: pytest.fail("time.time can be set and must not be called"))
    first = clock.awake_seconds()
    time.sleep(0.02)
    assert 0.015 < clock.awake_seconds() - first < 10


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems_use_a_clock_that_stops_in_sleep(monkeypatch, platform):
    """Windows counts 100 nanoseconds."""
    write_time = lambda pointer: setattr(pointer._obj, "value", 3 * 10**7)
    kernel = types.SimpleNamespace(QueryUnbiasedInterruptTimePrecise=write_time)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "WinDLL", {"kernelbase": kernel}.__getitem__, raising=False)
    monkeypatch.setattr(time, "CLOCK_UPTIME_RAW", 8, raising=False)
    monkeypatch.setattr(time, "clock_gettime", {8: 3.0}.__getitem__, raising=False)
    assert clock.awake_seconds() == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("seconds", "before", "counted"),
    [
        (3600.0, [1.0, 2.0, 1.5, 900.0, 1.2], 1.5),
        (3600.0, [1.0] * 4, 1.0),
        (3600.0, [1.0] * 3, 3600.0),  # too few steps for a median
        (9.0, [0.001] * 9, 9.0),  # too short to matter
        (3600.0, [400.0] * 9, 3600.0),  # slow steps, no pause
    ],
)
def test_exclude_pause_replaces_only_long_outliers(seconds, before, counted):
    assert clock.exclude_pause(seconds, before) == counted


def steps_made(folder, monkeypatch, jumps: dict[int, float]) -> int:
    """Return the number of updates of a five-minute run with one-second updates on a clock that jumps."""
    now, calls = [0.0], [0]

    def tick() -> float:
        calls[0] += 1
        now[0] += 1.0 + jumps.get(calls[0], 0.0)
        return now[0]

    monkeypatch.setattr(updates.clock, "awake_seconds", tick)
    state = new_state(replace(CONFIG, minutes=5.0, steps=0, accumulation_steps=1, eval_interval=1000), TOKENS)
    assert train(state, new_run(folder)) is True
    assert state.seconds == pytest.approx(state.step, rel=0.02)
    return state.step


@pytest.mark.nightly
@pytest.mark.parametrize("call", [12, 40, 200])
def test_pause_of_a_day_does_not_count_toward_minutes(tmp_path, monkeypatch, call):
    """Such as a pause by Ctrl-Z or of a virtual machine."""
    usual = steps_made(tmp_path / "usual", monkeypatch, {})
    assert 200 < usual < 290
    assert steps_made(tmp_path / "stopped", monkeypatch, {call: 86_400.0}) == usual
