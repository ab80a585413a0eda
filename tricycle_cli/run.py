"""Read and write the files of a run folder: metrics, samples and checkpoints.

A run folder contains config.json, data.json, tokeniser.json, metrics.jsonl, samples.txt, loss.png (without matplotlib
loss.svg), and the checkpoints last.safetensors and best.safetensors; with --track also tracking.json and the files of
the trackers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tricycle.checkpoint import NonFiniteCheckpointError
from tricycle.distributed.processes import SINGLE_PROCESS, ProcessGroup
from tricycle.distributed.shards import gather_state
from tricycle.system.files import append_lines, atomic_write, check_regular_file, read_file
from tricycle.tokeniser import Tokeniser
from tricycle.training import NonFiniteError
from tricycle.training_state import TrainingState
from tricycle_cli.full_disk import OnFullDisk, retry_on_full_disk
from tricycle_cli.tracking import Tracking

OnNaN = Literal["stop", "skip", "rollback"]
T = TypeVar("T")

MAX_BUFFERED_LINES, MAX_BUFFERED_SECONDS = 50, 5.0  # of metrics that are not yet written
MAX_LINE_LENGTH = 10_000  # characters: no run writes a tenth of it
MAX_METRICS_BYTES = 2**28  # a million updates need half of it
NUMERIC_FIELDS = """
loss learning_rate gradient_norm tokens_per_second held_out_loss bits_per_byte final_loss final_bits_per_byte best_step
reward_margin reward_accuracy
""".split()


@dataclass
class Run:
    """The run folder of a training run, and its options for printing, stopping and error handling.

    Attributes:
        folder: the run folder.
        tokeniser: the tokenizer that is stored in checkpoints.
        print_line: prints a line above the progress bar.
        stop: returns True when the run should save and stop; called after every update.
        interruptible: a context manager for work that a signal may interrupt at any time.
        on_nan: when a loss or gradient is NaN or infinite: "stop" the run, "skip" the update, or "rollback" to the last
            checkpoint and continue with the batches after the bad one.
        spent: seconds of preparation, which count towards the config's `minutes`.
        show_progress: show a progress bar.
        on_full_disk: "wait" for free space, or "stop" with an error; saved checkpoints stay intact in both cases.
        processes: the process group of the run. Only rank zero prints and writes.
        tracking: the experiment trackers, which get the lines of metrics.jsonl.
    """

    folder: Path
    tokeniser: Tokeniser | None = None
    print_line: Callable[[str], None] = print
    stop: Callable[[], bool] = lambda: False
    interruptible: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    on_nan: OnNaN = "skip"
    spent: float = 0.0
    show_progress: bool = True
    on_full_disk: OnFullDisk = "stop"
    processes: ProcessGroup = SINGLE_PROCESS
    tracking: Tracking | None = None
    _log: list[dict[str, Any]] = field(default_factory=list)
    _flushed: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Set the paths of the checkpoints `last` and `best`, `metrics` and `samples` in the run folder."""
        self.last, self.best = self.folder / "last.safetensors", self.folder / "best.safetensors"
        self.metrics, self.samples = self.folder / "metrics.jsonl", self.folder / "samples.txt"

    def write(self, writing: Callable[[], T]) -> T:
        """Call a function that writes to the folder, and return its result; on a full disk wait or raise an error.

        Raises:
            OSError: writing failed.
        """
        return retry_on_full_disk(writing, self.folder, self.on_full_disk, self.print_line, self._stop_waiting)

    def _stop_waiting(self) -> bool:
        """Answer the pings of other ranks, which wait for this one; return whether this rank is to stop."""
        self.processes.answer_pings()  # the other ranks wait for this rank
        return self.stop()

    def should_stop(self) -> bool:
        """Return whether any rank should stop; a collective call with the same result on all ranks."""
        return self.processes.any(self.stop())

    def has(self, path: Path) -> bool:
        """Return whether a file exists on rank zero; a collective call."""
        return self.processes.broadcast(path.exists())

    def record(self, **values: Any) -> None:
        """Append a line to metrics.jsonl on rank zero, buffered for a few seconds or lines; non-finite is null."""
        if not self.processes.is_rank_zero:
            return
        self._log.append({name: _as_json(value) for name, value in values.items()})
        is_late = time.monotonic() - self._flushed >= MAX_BUFFERED_SECONDS
        if is_late or len(self._log) >= MAX_BUFFERED_LINES:
            self.flush()

    def record_nonfinite_step(self, step: int, reason: str, action: str, **more: Any) -> None:
        """Write `reason` and `action` ("skip", "stop", "rollback") for a NaN to metrics.jsonl at once; print both."""
        self.record(step=step, not_finite=reason, on_nan=action, **more)
        self.flush()
        messages = {
            "skip": "the update is skipped",
            "stop": "the run stops; its checkpoints are unchanged",
            "rollback": f"rollback to the checkpoint of step {step}; training continues with the following batches",
        }
        self.print_line(f"step {more.get('bad_step', step)}: {reason}: {messages[action]}")

    def flush(self) -> None:
        """Append the buffered lines to metrics.jsonl, send them to the trackers, and empty the buffer."""
        if not self._log:
            return
        text = "".join(json.dumps(line) + "\n" for line in self._log)
        self.write(lambda: append_lines(self.metrics, text))
        if self.tracking is not None:
            self.tracking.log(self._log)
        self._log.clear()
        self._flushed = time.monotonic()

    def save(self, state: TrainingState, path: Path) -> None:
        """Save metrics and checkpoint (collective); if not finite, lower state.step by 1 and raise NonFiniteError.

        Raises:
            NonFiniteError: a weight or a value of the optimizer state is not finite; nothing is saved.
        """
        self.processes.set_status("a checkpoint")
        self.flush()
        problem = ""
        states = gather_state(state.optimiser, state.model)
        if self.processes.is_rank_zero:
            state.samples_size = self.samples.stat().st_size if self.samples.exists() else 0
            try:
                self.write(lambda: state.save(path, self.tokeniser, states))
            except NonFiniteCheckpointError as error:
                problem = str(error)
        problem = self.processes.broadcast(problem)
        if problem:
            state.step -= 1  # the last update counts as the bad one
            raise NonFiniteError(f"step {state.step + 1}: {problem}")

    def truncate_to(self, state: TrainingState) -> None:
        """On rank zero remove metrics and samples that came after `state`; pass the kept metrics to the trackers."""
        if not self.processes.is_rank_zero:
            return
        kept = [line for line in read_metrics(self.metrics) if _is_past(line, state)]
        text = "".join(json.dumps(line) + "\n" for line in kept)

        def rewrite() -> None:
            with atomic_write(self.metrics, text=True) as file:
                file.write(text)

        self.write(rewrite)
        if self.tracking is not None:
            self.tracking.synchronize(kept)
        check_regular_file(self.samples)
        if self.samples.exists() and 0 <= state.samples_size < self.samples.stat().st_size:
            os.truncate(self.samples, state.samples_size)


def _as_json(value: Any) -> Any:
    """Return a value for metrics.jsonl: numbers with six digits, None for NaN and infinity."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _is_past(line: dict[str, Any], state: TrainingState) -> bool:
    """Return whether a resumed run keeps a metrics line: it will not write the line's update or evaluation again."""
    if line["step"] != state.step:
        return line["step"] < state.step
    if line.get("on_nan") == "rollback":
        return line.get("rollback", 0) <= state.n_rollbacks
    if "loss" in line or "on_nan" in line:
        return True
    return state.evaluated_step == state.step and "final_loss" not in line  # the evaluation before early stopping


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return a metrics.jsonl's dicts with an int `step` and no null metric; skip bad lines; [] without a file."""
    lines = []
    if path.is_file():
        for text in read_file(path, MAX_METRICS_BYTES).decode("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                lines.append(json.loads(text[:MAX_LINE_LENGTH]))
    return [line for line in lines if isinstance(line, dict) and _is_sound(line)]


def _is_sound(line: dict[str, Any]) -> bool:
    """Return whether a line of metrics has an integer `step` of 64 bits and no metric that is not a number."""
    numbers, step = (line[name] for name in NUMERIC_FIELDS if name in line), line.get("step")
    return type(step) is int and abs(step) < 2**63 and all(type(number) in (int, float) for number in numbers)
