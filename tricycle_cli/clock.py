"""A monotonic clock for time limits in minutes, which stops while the machine sleeps."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Sequence

MIN_PAUSE = 10.0  # seconds; shorter pauses count as work
MIN_HISTORY, MAX_HISTORY = 4, 100  # number of earlier times for the comparison


def awake_seconds() -> float:
    """Return the seconds of a monotonic clock that stops while the machine sleeps, as Linux's monotonic clock does."""
    if sys.platform == "win32":
        ticks = ctypes.c_ulonglong()
        ctypes.WinDLL("kernelbase").QueryUnbiasedInterruptTimePrecise(ctypes.byref(ticks))
        return ticks.value * 1e-7  # counted in 100 nanoseconds
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_UPTIME_RAW)
    return time.monotonic()


def exclude_pause(seconds: float, history: Sequence[float]) -> float:
    """Return `seconds`, or, above 10 s and 10 times the median of the last 4 to 100 `history` times, that median.

    Args:
        seconds: the elapsed time of the work.
        history: the earlier times of the same work.
    """
    if seconds <= MIN_PAUSE or len(history) < MIN_HISTORY:
        return seconds
    usual = statistics.median(history[-MAX_HISTORY:])
    return usual if seconds > 10 * usual else seconds
