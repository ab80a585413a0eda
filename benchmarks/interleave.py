"""Sides of a comparison take turns, long enough for each to run as it does in a long training.

Threads of BLAS and OpenMP wait for more work by spinning, for up to a fifth of a second: long enough to slow down
whoever comes next. After a pause the first steps are slow, too, until the system has spread the threads over the cores
again, and a processor that was idle runs faster than it can for long. So a turn begins with seconds that do not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

PAUSE_SECONDS = 0.5  # seconds between two sides
T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """How long a side works before the next one does.

    Attributes:
        turns: of each side.
        seconds: of a turn, that count; at least one step does.
        settling: seconds before those, that do not.
    """

    rounds: int = 3
    seconds: float = 10.0
    settling: float = 3.0

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", "--turns", type=int, default=Schedule.rounds, help="of each side")
        parser.add_argument("--seconds", type=float, default=Schedule.seconds, help="of a turn, that count")
        parser.add_argument("--settling", type=float, default=Schedule.settling, help="seconds of a turn before those")

    @staticmethod
    def of(arguments: argparse.Namespace) -> Schedule:
        """As the flags say."""
        return Schedule(**{field.name: getattr(arguments, field.name) for field in fields(Schedule)})

    def __str__(self) -> str:
        return f"{self.rounds} turns of {self.seconds:g} seconds after {self.settling:g} that do not count"


def run_interleaved(sides: Sequence[Callable[[], T]], pace: Schedule) -> list[list[T]]:
    """What each side's steps that count gave.

    Args:
        sides: each makes a step when it is called; the first step, which may compile, never counts.
    """
    answers: list[list[T]] = [[] for _ in sides]
    for step in sides:
        step()
    for _ in range(pace.rounds):
        for step, results in zip(sides, answers):
            time.sleep(PAUSE_SECONDS)
            settled = time.perf_counter() + pace.settling
            while time.perf_counter() < settled:
                step()
            end = time.perf_counter() + pace.seconds
            results.append(step())
            while time.perf_counter() < end:
                results.append(step())
    return answers
