"""Interleaved measurement of the sides of a comparison, and the answers of their worker processes.

A side is one of the compared implementations: a library, or a library with certain settings.

Workers of other libraries import this module, because it imports none: their memory is measured.

Idle BLAS and OpenMP threads spin for up to 0.2 s while they wait for more work, which slows down the next side. After
a pause the first steps are slow, too, until the system has distributed the threads over the cores, and a processor that
was idle runs at a higher clock than it can sustain. Each round therefore starts with a warm-up that is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

PAUSE_SECONDS = 0.5  # between two sides
T = TypeVar("T")


def positive_int(text: str) -> int:
    """Convert the text of a command-line flag to an integer; ArgumentTypeError unless it is above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return int(text)


@dataclass(frozen=True)
class Schedule:
    """The number of rounds of each side, and their duration.

    Attributes:
        rounds: of each side.
        seconds: measured in a round; at least one step is measured.
        warmup: seconds before those, which are not measured.
    """

    rounds: int = 3
    seconds: float = 10.0
    warmup: float = 3.0

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """Add --rounds, --seconds and --warmup to a parser, with the defaults of Schedule."""
        parser.add_argument(
            "--rounds", "--turns", type=positive_int, default=Schedule.rounds, help="rounds of each side"
        )
        parser.add_argument("--seconds", type=float, default=Schedule.seconds, help="measured seconds of a round")
        parser.add_argument(
            "--warmup", "--settling", type=float, default=Schedule.warmup, help="seconds of warm-up in a round"
        )

    @staticmethod
    def from_arguments(arguments: argparse.Namespace) -> Schedule:
        """Return the Schedule of the parsed flags that `add_flags` has added."""
        return Schedule(**{field.name: getattr(arguments, field.name) for field in fields(Schedule)})

    def __str__(self) -> str:
        """Return rounds, measured seconds and warm-up as words, such as "8 interleaved rounds of 1 s after ..."."""
        return f"{self.rounds} interleaved rounds of {self.seconds:g} s after a warm-up of {self.warmup:g} s"


def add_comparison_flags(parser: argparse.ArgumentParser) -> None:
    """Add --peer and --threads of a comparison with PyTorch, and the flags of `Schedule`, to a parser."""
    parser.add_argument("--peer", choices=["torch", "none"], default="torch", help="library to compare with")
    parser.add_argument("--threads", type=positive_int, default=os.cpu_count() or 1, help="threads of each side")
    Schedule.add_flags(parser)


def run_interleaved(sides: Sequence[Callable[[], T]], schedule: Schedule) -> list[list[T]]:
    """Call the sides in interleaved rounds; return for each side the list of what its measured calls returned.

    Args:
        sides: functions that make one step; the first step of each, which may compile, is not measured.
    """
    results: list[list[T]] = [[] for _ in sides]
    for step in sides:
        step()
    for _ in range(schedule.rounds):
        for step, side_results in zip(sides, results):
            time.sleep(PAUSE_SECONDS)
            end = time.perf_counter() + schedule.warmup
            while time.perf_counter() < end:
                step()
            end = time.perf_counter() + schedule.seconds
            side_results.append(step())
            while time.perf_counter() < end:
                side_results.append(step())
    return results


def run_rounds(sides: Mapping[str, Callable[[], T]], n_rounds: int) -> dict[str, list[T]]:
    """Call each side once in each of `n_rounds` + 1 rounds; return its results but the first, which is a warm-up."""
    rounds = [{name: side() for name, side in sides.items()} for _ in range(n_rounds + 1)]
    return {name: [results[name] for results in rounds[1:]] for name in sides}


# -------------------------------------------------------------------- worker processes
def answer_requests(step: Callable[[], Any], answers: Mapping[str, Callable[[], Any]]) -> None:
    """Answer stdin lines in JSON: "step" by the seconds of a step, others by the functions in `answers`."""

    def timed_step() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    all_answers = {**answers, "step": timed_step}
    for line in sys.stdin:
        print(json.dumps(all_answers[line.strip()]()), flush=True)


def peak_memory_mb() -> float:
    """Return the peak memory of this process in MB, 0 if the system does not report it."""
    if sys.platform == "linux":  # where the resource usage of a new process begins with the peak of its parent
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e6
    if sys.platform == "win32":
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
