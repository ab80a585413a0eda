"""A run of training: the loop, its clock, its folder, and what it says.

A run folder holds config.json, tokeniser.json, metrics.jsonl, samples.txt, loss.png, and the checkpoints
last.safetensors and best.safetensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tricycle import devices
from tricycle.configs import GPTConfig
from tricycle.evaluation import HeldOut, evaluate
from tricycle.files import append, atomic_write
from tricycle.generate import generate
from tricycle.models import least_numbers
from tricycle.sampling import Sampling
from tricycle.tokeniser import Tokeniser
from tricycle.training import LEAST_STEPS, TrainingState, read_steps, train_step
from tricycle_cli.full_disk import OnFullDisk, write_with_room

T = TypeVar("T")

# With a limit in minutes, the number of updates is estimated after these, while less than a quarter of the
# time is over; then it stays, and so does everything that depends on it.
ESTIMATE_STEPS = tuple(LEAST_STEPS * 2**doubling for doubling in range(16))
UNTIMED_STEPS = 4  # the first few are slow
UNREAD_STEPS = 50  # on a GPU so many updates are started before their losses are read, which waits for all of them
SAMPLE_TOKENS = 160
SAMPLING = Sampling(temperature=0.8, min_p=0.2, no_repeat_ngram_size=8)  # what suits small models
LINES_GATHERED = 50
NUMBERS = "loss learning_rate gradient_norm tokens_per_second held_out_loss bits_per_byte final_loss".split()
# The final estimate moves its windows on by half their length: each token sees at least half a window before it.
FINAL_OVERLAP = 2


@dataclass
class Run:
    """Where a run leaves its files, and how it speaks.

    Attributes:
        folder: the run folder.
        say: prints a line above the progress bar.
        stop: asked after every update; True saves and leaves.
        spent: seconds that preparing took; they count towards `minutes`.
        on_full_disk: "wait" until there is room, or "stop" with an error; what was saved is whole either way.
    """

    folder: Path
    tokeniser: Tokeniser
    held_out: HeldOut
    say: Callable[[str], None] = print
    stop: Callable[[], bool] = lambda: False
    spent: float = 0.0
    show_progress: bool = True
    on_full_disk: OnFullDisk = "stop"
    _log: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last, self.best = self.folder / "last.safetensors", self.folder / "best.safetensors"
        self.metrics, self.samples = self.folder / "metrics.jsonl", self.folder / "samples.txt"

    def write(self, writing: Callable[[], T]) -> T:
        """What a function returns that writes into the folder, which may have to wait for room.

        Raises:
            OSError: of the disk.
        """
        return write_with_room(writing, self.folder, self.on_full_disk, self.say, self.stop)

    def record(self, **values: Any) -> None:
        """Add a line to metrics.jsonl; a few are gathered before they are written."""
        self._log.append({name: float(f"{v:.6g}") if isinstance(v, float) else v for name, v in values.items()})
        if len(self._log) >= LINES_GATHERED:
            self.flush()

    def flush(self, sync: bool = False) -> None:
        """Write the lines that were gathered.

        Args:
            sync: see that all lines so far are on the disk.
        """
        text = "".join(json.dumps(line) + "\n" for line in self._log)
        self.write(lambda: append(self.metrics, text, sync))
        self._log.clear()

    def save(self, state: TrainingState, path: Path) -> None:
        """Save a checkpoint, after all that a run which goes on from it takes for granted."""
        self.flush(sync=True)
        state.samples_size = self.samples.stat().st_size if self.samples.exists() else 0
        self.write(lambda: state.save(path, self.tokeniser))

    def forget_after(self, state: TrainingState) -> None:
        """Drop what a resumed run will write again: later updates, and estimates and samples from this step on."""
        lines = read_metrics(self.metrics)
        kept = [line for line in lines if line["step"] < state.step or (line["step"] == state.step and "loss" in line)]
        text = "".join(json.dumps(line) + "\n" for line in kept)

        def rewrite() -> None:
            with atomic_write(self.metrics, text=True) as file:
                file.write(text)

        self.write(rewrite)
        if self.samples.exists() and 0 <= state.samples_size < self.samples.stat().st_size:
            os.truncate(self.samples, state.samples_size)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a crash cut off, or that has no numbers, is left out."""
    lines = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and _is_sound(line)]


def _is_sound(line: dict[str, Any]) -> bool:
    numbers = (line[name] for name in NUMBERS if name in line)
    return type(line.get("step")) is int and all(type(number) in (int, float) for number in numbers)


def train(state: TrainingState, run: Run) -> bool:
    """Train until the config's steps or minutes are used up, or `run.stop()` says so.

    The last checkpoint is saved before each held-out estimate and before samples are drawn, and at the end.

    Returns:
        whether training came to its end (and was not stopped).

    Raises:
        NonFiniteError: the loss or a gradient is not finite. The checkpoints are as they were.
        MemoryError: too little of it; says what is free and what to lower.
    """
    with naming_what_to_lower(state.config, next(state.model.parameters()).on_gpu):
        return _train(state, run)


@contextlib.contextmanager
def naming_what_to_lower(config: GPTConfig, on_gpu: bool) -> Iterator[None]:
    """Within this block errors for lack of memory say how much there is, and which settings need less."""
    try:
        yield
    except MemoryError as error:
        there = ""
        if on_gpu:
            free, total = devices.gpu_memory()
            there = f"; {free / 1e9:.1f} GB of the GPU's {total / 1e9:.1f} GB are free"
        advice = f"lower --batch-size (now {config.batch_size}; --accumulation-steps makes up for it)"
        advice += f" or --context-window (now {config.context_window})"
        advice += f", or make the model smaller: it has {least_numbers(config):,} weights"
        if on_gpu and config.precision in ("float32", "tf32"):
            advice += ", or take --precision bfloat16"
        raise MemoryError(f"{str(error).rstrip('.') or 'out of memory'}{there}: {advice}") from None


def _train(state: TrainingState, run: Run) -> bool:
    from tqdm import tqdm

    run.forget_after(state)
    if not run.last.exists():
        run.save(state, run.last)  # a folder that cannot be written says so now, not after hours
    _pause(state, run)  # where the run was left before what was due
    updates = _Updates(state, run)
    with tqdm(
        total=state.total_steps or None,
        initial=state.step,
        unit="step",
        disable=not run.show_progress,
        dynamic_ncols=True,
        mininterval=0.5,
        smoothing=0.05,
    ) as bar:
        while not state.total_steps or state.step < state.total_steps:
            updates.make()
            stopping = updates.limit > 1 and run.stop()
            if stopping or updates.must_be_read():
                said = updates.read()
                bar.total = state.total_steps or None
                bar.set_postfix_str(said, refresh=False)
            bar.update()
            if updates.waiting:
                continue
            if (stopping or run.stop()) and state.step != state.total_steps:
                run.save(state, run.last)
                return False
            _pause(state, run)
    run.save(state, run.last)
    return True


class _Updates:
    """Makes updates, and reads, times and records what they gave: each by itself on a CPU, many at once on a GPU.

    Attributes:
        limit: the most updates that are made before they are read.
        waiting: what those gave that have not been read.
    """

    def __init__(self, state: TrainingState, run: Run) -> None:
        self.state, self.run = state, run
        self.limit = UNREAD_STEPS if next(state.model.parameters()).on_gpu else 1
        self.waiting: list[tuple[Any, Any]] = []
        self._rates: list[float] = []
        self._times: list[float] = []  # of all updates that have been read
        self._started = 0.0

    def make(self) -> None:
        """One more."""
        if not self.waiting:
            self._started = time.perf_counter()
        self.waiting.append(train_step(self.state))
        self._rates.append(self.state.optimiser.learning_rate)

    def must_be_read(self) -> bool:
        """Whether there are enough of them, or something hangs on them."""
        state = self.state
        slow_ones_are_over = len(self._times) + len(self.waiting) == UNTIMED_STEPS
        estimates_hang_on_them = state.step in (*ESTIMATE_STEPS, state.total_steps)
        return len(self.waiting) >= self.limit or slow_ones_are_over or estimates_hang_on_them or _is_due(state)

    def read(self) -> str:
        """Record those that were waiting; returns a line about the last."""
        state, config = self.state, self.state.config
        results = read_steps(state, self.waiting)
        seconds = (time.perf_counter() - self._started) / len(results)
        state.seconds += seconds * len(results)
        self._times += [seconds] * len(results)
        speed = config.batch_size * config.context_window * config.accumulation_steps / seconds
        first = state.step + 1 - len(results)
        for step, (loss, norm), rate in zip(range(first, state.step + 1), results, self._rates):
            self.run.record(step=step, loss=loss, learning_rate=rate, gradient_norm=norm, tokens_per_second=speed)
        self.waiting, self._rates = [], []
        if config.minutes and len(self._times) > UNTIMED_STEPS:
            self._plan()
        return f"loss {loss:.3f}, rate {rate:.1e}, {speed:,.0f} tokens/s"

    def _plan(self) -> None:
        """Set the number of updates by the clock, where it is time for that."""
        state, config = self.state, self.state.config
        used = (self.run.spent + state.seconds) / (config.minutes * 60)
        young = state.step in ESTIMATE_STEPS and used < 1 / 4
        due = used > 1 / 8 or state.step == ESTIMATE_STEPS[0]
        if young or (not state.total_steps and due):
            seconds = float(np.mean(self._times[UNTIMED_STEPS:]))
            state.total_steps = _affordable_steps(state, self.run, seconds)


def _pause(state: TrainingState, run: Run) -> None:
    """A checkpoint, then the held-out estimate and the sample that are due at this step, but not at the last."""
    if state.step in (0, state.total_steps) or not _is_due(state):
        return
    run.save(state, run.last)
    if _evaluation_is_due(state):
        estimate(state, run)
    if _sample_is_due(state):
        show_sample(state, run)


def _evaluation_is_due(state: TrainingState) -> bool:
    return state.step % state.config.eval_interval == 0


def _sample_is_due(state: TrainingState) -> bool:
    return state.config.sample_interval > 0 and state.step % state.config.sample_interval == 0


def _is_due(state: TrainingState) -> bool:
    return _evaluation_is_due(state) or _sample_is_due(state)


def _affordable_steps(state: TrainingState, run: Run, seconds_per_step: float) -> int:
    """How many updates fit in the config's minutes, after what has been spent and what the end will cost."""
    config = state.config
    n_tokens = config.batch_size * config.context_window
    # a forward pass alone takes about a third of an update
    forward = seconds_per_step / config.accumulation_steps / 3
    final = FINAL_OVERLAP * len(run.held_out.tokens) / n_tokens * forward + 10
    estimates = config.eval_batches * forward / config.eval_interval
    left = config.minutes * 60 - run.spent - state.seconds - final
    steps = state.step + max(1, int(left / (seconds_per_step + estimates)))
    return min(steps, config.steps) if config.steps else steps


def estimate(state: TrainingState, run: Run) -> float:
    """Estimate the held-out loss, record it, and keep the best checkpoint; returns nats a token."""
    config = state.config
    loss, n_tokens = evaluate(state.model, run.held_out.tokens, config.batch_size, config.eval_batches)
    bits = run.held_out.bits_per_byte(loss)
    state.evaluated_step = state.step
    run.record(step=state.step, held_out_loss=loss, bits_per_byte=bits)
    run.say(f"step {state.step}: held-out loss {loss:.4f} nats a token, {bits:.3f} bits a byte ({n_tokens:,} tokens)")
    if loss < state.best_loss:
        state.best_loss = loss
        run.save(state, run.best)
    run.flush()
    return loss


def show_sample(state: TrainingState, run: Run, n_tokens: int = SAMPLE_TOKENS, prompt: str = "") -> str:
    """Print some generated text and add it to samples.txt."""
    end = run.tokeniser.end_of_text
    ids = list(run.tokeniser.encode(prompt))[-state.config.context_window :] or [end]
    seed = (state.config.seed, state.step)
    sampling = replace(SAMPLING, seed=seed, stop_tokens=end, n_vocab=run.tokeniser.n_vocab)
    drawn = generate(state.model, ids, n_tokens, sampling)
    text = prompt + run.tokeniser.decode([token for token in drawn if token != end])
    title = f"--- sample at step {state.step}"
    run.write(lambda: append(run.samples, f"{title}\n{text}\n", sync=True))
    run.say(f"{title}\n{text}\n---")
    return text
