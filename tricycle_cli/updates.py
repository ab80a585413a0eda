"""The updates of a run: what `training.train` calls between them.

They are timed, recorded, evaluated and saved; those that meet NaN are left out, or training goes back to a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tricycle.system.memory import check_memory, gigabytes, gpu_memory
from tricycle.training import NonFiniteError
from tricycle.training_state import LEAST_STEPS, StateSession, TrainingState, read_steps_and_errors
from tricycle_cli import clock
from tricycle_cli.run import Run
from tricycle_cli.signals import Interrupted
from tricycle_cli.task import Task

# With a limit in minutes, the number of updates is estimated after these, while less than a quarter of the
# time is over; then it stays, and so does everything that depends on it.
ESTIMATE_STEPS = tuple(LEAST_STEPS * 2**doubling for doubling in range(16))
UNTIMED_STEPS = 4  # the first few are slow
UNREAD_STEPS = 50  # updates on a GPU that are started before their losses are read, which waits for all of them
# The most updates in a row that may be left out, and the most returns to the same checkpoint, because something was not
# finite; after that the run ends.
MOST_SKIPS, MOST_ROLLBACKS = 10, 3


@contextlib.contextmanager
def updates(state: TrainingState, run: Run, task: Task) -> Iterator[RunSession]:
    """Yield what `training.train` takes as its session, within a progress bar.

    The last checkpoint is saved before each evaluation and before samples are drawn, and at the end.

    Raises:
        NonFiniteError: something is not finite, and `run.on_nan` is to stop, or does not help. The checkpoints are as
            they were.
        MemoryError: too little memory; names what is free and what to lower.
    """
    on_gpu = next(state.model.parameters()).on_gpu
    with advise_on_memory(on_gpu, task.memory_advice(state.config, on_gpu)):
        session = RunSession(state, run, task)
        try:
            session.begin()
            yield session
        finally:
            session.close()


@contextlib.contextmanager
def advise_on_memory(on_gpu: bool, advice: str) -> Iterator[None]:
    """Within this block errors for lack of memory say how much there is, and which settings need less."""
    try:
        yield
    except MemoryError as error:
        there = ""
        if on_gpu:
            free, total = gpu_memory()
            there = f"; {free / 1e9:.1f} GB of the GPU's {total / 1e9:.1f} GB are free"
        raise MemoryError(f"{str(error).rstrip('.') or 'out of memory'}{there}: {advice}") from None


def check_training_memory(needed: int, on_gpu: bool) -> None:
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
        finished: whether training came to its end; who calls `training.train` sets it.
        limit: the most updates that are made before they are read.
        waiting: what those gave that have not been read.
    """

    def __init__(self, state: TrainingState, run: Run, task: Task) -> None:
        super().__init__(state)
        self.run, self.task, self.finished = run, task, False
        self.limit = UNREAD_STEPS if next(state.model.parameters()).on_gpu else 1
        self._visits: dict[int, int] = {}  # by step, how often training went back to it
        self._bar: Any = None

    def begin(self) -> None:
        """Begin, or begin again after training went back to a checkpoint.

        A first checkpoint is saved: a folder that cannot be written raises now, not after hours.
        """
        self.waiting: list[tuple[Any, Any]] = []
        self._rates: list[float] = []
        self._figures: list[dict[str, float]] = []
        self._times: list[float] = []  # of all updates that have been read
        self._bad: dict[int, str] = {}  # of those that are waiting, what was not finite
        self._started = 0.0
        self._is_updating = False
        self._is_new, self._is_stopping, self._is_interrupted = True, False, False
        self.run.truncate_to(self.state)
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
    def should_evaluate(self) -> bool:
        """Return whether an estimate or a sample is due, also where a run is resumed that was left before it.

        Not at the last step, and not where the latest update was left out: the weights may be about to be given up.
        """
        state = self.state
        is_due = state.step not in (0, state.total_steps) and _is_due(state) and not state.n_skips
        return is_due and not self.should_stop()

    def evaluate(self) -> None:
        """Make the held-out estimate and the sample that are due; a signal interrupts them and ends training."""
        state, run = self.state, self.run
        try:
            with run.interruptible():
                if _evaluation_is_due(state):
                    estimate(state, run, self.task)
                if _sample_is_due(state):
                    self.task.sample(state, run)
        except Interrupted:
            self._is_interrupted = True

    def should_stop(self) -> bool:
        """Return whether training is to end now: not before a first update, nor while some have not been read."""
        if self._is_interrupted:
            return True
        return not (self._is_new or self.waiting) and (self._is_stopping or self.run.should_stop())

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
        self._figures.append(self.state.extra_metrics())
        self._is_stopping = self.limit > 1 and self.run.should_stop()
        if self._is_stopping or self._must_be_read():
            said = self._read()
            self._bar.total = self.state.total_steps or None
            self._bar.set_postfix_str(said, refresh=False)
        self._bar.update()

    def recover(self, error: NonFiniteError) -> None:
        """Handle an update that was not finite as `run.on_nan` asks for.

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
        run.record_nonfinite_step(state.step + 1, str(error), "stop")
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
        results, bad = read_steps_and_errors(state, self.waiting)
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
            if self.run.processes.is_rank_zero:
                self._plan()
            state.total_steps = self.run.processes.broadcast(state.total_steps)
        return f"loss {loss:.3f}, rate {rate:.1e}, {speed:,.0f} tokens/s"

    def _leave_out(self, step: int, reason: str) -> None:
        """An update that changed nothing, because something was not finite.

        Raises:
            NonFiniteError: nothing may be left out, or it would not help.
        """
        self.state.n_skips += 1
        all_fine = not self.run.processes.any(bool(self.state.first_nonfinite()))
        if self.run.on_nan == "skip" and self.state.n_skips <= MOST_SKIPS and all_fine:
            self.run.record_nonfinite_step(step, reason, "skip")
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
            state.total_steps = self._affordable_steps(seconds)

    def _affordable_steps(self, seconds_per_step: float) -> int:
        """Return how many updates fit in the config's minutes, after what has been spent and what the end will cost."""
        state, config = self.state, self.state.config
        forward = seconds_per_step / config.accumulation_steps / 3  # a forward pass takes about a third of an update
        estimates = config.eval_batches * forward / config.eval_interval
        left = config.minutes * 60 - self.run.spent - state.seconds - self.task.closing_seconds(forward, config)
        steps = state.step + max(1, int(left / (seconds_per_step + estimates)))
        return min(steps, config.steps) if config.steps else steps


def _go_back(state: TrainingState, run: Run, error: NonFiniteError) -> None:
    """Return to the last checkpoint, but with the batches that come after those that were used.

    It is saved at once, so that a run that is killed goes on from here too. Chowdhery et al. 2022, "PaLM", section 5.1,
    did so by hand.
    """
    bad_step, total_steps, position, seconds = state.step + 1, state.total_steps, state.dataset.position, state.seconds
    state.roll_back(run.last)
    state.dataset.position, state.total_steps, state.seconds = position, total_steps, seconds
    state.n_rollbacks += 1
    run.truncate_to(state)
    reason = str(error).removeprefix(f"step {bad_step}: ")
    run.record_nonfinite_step(state.step, reason, "rollback", bad_step=bad_step, rollback=state.n_rollbacks)
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


@np.errstate(all="ignore")  # a loss that is not finite is recorded
def estimate(state: TrainingState, run: Run, task: Task) -> float:
    """Evaluate, record the figures, keep the best checkpoint, and end training that grows no better.

    The first evaluation is the best whatever it is, so that there is a checkpoint. Returns the held-out loss.
    """
    figures = task.measure(state)
    loss = figures["held_out_loss"]
    state.evaluated_step = state.step
    is_first, is_best = state.best_loss == math.inf, loss < state.best_loss
    state.n_worse = 0 if is_best else state.n_worse + 1
    if math.isfinite(loss):
        run.record(step=state.step, **figures)
    else:
        run.record(step=state.step, not_finite=f"the held-out loss is {loss}")
    rank = "the best so far" if is_best else f"not better for {state.n_worse} evaluations"
    run.print_line(f"step {state.step}: held-out loss {task.figures_text(figures)}" + ("" if is_first else f": {rank}"))
    if is_best or not run.has(run.best):
        state.best_loss = loss if is_best else state.best_loss
        run.save(state, run.best)
    if task.patience and state.n_worse >= task.patience and state.step < state.total_steps:
        run.print_line(f"step {state.step}: it grows no better: training ends here (--patience {task.patience})")
        state.total_steps = state.step
    run.flush()
    return loss
