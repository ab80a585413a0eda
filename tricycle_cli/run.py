"""A run of training: the loop, its clock, its folder, and what it says.

A run folder holds config.json, data.json, tokeniser.json, metrics.jsonl, samples.txt, loss.png, and the checkpoints
last.safetensors and best.safetensors; with --track also tracking.json, and what trackers keep there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from tricycle.checkpoint import NotFiniteError
from tricycle.configs import GPTConfig
from tricycle.configs.size import least_numbers
from tricycle.decoding.penalties import PenalizedSampling
from tricycle.distributed.processes import ALONE, Processes
from tricycle.distributed.shards import gather_state
from tricycle.evaluation import HeldOut, evaluate
from tricycle.generate import generate
from tricycle.system.files import append, atomic_write, expect_plain, read_file
from tricycle.system.memory import check_memory, gigabytes, gpu_memory
from tricycle.tokeniser import Tokeniser
from tricycle.training import NonFiniteError
from tricycle.training import train as train_model
from tricycle.training_state import LEAST_STEPS, StateSession, TrainingState, look_at_steps
from tricycle_cli import clock
from tricycle_cli.full_disk import OnFullDisk, write_with_room
from tricycle_cli.signals import Interrupted
from tricycle_cli.tracking import Tracking

OnNaN = Literal["stop", "skip", "rollback"]
T = TypeVar("T")

# With a limit in minutes, the number of updates is estimated after these, while less than a quarter of the
# time is over; then it stays, and so does everything that depends on it.
ESTIMATE_STEPS = tuple(LEAST_STEPS * 2**doubling for doubling in range(16))
UNTIMED_STEPS = 4  # the first few are slow
UNREAD_STEPS = 50  # on a GPU so many updates are started before their losses are read, which waits for all of them
SAMPLE_TOKENS = 160
# What suits small models: those that copy well fall into circles.
SAMPLING = PenalizedSampling(temperature=0.9, min_p=0.1, repetition_penalty=1.15, no_repeat_ngram_size=6)
LINES_GATHERED = 50
LONGEST_LINE = 10_000  # characters of metrics: no run writes a tenth of it
MOST_METRICS = 2**28  # bytes: a million updates have half of it
NUMBERS = """
loss learning_rate gradient_norm tokens_per_second held_out_loss bits_per_byte final_loss final_bits_per_byte best_step
reward_margin reward_accuracy
""".split()
# The final estimate moves its windows on by half their length: each token sees at least half a window before it.
FINAL_OVERLAP = 2
# So many updates in a row may be left out, and so often may a run go back to the same checkpoint, because something was
# not finite; after that something is wrong that does not pass.
MOST_SKIPS, MOST_ROLLBACKS = 10, 3


@dataclass
class Run:
    """Where a run leaves its files, and how it speaks.

    Attributes:
        folder: the run folder.
        say: prints a line above the progress bar.
        stop: asked after every update; True saves and leaves.
        interruptible: a block of work that `Interrupted` may end at any moment.
        on_nan: what is done where a loss or a gradient is NaN or infinite: the run ends; the update is left out; or all
            goes back to the last checkpoint and on from there with the batches that come after the bad one.
        spent: seconds that preparing took; they count towards `minutes`.
        on_full_disk: "wait" until there is room, or "stop" with an error; what was saved is whole either way.
        held_out_bytes: the held-out text itself.
        measure: estimates the held-out loss and keeps the best checkpoint, in place of `estimate`.
        processes: those that train together. All make a run alike; rank 0 alone speaks and writes.
        advice: what needs less memory, where it is not what `naming_what_to_lower` says.
        tracking: gets what metrics.jsonl gets.
    """

    folder: Path
    tokeniser: Tokeniser
    held_out: HeldOut
    say: Callable[[str], None] = print
    stop: Callable[[], bool] = lambda: False
    interruptible: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    on_nan: OnNaN = "skip"
    spent: float = 0.0
    held_out_bytes: bytes = b""
    show_progress: bool = True
    on_full_disk: OnFullDisk = "stop"
    measure: Callable[[Any, Any], float] | None = None
    processes: Processes = ALONE
    advice: str = ""
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
        return write_with_room(writing, self.folder, self.on_full_disk, self.say, self._stop_waiting)

    def _stop_waiting(self) -> bool:
        self.processes.answer()  # the others wait, too
        return self.stop()

    def must_stop(self) -> bool:
        """Whether any of the processes is to stop; all ask, and all get the same answer."""
        return self.processes.any(self.stop())

    def has(self, path: Path) -> bool:
        """Whether a file is there, as rank 0 sees it."""
        return self.processes.agree(path.exists())

    def record(self, **values: Any) -> None:
        """Add a line to metrics.jsonl; a few are gathered before they are written.

        What is NaN or infinite is null there: JSON has no words for it.
        """
        if not self.processes.is_first:
            return
        self._log.append({name: _as_json(value) for name, value in values.items()})
        if len(self._log) >= LINES_GATHERED:
            self.flush()

    def record_bad_step(self, step: int, reason: str, action: str, **more: Any) -> None:
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
        self.processes.at("a checkpoint")
        self.flush()
        problem = ""
        states = gather_state(state.optimiser, state.model)
        if self.processes.is_first:
            state.samples_size = self.samples.stat().st_size if self.samples.exists() else 0
            try:
                self.write(lambda: state.save(path, self.tokeniser, states))
            except NotFiniteError as error:
                problem = str(error)
        problem = self.processes.agree(problem)
        if problem:
            state.step -= 1  # the update that made it so counts as the one that met it
            raise NonFiniteError(f"step {state.step + 1}: {problem}")

    def forget_after(self, state: TrainingState) -> None:
        """Drop what a resumed run will write again: later updates, and estimates and samples from this step on."""
        if not self.processes.is_first:
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


def train(state: TrainingState, run: Run) -> bool:
    """Train until the config's steps or minutes are used up, or `run.stop()` says so.

    The last checkpoint is saved before each held-out estimate and before samples are drawn, and at the end.

    Returns:
        whether training came to its end (and was not stopped).

    Raises:
        NonFiniteError: something is not finite, and `run.on_nan` is to stop, or does not help. The checkpoints are as
            they were.
        MemoryError: too little of it; says what is free and what to lower.
    """
    with updates(state, run) as session:
        return train_model(**state.arguments(), session=session)


@contextlib.contextmanager
def updates(state: TrainingState, run: Run) -> Iterator[RunSession]:
    """Yield what `training.train` takes as its session, within a progress bar; raises as `train` does."""
    with naming_what_to_lower(state.config, next(state.model.parameters()).on_gpu, run.advice):
        session = RunSession(state, run)
        try:
            session.begin()
            yield session
        finally:
            session.close()


@contextlib.contextmanager
def naming_what_to_lower(config: GPTConfig, on_gpu: bool, advice: str = "") -> Iterator[None]:
    """Within this block errors for lack of memory say how much there is, and which settings need less."""
    try:
        yield
    except MemoryError as error:
        there = ""
        if on_gpu:
            free, total = gpu_memory()
            there = f"; {free / 1e9:.1f} GB of the GPU's {total / 1e9:.1f} GB are free"
        advice = advice or _what_to_lower(config, on_gpu)
        raise MemoryError(f"{str(error).rstrip('.') or 'out of memory'}{there}: {advice}") from None


def _what_to_lower(config: GPTConfig, on_gpu: bool) -> str:
    advice = f"lower --batch-size (now {config.batch_size}; --accumulation-steps makes up for it)"
    advice += f" or --context-window (now {config.context_window})"
    advice += f", or make the model smaller: it has {least_numbers(config):,} weights"
    if on_gpu and config.precision in ("float32", "tf32"):
        advice += ", or take --precision bfloat16"
    return advice


def check_room(needed: int, on_gpu: bool) -> None:
    """
    Raises:
        MemoryError: there are fewer bytes than training needs at least.
    """
    if not on_gpu:
        check_memory(needed, "training")
    elif needed > gpu_memory()[0]:
        raise MemoryError(f"training needs at least {gigabytes(needed)} of the GPU's memory")


class RunSession(StateSession):
    """The updates of a run: read, timed and recorded each by itself on a CPU, many at once on a GPU.

    Attributes:
        limit: the most updates that are made before they are read.
        waiting: what those gave that have not been read.
    """

    def __init__(self, state: TrainingState, run: Run) -> None:
        super().__init__(state)
        self.run = run
        self.limit = UNREAD_STEPS if next(state.model.parameters()).on_gpu else 1
        self._visits: dict[int, int] = {}  # by step, how often training went back to it
        self._bar: Any = None

    def begin(self) -> None:
        """Begin, or begin again after training went back to a checkpoint.

        A first checkpoint is saved: a folder that cannot be written says so now, not after hours.
        """
        self.waiting: list[tuple[Any, Any]] = []
        self._rates: list[float] = []
        self._figures: list[dict[str, float]] = []
        self._times: list[float] = []  # of all updates that have been read
        self._bad: dict[int, str] = {}  # of those that are waiting, what was not finite
        self._started = 0.0
        self._is_updating = False
        self._is_new, self._is_stopping, self._is_interrupted = True, False, False
        self.run.forget_after(self.state)
        if not self.run.has(self.run.last):
            try:
                self.run.save(self.state, self.run.last)
            except NonFiniteError as error:
                self.recover(error)
        self._bar = _progress_bar(self.state, self.run)

    def close(self) -> None:
        """Leave the progress bar as it is."""
        if self._bar is not None:
            self._bar.close()

    # -------------------------------------------------------------------- between two updates
    def evaluation_is_due(self) -> bool:
        """Return whether an estimate or a sample is due, also where a run is resumed that was left before it.

        Not at the last step, and not where the latest update was left out: the weights may be about to be given up.
        """
        state = self.state
        is_due = state.step not in (0, state.total_steps) and _is_due(state) and not state.n_skips
        return is_due and not self.must_stop()

    def evaluate(self) -> None:
        """Make the held-out estimate and the sample that are due; a signal interrupts them and ends training."""
        state, run = self.state, self.run
        try:
            with run.interruptible():
                if _evaluation_is_due(state):
                    (run.measure or estimate)(state, run)
                if _sample_is_due(state):
                    show_sample(state, run)
        except Interrupted:
            self._is_interrupted = True

    def must_stop(self) -> bool:
        """Return whether training is to end now: not before a first update, nor while some have not been read."""
        if self._is_interrupted:
            return True
        return not (self._is_new or self.waiting) and (self._is_stopping or self.run.must_stop())

    def save(self) -> None:
        if not self._is_interrupted:  # it was saved before it was evaluated
            self.run.save(self.state, self.run.last)

    # -------------------------------------------------------------------- updates
    @contextlib.contextmanager
    def batches(self, source: Any) -> Iterator[tuple[list[Any], list[Any]]]:
        if not self.waiting:
            self._started = clock.awake_seconds()
        self._is_updating = True
        with super().batches(source) as batches:
            yield batches

    def log(self, loss: Any, norm: Any) -> None:
        self._is_updating = self._is_new = False
        self.waiting.append((loss, norm))
        self._rates.append(self.state.optimiser.learning_rate)
        self._figures.append(self.state.figures())
        self._is_stopping = self.limit > 1 and self.run.must_stop()
        if self._is_stopping or self._must_be_read():
            said = self._read()
            self._bar.total = self.state.total_steps or None
            self._bar.set_postfix_str(said, refresh=False)
        self._bar.update()

    def recover(self, error: NonFiniteError) -> None:
        """Do what `run.on_nan` says.

        Raises:
            NonFiniteError: it is to stop, or does not help.
        """
        try:
            if self._is_updating:
                self.step += 1
                self._bad[self.step] = str(error)
                self.log(math.nan, math.nan)
                return
        except NonFiniteError as serious:
            error = serious
        self.close()
        state, run = self.state, self.run
        if run.on_nan == "rollback" and run.has(run.last):
            _go_back(state, run, error)
            self._visits[state.step] = self._visits.get(state.step, 0) + 1
            if self._visits[state.step] <= MOST_ROLLBACKS:
                self.begin()
                return
            error.args = (f"{error} (and {MOST_ROLLBACKS} times before)",)
        run.record_bad_step(state.step + 1, str(error), "stop")
        raise error

    def _must_be_read(self) -> bool:
        """Whether there are enough of them, or something hangs on them."""
        state = self.state
        slow_ones_are_over = len(self._times) + len(self.waiting) == UNTIMED_STEPS
        estimates_hang_on_them = state.step in (*ESTIMATE_STEPS, state.total_steps)
        return len(self.waiting) >= self.limit or slow_ones_are_over or estimates_hang_on_them or _is_due(state)

    def _read(self) -> str:
        """Record those that were waiting; returns a line about the last."""
        state, config = self.state, self.state.config
        results, bad = look_at_steps(state, self.waiting)
        bad |= self._bad
        n_results = len(results)
        taken = (clock.awake_seconds() - self._started) / n_results
        seconds = clock.without_standstill(taken, self._times)
        state.seconds += seconds * n_results
        self._times += [seconds] * n_results
        speed = state.n_tokens / seconds
        rates, figures = self._rates, self._figures
        self.waiting, self._rates, self._figures, self._bad = [], [], [], {}
        steps = range(state.step + 1 - n_results, state.step + 1)
        for step, (loss, norm), rate, more in zip(steps, results, rates, figures):
            if step in bad:
                self._leave_out(step, bad[step])
                continue
            state.n_skips = 0
            values = {"learning_rate": rate, "gradient_norm": norm, "tokens_per_second": speed}
            self.run.record(step=step, loss=loss, **more, **values)
        if config.minutes and len(self._times) > UNTIMED_STEPS:
            if self.run.processes.is_first:
                self._plan()
            state.total_steps = self.run.processes.agree(state.total_steps)
        return f"loss {loss:.3f}, rate {rate:.1e}, {speed:,.0f} tokens/s"

    def _leave_out(self, step: int, reason: str) -> None:
        """An update that changed nothing, because something was not finite.

        Raises:
            NonFiniteError: nothing may be left out, or it would not help.
        """
        self.state.n_skips += 1
        all_fine = not self.run.processes.any(bool(self.state.first_bad()))
        if self.run.on_nan == "skip" and self.state.n_skips <= MOST_SKIPS and all_fine:
            self.run.record_bad_step(step, reason, "skip")
            return
        if self.run.on_nan == "skip" and self.state.n_skips > MOST_SKIPS:
            reason += f" (and {MOST_SKIPS} updates in a row were left out before it)"
        self.state.step = step - 1
        raise NonFiniteError(f"step {step}: {reason}")

    def _plan(self) -> None:
        """Set the number of updates by the clock, where it is time for that."""
        state, config = self.state, self.state.config
        used = (self.run.spent + state.seconds) / (config.minutes * 60)
        young = state.step in ESTIMATE_STEPS and used < 1 / 4
        due = used > 1 / 8 or state.step == ESTIMATE_STEPS[0]
        if young or (not state.total_steps and due):
            seconds = float(np.mean(self._times[UNTIMED_STEPS:]))
            state.total_steps = _affordable_steps(state, self.run, seconds)


def _go_back(state: TrainingState, run: Run, error: NonFiniteError) -> None:
    """Return to the last checkpoint, but with the batches that come after those that were used.

    It is saved at once, so that a run that is killed goes on from here too. Chowdhery et al. 2022, "PaLM", section 5.1,
    did so by hand.
    """
    bad_step, total_steps, position, seconds = state.step + 1, state.total_steps, state.dataset.position, state.seconds
    state.go_back(run.last)
    state.dataset.position, state.total_steps, state.seconds = position, total_steps, seconds
    state.n_rollbacks += 1
    run.forget_after(state)
    reason = str(error).removeprefix(f"step {bad_step}: ")
    run.record_bad_step(state.step, reason, "rollback", bad_step=bad_step, rollback=state.n_rollbacks)
    run.save(state, run.last)


def _progress_bar(state: TrainingState, run: Run) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=state.total_steps or None,
        initial=state.step,
        unit="step",
        disable=not run.show_progress,
        dynamic_ncols=True,
        mininterval=0.5,
        smoothing=0.05,
    )


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


def contexts(context_window: int) -> tuple[str, str]:
    """Return how much context the held-out estimates of a run have, and its final figure, which is lower for it."""
    most = context_window - 1
    return f"context 0 to {most}", f"context {context_window - context_window // FINAL_OVERLAP} to {most}"


@np.errstate(all="ignore")  # a loss that is not finite is said
def estimate(state: TrainingState, run: Run) -> float:
    """Estimate the held-out loss, record it, and keep the best checkpoint; returns nats a token.

    The first is the best whatever it is, so that there is one.
    """
    config = state.config
    loss, n_tokens = evaluate(
        state.model, run.held_out.tokens, config.batch_size, config.eval_batches, processes=run.processes
    )
    bits = run.held_out.bits_per_byte(loss)
    state.evaluated_step = state.step
    if math.isfinite(loss):
        run.record(step=state.step, held_out_loss=loss, bits_per_byte=bits)
    else:
        run.record(step=state.step, not_finite=f"the held-out loss is {loss}")
    basis = f"{n_tokens:,} tokens, {contexts(config.context_window)[0]}"
    run.say(f"step {state.step}: held-out loss {loss:.4f} nats a token, {bits:.3f} bits a byte ({basis})")
    if loss < state.best_loss or not run.has(run.best):
        state.best_loss = min(loss, state.best_loss) if math.isfinite(loss) else state.best_loss
        run.save(state, run.best)
    run.flush()
    return loss


def show_sample(state: TrainingState, run: Run, n_tokens: int = SAMPLE_TOKENS, prompt: str = "") -> str:
    """Print some generated text and add it to samples.txt; rank 0 does."""
    if not run.processes.is_first:
        return ""
    end = run.tokeniser.end_of_text
    ids = list(run.tokeniser.encode(prompt))[-state.config.context_window :] or [end]
    seed = (state.config.seed, state.step)
    sampling = replace(SAMPLING, seed=seed, stop_tokens=end, n_vocab=run.tokeniser.n_vocab)
    drawn = []
    for token in generate(state.model, ids, n_tokens, sampling):
        run.processes.answer()  # the others wait
        drawn += [token] if token != end else []
    text = prompt + run.tokeniser.decode(drawn)
    title = f"--- sample at step {state.step}"
    run.write(lambda: append(run.samples, f"{title}\n{text}\n"))
    run.say(f"{title}\n{text}\n---")
    return text
