"""The folder of a run: its metrics, its checkpoints, and what the run prints.

A run folder holds config.json, data.json, tokeniser.json, metrics.jsonl, samples.txt, loss.png (without matplotlib
loss.svg), and the checkpoints last.safetensors and best.safetensors; with --track also tracking.json, and files of
trackers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tricycle.checkpoint import NotFiniteError
from tricycle.distributed.processes import SINGLE_PROCESS, ProcessGroup
from tricycle.distributed.shards import gather_state
from tricycle.system.files import append, atomic_write, expect_plain, read_file
from tricycle.tokeniser import Tokeniser
from tricycle.training import NonFiniteError
from tricycle.training_state import TrainingState
from tricycle_cli.full_disk import OnFullDisk, retry_on_full_disk
from tricycle_cli.tracking import Tracking

OnNaN = Literal["stop", "skip", "rollback"]
T = TypeVar("T")

LINES_GATHERED = 50
LONGEST_LINE = 10_000  # characters of metrics: no run writes a tenth of it
MOST_METRICS = 2**28  # bytes: a million updates have half of it
NUMBERS = """
loss learning_rate gradient_norm tokens_per_second held_out_loss bits_per_byte final_loss final_bits_per_byte best_step
reward_margin reward_accuracy
""".split()


@dataclass
class Run:
    """The files of a run, and how it prints and stops.

    Attributes:
        folder: the run folder.
        tokeniser: stored in checkpoints.
        say: prints a line above the progress bar.
        stop: asked after every update; True saves and leaves.
        interruptible: a block of work that `Interrupted` may end at any moment.
        on_nan: what is done where a loss or a gradient is NaN or infinite: the run ends; the update is left out; or all
            goes back to the last checkpoint and on from there with the batches that come after the bad one.
        spent: seconds that preparing took; they count towards `minutes`.
        on_full_disk: "wait" until there is room, or "stop" with an error; what was saved is whole either way.
        processes: those that train together. All make a run alike; rank 0 alone speaks and writes.
        tracking: gets what metrics.jsonl gets.
    """

    folder: Path
    tokeniser: Tokeniser | None = None
    say: Callable[[str], None] = print
    stop: Callable[[], bool] = lambda: False
    interruptible: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    on_nan: OnNaN = "skip"
    spent: float = 0.0
    show_progress: bool = True
    on_full_disk: OnFullDisk = "stop"
    processes: ProcessGroup = SINGLE_PROCESS
    tracking: Tracking | None = None
    _log: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last, self.best = self.folder / "last.safetensors", self.folder / "best.safetensors"
        self.metrics, self.samples = self.folder / "metrics.jsonl", self.folder / "samples.txt"

    def write(self, writing: Callable[[], T]) -> T:
        """What a function returns that writes into the folder, which may have to wait for room.

        Raises:
            OSError: of the disk.
        """
        return retry_on_full_disk(writing, self.folder, self.on_full_disk, self.say, self._stop_waiting)

    def _stop_waiting(self) -> bool:
        self.processes.answer_pings()  # the others wait, too
        return self.stop()

    def should_stop(self) -> bool:
        """Whether any of the processes is to stop; all ask, and all get the same answer."""
        return self.processes.any(self.stop())

    def has(self, path: Path) -> bool:
        """Whether a file is there, as rank 0 sees it."""
        return self.processes.broadcast(path.exists())

    def record(self, **values: Any) -> None:
        """Add a line to metrics.jsonl; a few are gathered before they are written.

        What is NaN or infinite is null there: JSON has no words for it.
        """
        if not self.processes.is_rank_zero:
            return
        self._log.append({name: _as_json(value) for name, value in values.items()})
        if len(self._log) >= LINES_GATHERED:
            self.flush()

    def record_nonfinite_step(self, step: int, reason: str, action: str, **more: Any) -> None:
        """Say in metrics.jsonl and on the screen what was not finite, and what was done."""
        self.record(step=step, not_finite=reason, on_nan=action, **more)
        self.flush()
        done = {
            "skip": "its update is left out",
            "stop": "the run ends; its checkpoints are as they were",
            "rollback": f"back to the checkpoint of step {step}, and on with the batches after the bad one",
        }
        self.say(f"step {more.get('bad_step', step)}: {reason}: {done[action]}")

    def flush(self) -> None:
        """Write the lines that were gathered."""
        if not self._log:
            return
        text = "".join(json.dumps(line) + "\n" for line in self._log)
        self.write(lambda: append(self.metrics, text))
        if self.tracking is not None:
            self.tracking.log(self._log)
        self._log.clear()

    def save(self, state: TrainingState, path: Path) -> None:
        """Save a checkpoint, after all that a run which goes on from it takes for granted.

        Raises:
            NonFiniteError: a weight or a moment is not finite; nothing is saved then.
        """
        self.processes.set_status("a checkpoint")
        self.flush()
        problem = ""
        states = gather_state(state.optimiser, state.model)
        if self.processes.is_rank_zero:
            state.samples_size = self.samples.stat().st_size if self.samples.exists() else 0
            try:
                self.write(lambda: state.save(path, self.tokeniser, states))
            except NotFiniteError as error:
                problem = str(error)
        problem = self.processes.broadcast(problem)
        if problem:
            state.step -= 1  # the update that made it so counts as the one that met it
            raise NonFiniteError(f"step {state.step + 1}: {problem}")

    def truncate_to(self, state: TrainingState) -> None:
        """Drop what a resumed run will write again: later updates, and estimates and samples from this step on."""
        if not self.processes.is_rank_zero:
            return
        kept = [line for line in read_metrics(self.metrics) if _is_past(line, state)]
        text = "".join(json.dumps(line) + "\n" for line in kept)

        def rewrite() -> None:
            with atomic_write(self.metrics, text=True) as file:
                file.write(text)

        self.write(rewrite)
        if self.tracking is not None:
            self.tracking.begin(kept)
        expect_plain(self.samples)
        if self.samples.exists() and 0 <= state.samples_size < self.samples.stat().st_size:
            os.truncate(self.samples, state.samples_size)


def _as_json(value: Any) -> Any:
    """A value as a line of metrics has it: six digits of a number, or null where it is none."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _is_past(line: dict[str, Any], state: TrainingState) -> bool:
    """Whether a line of metrics is about what the state has behind it."""
    if line["step"] != state.step:
        return line["step"] < state.step
    if line.get("on_nan") == "rollback":
        return line.get("rollback", 0) <= state.n_rollbacks
    return "loss" in line or "on_nan" in line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a crash cut off, or that has no numbers, is left out."""
    lines = []
    if path.is_file():
        for text in read_file(path, MOST_METRICS).decode("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                lines.append(json.loads(text[:LONGEST_LINE]))
    return [line for line in lines if isinstance(line, dict) and _is_sound(line)]


def _is_sound(line: dict[str, Any]) -> bool:
    numbers = (line[name] for name in NUMBERS if name in line)
    return type(line.get("step")) is int and all(type(number) in (int, float) for number in numbers)
