"""Send the lines of metrics.jsonl to trackers, each in its own thread: training waits for none of them.

A tracker that fails is left out from then on, and one line tells the user. What it lacks, because it failed, was killed
or was not there before, it gets when the run is resumed: metrics.jsonl has everything. So in the end trackers have what
metrics.jsonl has, with two exceptions, both of trackers that cannot rewind: after a rollback (--on-nan rollback) they
keep the values that were given up, and after a kill the speed of updates that were made twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tricycle.system.files import atomic_write, read_json_object
from tricycle_cli.flags import on_one_line
from tricycle_cli.trackers import TRACKERS

Line = Mapping[str, Any]
Place = tuple[int, int]  # a step, and what comes first of that step

FILE = "tracking.json"
START: Place = (-1, 0)
MOST_WAITING = 20_000  # pieces of news for a tracker that does not answer
# Seconds to wait for trackers: at the beginning, at the end, and where a signal ended the run.
START_PATIENCE, PATIENCE, SHORT_PATIENCE = 20.0, 60.0, 2.0


class Tracking:
    """All trackers of a run.

    Args:
        names: of `TRACKERS`.
        folder: the run's. tracking.json in it says under which ids trackers know the run.
        facts: what trackers say of the run: its config.
        say: prints a line.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, facts: Mapping[str, Any], say: Callable[[str], None] = print
    ) -> None:
        self.path, self.say = folder / FILE, say
        self._lock = threading.Lock()
        self.known = _read(self.path) if names else {}
        self._workers = [_Worker(self, name, folder, facts) for name in dict.fromkeys(names)]

    def start(self) -> Tracking:
        """Wait a while for all to be ready, so that what they load takes nothing from the first updates."""
        end = time.monotonic() + START_PATIENCE
        for worker in self._workers:
            worker.thread.start()
        for worker in self._workers:
            worker.ready.wait(max(0.0, end - time.monotonic()))
        return self

    def begin(self, lines: Sequence[Line]) -> None:
        """Tell trackers the lines of metrics that the run has when it begins, resumes or was rolled back."""
        self._tell("begin", list(lines))

    def log(self, lines: Sequence[Line]) -> None:
        """Send lines that were added to metrics.jsonl."""
        self._tell("log", list(lines))

    def _tell(self, verb: str, what: Any) -> None:
        for worker in self._workers:
            worker.tell(verb, what)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish all trackers at the end of this block."""
        went_well, patience = False, PATIENCE
        try:
            yield
            went_well = True
        except KeyboardInterrupt:
            patience = SHORT_PATIENCE
            raise
        finally:
            self._tell("finish", went_well)
            end = time.monotonic() + patience
            for worker in self._workers:
                worker.wait(max(0.0, end - time.monotonic()))

    def keep(self, name: str, id: str, place: Place) -> None:
        """Remember under which id a tracker knows the run, and up to where it has everything."""
        with self._lock:
            self.known[name] = {"id": id, "step": place[0], "part": place[1]}
            with atomic_write(self.path, text=True) as file:
                json.dump(self.known, file, indent=2)


class _Worker:
    """One tracker and its thread.

    Attributes:
        ready: the tracker has begun, or failed.
    """

    def __init__(self, tracking: Tracking, name: str, folder: Path, facts: Mapping[str, Any]) -> None:
        self.tracking, self.name, self.facts = tracking, name, facts
        kept = tracking.known.get(name, {})
        self.is_new = not kept
        self.tracker = TRACKERS[name](folder, kept.get("id") or secrets.token_hex(4))
        self.place: Place = (kept["step"], kept["part"]) if kept else START
        self.ready = threading.Event()
        self._news: queue.Queue[tuple[str, Any]] = queue.Queue(MOST_WAITING)
        self._has_failed = False
        self.thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)

    # -------------------------------------------------------------------- in the run's thread
    def tell(self, verb: str, what: Any) -> None:
        """Queue some news without waiting."""
        if self._has_failed:
            return
        try:
            self._news.put_nowait((verb, what))
        except queue.Full:
            self._fail("it does not answer")

    def wait(self, seconds: float) -> None:
        """Wait until the tracker has finished."""
        if self._has_failed:
            return
        self.thread.join(seconds)
        if self.thread.is_alive() and not self._has_failed:
            self._fail(f"it had not ended after {seconds:.0f} s")

    def _fail(self, why: str) -> None:
        self._has_failed = True
        self.tracking.say(f"--track {self.name}: {on_one_line(why)}; the run goes on without. --resume makes up for it")

    # -------------------------------------------------------------------- in the tracker's thread
    def _work(self) -> None:
        """Pass the news on to the tracker, until the end or the first failure."""
        try:
            self.tracker.start(self.facts, self.is_new)
            self._keep()
            self.tracking.say(f"tracked: {self.tracker.where}")
            self.ready.set()
            while not self._has_failed:
                verb, what = self._news.get()
                if verb == "finish":
                    self.tracker.finish(what)
                    self._keep()
                    return
                if verb == "begin":
                    self._begin(what)
                self._log(what)
        except BaseException as error:  # whatever a library raises: some leave the program
            if not self._has_failed:
                self._fail(f"{type(error).__name__}: {error}")
        finally:
            self.ready.set()

    def _begin(self, lines: Sequence[Line]) -> None:
        """Rewind a tracker to where the run is."""
        if self.tracker.rewinds and self.place != START:
            last = max((line["step"] for line in lines), default=0)
            step = min(last, self.place[0])
            self.tracker.rewind(step)
            self.place = (step, -1)

    def _log(self, lines: Sequence[Line]) -> None:
        """Log what the tracker lacks of these lines."""
        for line in lines:
            step, place = line["step"], _place(line)
            if place <= self.place:
                continue
            values = {name: value for name, value in _numbers(line).items() if not self.tracker.has(step, name)}
            if values:
                self.tracker.log(step, values)
            self.place = place
        self.tracker.flush()
        if self.tracker.keeps:
            self._keep()

    def _keep(self) -> None:
        self.tracking.keep(self.name, self.tracker.id, self.place)


def _place(line: Line) -> Place:
    """Return the place of a line: of one step first the update, then the estimate, then the final figures."""
    return line["step"], 2 if "final_loss" in line else 1 if "held_out_loss" in line else 0


def _numbers(line: Line) -> dict[str, float]:
    numbers = {name: value for name, value in line.items() if name != "step" and type(value) in (int, float)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _read(path: Path) -> dict[str, Any]:
    """Return the sound entries of tracking.json; trackers without one begin a new run."""
    with contextlib.suppress(ValueError, OSError):
        return {name: kept for name, kept in read_json_object(path).items() if _is_sound(kept)}
    return {}


def _is_sound(kept: Any) -> bool:
    if not isinstance(kept, dict) or not isinstance(kept.get("id"), str):
        return False
    return all(type(kept.get(name)) is int for name in ("step", "part"))
