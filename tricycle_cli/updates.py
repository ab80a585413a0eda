"""The session that `tricycle.training.train` calls between updates.

The session times and records updates, evaluates, saves checkpoints, and skips or rolls back updates with NaN.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tricycle.system.memory import check_memory, format_gigabytes, gpu_memory
from tricycle.training import NonFiniteError
from tricycle.training_state import MIN_STEPS, StateSession, TrainingState, read_steps_and_errors
from tricycle_cli import clock
from tricycle_cli.run import Run
from tricycle_cli.signals import Interrupted
from tricycle_cli.task import Task

# With a limit in minutes, the total number of updates is estimated after these steps while less than a quarter of the
# time has passed. Then the number, and the schedule that depends on it, stay fixed.
ESTIMATE_STEPS = tuple(MIN_STEPS * 2**doubling for doubling in range(16))
UNTIMED_STEPS = 4  # the first steps are slow
UNREAD_STEPS = 50  # updates that a GPU runs asynchronously before their losses are read
# Maximum number of skipped updates in a row, and of rollbacks to the same checkpoint; then the run stops.
MAX_SKIPS, MAX_ROLLBACKS = 10, 3


@contextlib.contextmanager
def update_session(state: TrainingState, run: Run, task: Task) -> Iterator[RunSession]:
    """Yield a started `RunSession` for `train`, and close it at the end; add `task`'s advice to a MemoryError.

    The last checkpoint is saved before each evaluation, before samples, and at the end.

    Raises:
        NonFiniteError: NaN or infinity, and `run.on_nan` is "stop" or its limit is reached. The checkpoints are
            unchanged.
        MemoryError: too little memory; the message contains the free memory and settings to lower.
    """
    on_gpu = next(state.model.parameters()).on_gpu
    with advise_on_memory(on_gpu, task.memory_advice(state.config, on_gpu)):
        session = RunSession(state, run, task)
        try:
            session.start()
            yield session
        finally:
            session.close()


@contextlib.contextmanager
def advise_on_memory(on_gpu: bool, advice: str) -> Iterator[None]:
    """Re-raise a MemoryError of this context with `advice`, and the GPU's free memory if `on_gpu`, in its message."""
    try:
        yield
    except MemoryError as error:
        available = ""
        if on_gpu:
            free, total = gpu_memory()
            available = f"; {free / 1e9:.1f} GB of the GPU's {total / 1e9:.1f} GB are free"
        raise MemoryError(f"{str(error).rstrip('.') or 'out of memory'}{available}: {advice}") from None


def check_training_memory(needed: int, on_gpu: bool) -> None:
    """Raise MemoryError if fewer than `needed` bytes are free, in the GPU's memory or else the machine's."""
    if not on_gpu:
        check_memory(needed, "training")
    elif needed > gpu_memory()[0]:
        raise MemoryError(f"training needs at least {format_gigabytes(needed)} of the GPU's memory")


class RunSession(StateSession):
    """The session of a run's updates: it times, records, evaluates and saves them.

    On a CPU, each update is read and recorded separately; on a GPU, many at once.

    Attributes:
        finished: whether training reached its last step; the caller of `tricycle.training.train` sets it.
        limit: the maximum number of updates before they are read.
        waiting: losses and gradient norms of the updates that have not been read.
    """

    def __init__(self, state: TrainingState, run: Run, task: Task) -> None:
        super().__init__(state)
        self.run, self.task, self.finished = run, task, False
        self.limit = UNREAD_STEPS if next(state.model.parameters()).on_gpu else 1
        self._visits: dict[int, int] = {}  # by step, how often training went back to it
        self._bar: Any = None

    def start(self) -> None:
        """Reset the session: truncate logs to the state, save a first checkpoint if none exists, show a progress bar.

        A first checkpoint is saved, so that a folder without write permission is an error now and not after hours.
        """
        from tqdm import tqdm

        self.waiting: list[tuple[Any, Any]] = []
        self._metrics: list[dict[str, float]] = []  # further metrics of the waiting updates
        self._times: list[float] = []  # seconds of the updates that have been read
        self._bad: dict[int, str] = {}  # by step, the NaN or infinity of waiting updates
        self._started = 0.0
        self._is_updating = False
        self._is_new, self._is_stopping, self._is_interrupted = True, False, False
        self._saved_step = -1  # the step of the latest checkpoint that was saved before an evaluation
        self.run.truncate_to(self.state)
        if not self.run.has(self.run.last):
            try:
                self.run.save(self.state, self.run.last)
            except NonFiniteError as error:
                self.recover(error)
        options: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "mininterval": 0.5, "smoothing": 0.05}
        options |= {"total": self.state.total_steps or None, "initial": self.state.step}
        self._bar = tqdm(disable=not self.run.show_progress, **options)

    def close(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()

    # -------------------------------------------------------------------- between two updates
    def evaluate(self) -> None:
        """Save, and run the evaluation and the sample that are due; a signal interrupts them, and training then stops.

        None are at step 0 or if training stops; nor at the last step, because the report evaluates it, nor after a
        skipped update, because a rollback may discard the weights.
        """
        state, run = self.state, self.run
        evaluation_is_due, sample_is_due = _due(state)
        is_due = (evaluation_is_due or sample_is_due) and state.step not in (0, state.total_steps)
        if not is_due or state.n_skips or self.should_stop():
            return
        self.save()
        self._saved_step = state.step
        try:
            with run.interruptible():
                if evaluation_is_due:
                    evaluate_and_record(state, run, self.task)
                if sample_is_due:
                    self.task.sample(state, run)
        except Interrupted:
            self._is_interrupted = True

    def should_stop(self) -> bool:
        """Return whether to stop: at once if interrupted, else not before the first update or with updates unread."""
        if self._is_interrupted:
            return True
        return not (self._is_new or self.waiting) and (self._is_stopping or self.run.should_stop())

    def save(self) -> None:
        """Save the last checkpoint, but not after an evaluation that has not ended training: resumed runs repeat it."""
        state = self.state
        will_repeat = state.step == self._saved_step and state.step != state.total_steps
        if not (self._is_interrupted or will_repeat):
            self.run.save(state, self.run.last)

    # -------------------------------------------------------------------- updates
    @contextlib.contextmanager
    def batches(self, source: Any) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield this process's batches of an update, from `source`, and their label counts; start the timer."""
        if not self.waiting:
            self._started = clock.awake_seconds()
        self._is_updating = True
        with super().batches(source) as batches:
            yield batches

    def log(self, loss: Any, norm: Any) -> None:
        """Queue an update's loss and norm; if due, read and record the queue (or NonFiniteError); advance the bar."""
        self._is_updating = self._is_new = False
        self.waiting.append((loss, norm))
        self._metrics.append({**self.state.extra_metrics(), "learning_rate": self.state.optimiser.learning_rate})
        self._is_stopping = self.limit > 1 and self.run.should_stop()
        if self._is_stopping or self._must_be_read():
            text = self._read()
            self._bar.total = self.state.total_steps or None
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()

    def recover(self, error: NonFiniteError) -> None:
        """By `run.on_nan`, skip the update, roll back to the last checkpoint, or raise; raise also after too many.

        Raises:
            NonFiniteError: `run.on_nan` is "stop", or the limit of skips or rollbacks is reached.
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
        state, run, bad_step = self.state, self.run, self.state.step + 1
        if run.on_nan == "rollback" and run.has(run.last):
            _roll_back(state, run, error)
            self._visits[state.step] = self._visits.get(state.step, 0) + 1
            if self._visits[state.step] <= MAX_ROLLBACKS:
                self.start()
                return
            error.args = (f"{error} (after {MAX_ROLLBACKS} rollbacks to the same checkpoint)",)
        run.record_nonfinite_step(bad_step, str(error).removeprefix(f"step {bad_step}: "), "stop")
        raise error

    def _must_be_read(self) -> bool:
        """Return whether the waiting updates must be read: `limit` is reached, or the next step depends on them."""
        state = self.state
        timing_starts = len(self._times) + len(self.waiting) == UNTIMED_STEPS
        estimate_is_due = state.step in (*ESTIMATE_STEPS, state.total_steps)
        return len(self.waiting) >= self.limit or timing_starts or estimate_is_due or any(_due(state))

    def _read(self) -> str:
        """Record the waiting updates; return a line about the last update for the progress bar."""
        state, config = self.state, self.state.config
        results, bad = read_steps_and_errors(state, self.waiting)
        bad |= self._bad
        n_results = len(results)
        taken = (clock.awake_seconds() - self._started) / n_results
        seconds = clock.exclude_pause(taken, self._times)
        state.seconds += seconds * n_results
        self._times += [seconds] * n_results
        speed = state.n_tokens / seconds
        metrics = self._metrics
        self.waiting, self._metrics, self._bad = [], [], {}
        steps = range(state.step + 1 - n_results, state.step + 1)
        for step, (loss, norm), more in zip(steps, results, metrics):
            if step in bad:
                self._skip(step, bad[step])
                continue
            state.n_skips = 0
            self.run.record(step=step, loss=loss, **more, gradient_norm=norm, tokens_per_second=speed)
        if config.minutes and len(self._times) > UNTIMED_STEPS:
            if self.run.processes.is_rank_zero:
                self._estimate_total_steps()
            state.total_steps = self.run.processes.broadcast(state.total_steps)
        return f"loss {loss:.3f}, lr {more['learning_rate']:.1e}, {speed:,.0f} tokens/s"

    def _skip(self, step: int, reason: str) -> None:
        """Record an update skipped for NaN or infinity; NonFiniteError if `on_nan` is not "skip", or after too many.

        Raises:
            NonFiniteError: `run.on_nan` is not "skip", too many updates were skipped, or the weights are not finite.
        """
        self.state.n_skips += 1
        all_fine = not self.run.processes.any(bool(self.state.first_nonfinite()))
        if self.run.on_nan == "skip" and self.state.n_skips <= MAX_SKIPS and all_fine:
            self.run.record_nonfinite_step(step, reason, "skip")
            return
        if self.run.on_nan == "skip" and self.state.n_skips > MAX_SKIPS:
            reason += f" (after {MAX_SKIPS} skipped updates in a row)"
        self.state.step = step - 1
        raise NonFiniteError(f"step {step}: {reason}")

    def _estimate_total_steps(self) -> None:
        """Set the total number of updates by the time limit, at `ESTIMATE_STEPS` if early, or once if none is set."""
        state, config = self.state, self.state.config
        used = (self.run.spent + state.seconds) / (config.minutes * 60)
        is_early = state.step in ESTIMATE_STEPS and used < 1 / 4
        is_due = used > 1 / 8 or state.step == ESTIMATE_STEPS[0]
        if is_early or (not state.total_steps and is_due):
            seconds = float(np.mean(self._times[UNTIMED_STEPS:]))
            state.total_steps = self._affordable_steps(seconds)

    def _affordable_steps(self, seconds_per_step: float) -> int:
        """Return the total updates, at most config.steps, for which the minutes less the final report suffice."""
        state, config = self.state, self.state.config
        forward = seconds_per_step / config.accumulation_steps / 3  # a forward pass takes about a third of an update
        estimates = config.eval_batches * forward / config.eval_interval
        left = config.minutes * 60 - self.run.spent - state.seconds - self.task.closing_seconds(forward, config)
        steps = state.step + max(1, int(left / (seconds_per_step + estimates)))
        return min(steps, config.steps) if config.steps else steps


def _roll_back(state: TrainingState, run: Run, error: NonFiniteError) -> None:
    """Reload the last checkpoint into `state` but keep the position in the data, truncate and record metrics, save.

    The new state is saved at once, so that a killed run resumes from it. Source: Chowdhery et al. 2022, "PaLM",
    section 5.1, where the authors did this by hand.
    """
    bad_step, total_steps, position, seconds = state.step + 1, state.total_steps, state.dataset.position, state.seconds
    state.roll_back(run.last)
    state.dataset.position, state.total_steps, state.seconds = position, total_steps, seconds
    state.n_rollbacks += 1
    run.truncate_to(state)
    reason = str(error).removeprefix(f"step {bad_step}: ")
    run.record_nonfinite_step(state.step, reason, "rollback", bad_step=bad_step, rollback=state.n_rollbacks)
    run.save(state, run.last)


def _due(state: TrainingState) -> tuple[bool, bool]:
    """Return whether an evaluation, and whether a sample, is due after the state's step."""
    config = state.config
    return state.step % config.eval_interval == 0, bool(
        config.sample_interval
    ) and not state.step % config.sample_interval


@np.errstate(all="ignore")  # a loss that is not finite is recorded
def evaluate_and_record(state: TrainingState, run: Run, task: Task) -> float:
    """Evaluate, record and print metrics, save the best checkpoint, apply early stopping; return the held-out loss.

    The first evaluation always saves a best checkpoint.
    """
    metrics = task.measure(state)
    loss = metrics["held_out_loss"]
    state.evaluated_step = state.step
    is_first, is_best = state.best_loss == math.inf, loss < state.best_loss
    state.n_worse = 0 if is_best else state.n_worse + 1
    values = metrics if math.isfinite(loss) else {"not_finite": f"the held-out loss is {loss}"}
    run.record(step=state.step, **values)
    rank = "best so far" if is_best else f"no improvement for {state.n_worse} evaluations"
    comparison = "" if is_first else f" ({rank})"
    run.print_line(f"step {state.step}: held-out loss {task.format_metrics(metrics)}{comparison}")
    if is_best or not run.has(run.best):
        state.best_loss = loss if is_best else state.best_loss
        run.save(state, run.best)
    if task.patience and state.n_worse >= task.patience and state.step < state.total_steps:
        run.print_line(f"step {state.step}: early stopping (--patience {task.patience})")
        state.total_steps = state.step
    run.flush()
    return loss
