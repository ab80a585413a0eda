"""Send the lines of metrics.jsonl to experiment trackers, each in a separate thread, so that training never waits.

A tracker that fails gets no further metrics, and one line informs the user. A resumed run sends the missing lines from
metrics.jsonl, so that trackers finally have the content of metrics.jsonl. There are two exceptions, both for trackers
that cannot rewind: after a rollback (--on-nan rollback) they keep the discarded values, and after a kill they keep the
tokens/s of updates that were computed twice.
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
Position = tuple[int, int]  # a step, and the number of a line of that step

FILE = "tracking.json"
START: Position = (-1, 0)
MAX_QUEUED = 20_000  # messages for a tracker that does not respond
# Seconds to wait for trackers: at the start, at the end, and after a signal.
START_TIMEOUT, TIMEOUT, SIGNAL_TIMEOUT = 20.0, 60.0, 2.0


class Tracking:
    """The trackers of a run.

    Args:
        names: names of `TRACKERS`.
        folder: the run folder, whose tracking.json contains the run's ids in the trackers.
        run_settings: the settings of the run.
        print_line: prints a line.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        run_settings: Mapping[str, Any],
        print_line: Callable[[str], None] = print,
    ) -> None:
        self.path, self.print_line = folder / FILE, print_line
        self._lock = threading.Lock()
        self.known = _read(self.path) if names else {}
        self._workers = [_Worker(self, name, folder, run_settings) for name in dict.fromkeys(names)]

    def start(self) -> Tracking:
        """Start the threads; wait up to 20 s until each tracker has started or failed, raise nothing; return self."""
        end = time.monotonic() + START_TIMEOUT
        for worker in self._workers:
            worker.thread.start()
        for worker in self._workers:
            worker.ready.wait(max(0.0, end - time.monotonic()))
        return self

    def synchronize(self, lines: Sequence[Line]) -> None:
        """Send all lines of metrics.jsonl when the run starts, resumes or was rolled back; trackers rewind to them."""
        self._send("synchronize", list(lines))

    def log(self, lines: Sequence[Line]) -> None:
        """Pass lines that were appended to metrics.jsonl to the trackers' threads, without waiting for them."""
        self._send("log", list(lines))

    def _send(self, action: str, content: Any) -> None:
        """Send an action and its content to all trackers' workers, without waiting."""
        for worker in self._workers:
            worker.send(action, content)

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish all trackers at the end of this context, and wait up to 60 s for them (2 s after a signal)."""
        went_well, timeout = False, TIMEOUT
        try:
            yield
            went_well = True
        except KeyboardInterrupt:
            timeout = SIGNAL_TIMEOUT
            raise
        finally:
            self._send("finish", went_well)
            end = time.monotonic() + timeout
            for worker in self._workers:
                worker.wait(max(0.0, end - time.monotonic()))

    def save_position(self, name: str, id: str, position: Position) -> None:
        """Store a tracker's id of the run and the position of the last line that it has, in tracking.json."""
        with self._lock:
            self.known[name] = {"id": id, "step": position[0], "part": position[1]}
            with atomic_write(self.path, text=True) as file:
                json.dump(self.known, file, indent=2)


class _Worker:
    """One tracker and its thread.

    Attributes:
        ready: set when the tracker has started or failed.
    """

    def __init__(self, tracking: Tracking, name: str, folder: Path, run_settings: Mapping[str, Any]) -> None:
        self.tracking, self.name, self.run_settings = tracking, name, run_settings
        kept = tracking.known.get(name, {})
        self.is_new = not kept
        self.tracker = TRACKERS[name](folder, kept.get("id") or secrets.token_hex(4))
        self.position: Position = (kept["step"], kept["part"]) if kept else START
        self.ready = threading.Event()
        self._messages: queue.Queue[tuple[str, Any]] = queue.Queue(MAX_QUEUED)
        self._has_failed = False
        self.thread = threading.Thread(target=self._work, name=f"track {name}", daemon=True)

    # -------------------------------------------------------------------- in the run's thread
    def send(self, action: str, content: Any) -> None:
        """Queue a message without waiting; a full queue counts as the tracker's failure, after which none are sent."""
        if self._has_failed:
            return
        try:
            self._messages.put_nowait((action, content))
        except queue.Full:
            self._fail("it does not respond")

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until the tracker has finished; after that count it as failed and print a line."""
        if not self._has_failed:
            self.thread.join(seconds)
        if self.thread.is_alive() and not self._has_failed:
            self._fail(f"it did not finish within {seconds:.0f} s")

    def _fail(self, why: str) -> None:
        """Mark the tracker as failed, and print why on one line."""
        self._has_failed = True
        advice = "the run continues without this tracker; --resume sends the missing metrics"
        self.tracking.print_line(f"--track {self.name}: {on_one_line(why)}; {advice}")

    # -------------------------------------------------------------------- in the tracker's thread
    def _work(self) -> None:
        """Pass the messages to the tracker, until "finish" or the first failure, which is printed."""
        try:
            self.tracker.start(self.run_settings, self.is_new)
            self._save_position()
            self.tracking.print_line(f"tracking with {self.name}: {self.tracker.where}")
            self.ready.set()
            while not self._has_failed:
                action, content = self._messages.get()
                if action == "finish":
                    self.tracker.finish(content)
                    self._save_position()
                    return
                if action == "synchronize":
                    self._rewind(content)
                self._log(content)
        except BaseException as error:  # some libraries call sys.exit
            if not self._has_failed:
                self._fail(f"{type(error).__name__}: {error}")
        finally:
            self.ready.set()

    def _rewind(self, lines: Sequence[Line]) -> None:
        """Rewind a tracker that can do so, and its position, to the last step of `lines` if it is further."""
        if self.tracker.rewinds and self.position != START:
            last = max((line["step"] for line in lines), default=0)
            step = min(last, self.position[0])
            self.tracker.rewind(step)
            self.position = (step, -1)

    def _log(self, lines: Sequence[Line]) -> None:
        """Log lines after the position, without values the tracker has; flush it; advance and save the position."""
        for line in lines:
            step, position = line["step"], _position(line)
            if position <= self.position:
                continue
            values = {name: value for name, value in _numbers(line).items() if not self.tracker.has(step, name)}
            if values:
                self.tracker.log(step, values)
            self.position = position
        self.tracker.flush()
        if self.tracker.keeps:
            self._save_position()

    def _save_position(self) -> None:
        """Save the tracker's run id and how far it has read metrics.jsonl."""
        self.tracking.save_position(self.name, self.tracker.id, self.position)


def _position(line: Line) -> Position:
    """Return (step, 0 for an update, 1 for an evaluation or 2 for the final metrics) of a line."""
    return line["step"], 2 if "final_loss" in line else 1 if "held_out_loss" in line else 0


def _numbers(line: Line) -> dict[str, float]:
    """Return the finite numbers of a line by name, without `step` and Booleans."""
    items = [(name, value) for name, value in line.items() if name != "step" and type(value) in (int, float)]
    return {name: value for name, value in items if math.isfinite(value)}


def _read(path: Path) -> dict[str, Any]:
    """Return the valid entries of tracking.json; trackers without a valid entry start a new run."""
    kinds = {"id": str, "step": int, "part": int}
    with contextlib.suppress(ValueError, OSError):
        entries = [(name, kept) for name, kept in read_json_object(path).items() if isinstance(kept, dict)]
        return {name: kept for name, kept in entries if all(type(kept.get(key)) is kinds[key] for key in kinds)}
    return {}
