"""A clock for limits in minutes: it never jumps, and stands still while the machine sleeps."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Sequence

STANDSTILL = 10.0  # seconds: shorter ones do not matter
LEAST_BEFORE, LATEST = 4, 100  # with how many earlier times one is compared: at least, and at most


def awake_seconds() -> float:
    """Seconds that the machine has been awake since some moment.

    Nobody sets this clock. Linux's monotonic clock stands still in sleep anyway; macOS and Windows have others that do.
    """
    if sys.platform == "win32":
        ticks = ctypes.c_ulonglong()
        ctypes.WinDLL("kernelbase").QueryUnbiasedInterruptTimePrecise(ctypes.byref(ticks))
        return ticks.value * 1e-7  # counted in 100 nanoseconds
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_UPTIME_RAW)
    return time.monotonic()


def without_standstill(seconds: float, before: Sequence[float]) -> float:
    """How long some work took, but for a time in which the process stood still though the machine was awake.

    Ctrl-Z does that, or a virtual machine that is paused: work that took more than 10 s and more than ten times what
    it takes usually counts as that.

    Args:
        before: how long the same work took before; with nothing to compare with, all counts.
    """
    if seconds <= STANDSTILL or len(before) < LEAST_BEFORE:
        return seconds
    usual = statistics.median(before[-LATEST:])
    return usual if seconds > 10 * usual else seconds
