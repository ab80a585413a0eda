"""A limit in minutes does not know about clocks that are set, lids that are closed, and programs that are stopped."""

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
    monkeypatch.setattr(time, "time", lambda: pytest.fail("somebody may set that clock"))
    first = clock.awake_seconds()
    time.sleep(0.02)
    assert 0.015 < clock.awake_seconds() - first < 10


def test_windows_own_clock(monkeypatch):
    """Interrupt time without sleep, in 100 nanoseconds."""

    def tell(pointer) -> None:
        pointer._obj.value = 3 * 10**7

    kernel = types.SimpleNamespace(QueryUnbiasedInterruptTimePrecise=tell)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", lambda name: {"kernelbase": kernel}[name], raising=False)
    assert clock.awake_seconds() == pytest.approx(3.0)


def test_the_mac_s_own_clock(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(time, "CLOCK_UPTIME_RAW", 8, raising=False)
    monkeypatch.setattr(time, "clock_gettime", {8: 5.0}.__getitem__, raising=False)
    assert clock.awake_seconds() == 5.0


@pytest.mark.parametrize(
    ("seconds", "before", "counted"),
    [
        (3600.0, [1.0] * 5, 1.0),
        (3600.0, [1.0, 2.0, 1.5, 900.0, 1.2], 1.5),
        (3600.0, [1.0] * 3, 3600.0),  # too few to know
        (3600.0, [], 3600.0),
        (9.0, [0.001] * 9, 9.0),  # too short to matter
        (3600.0, [400.0] * 9, 3600.0),  # slow, and no standstill
    ],
)
def test_exclude_pause(seconds, before, counted):
    assert clock.exclude_pause(seconds, before) == counted


def steps_made(folder, monkeypatch, jumps: dict[int, float]) -> int:
    """How many updates a run of five minutes makes whose updates take a second each, with a clock that jumps."""
    now, calls = [0.0], [0]

    def tick() -> float:
        calls[0] += 1
        now[0] += 1.0 + jumps.get(calls[0], 0.0)
        return now[0]

    monkeypatch.setattr(updates.clock, "awake_seconds", tick)
    config = replace(CONFIG, minutes=5.0, steps=0, accumulation_steps=1, eval_interval=1000)
    state = new_state(config, TOKENS)
    assert train(state, new_run(folder)) is True
    assert state.seconds == pytest.approx(state.step, rel=0.02)
    return state.step


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("call", [12, 40, 200])
def test_a_run_paused_for_a_day_uses_its_minutes(tmp_path, monkeypatch, call):
    """As by Ctrl-Z, or in a virtual machine that was paused."""
    usual = steps_made(tmp_path / "usual", monkeypatch, {})
    assert 200 < usual < 290
    assert steps_made(tmp_path / "stopped", monkeypatch, {call: 86_400.0}) == usual
