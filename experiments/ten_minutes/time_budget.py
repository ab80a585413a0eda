"""Training for a given time: the number of updates, and with it the schedule, is estimated during the run."""

import time
from collections.abc import Callable

from tricycle_cli.updates import UNTIMED_STEPS


class Budget:
    """A time budget of a training, which estimates the number of updates that fit into it.

    Args:
        seconds: of the clock.
        clock: `time.perf_counter` on the wall, `time.process_time` of the processor, all threads of it together.
        spent: seconds that are over before the first update.
        reserve: what is to be done after the last update, in updates.
    """

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.process_time, spent: float = 0.0, reserve: float = 0.0
    ) -> None:
        self.seconds, self.clock, self.reserve, self.step = seconds, clock, reserve, 0
        self._started = clock() - spent
        self._timed_from = 0.0

    @property
    def used(self) -> float:
        """Return the seconds used so far, `spent` included."""
        return self.clock() - self._started

    def total_steps(self) -> int:
        """Count one update, and return the estimated number of updates in the budget; 0 if unknown.

        The first few updates take longer than others and do not count. Rates fall with the share of the time that is
        over, and reach the end of the schedule with the last update: nothing depends on a first guess.
        """
        self.step += 1
        used = self.used
        if self.step <= UNTIMED_STEPS:
            self._timed_from = used
            return self.step if used >= self.seconds else 0
        each = (used - self._timed_from) / (self.step - UNTIMED_STEPS)
        return self.step + max(0, round((self.seconds - used) / max(each, 1e-9) - self.reserve))
