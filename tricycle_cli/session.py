"""The session of a run that trains: everything but its task.

A session has the lock of the run folder, signals, processes, trackers, and the order of a run: claim the folder,
prepare, train, report. What is trained is a `Task`.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tricycle.distributed.processes import ProcessGroup
from tricycle.system.locks import FolderLock
from tricycle.training import NonFiniteError
from tricycle.training_state import TrainingState
from tricycle_cli import clock
from tricycle_cli.distributed import on_rank_zero, process_group
from tricycle_cli.run import Run
from tricycle_cli.signals import Interrupted, Signals, exit_by_signal
from tricycle_cli.streams import tolerant_streams
from tricycle_cli.task import Task, command_name
from tricycle_cli.tracking import Tracking
from tricycle_cli.updates import RunSession, updates


@contextlib.contextmanager
def open_session(new_task: Callable[[ProcessGroup], Task]) -> Iterator[RunSession]:
    """Yield what `training.train` takes as its session, before it everything up to the first update; then report.

        with open_session(new_task) as session:
            session.finished = train(**session.state.train_arguments(), session=session)

    Args:
        new_task: reads the command line; raises before anything is written.

    Raises:
        Interrupted: a signal came before training, or after it; what there was to save is saved.
        ValueError: processes that are not alike; and what the task raises.
    """
    with tolerant_streams(), Signals() as signals, process_group() as processes:
        signals.announces = processes.size == 1
        started = clock.awake_seconds()
        try:
            task = new_task(processes)
            folder = processes.broadcast(task.folder or new_folder(task.name))
            with run_folder_lock(folder, processes):
                task.claim(folder, processes)
                on_rank_zero(processes, lambda: remove_partial_files(folder))
                run = _new_run(task, folder, signals, processes)
                with _run_task(task, run, signals, started) as session:
                    yield session
        except Interrupted as error:
            if error.number != signal.SIGINT and processes.size == 1:
                sys.stdout.flush()
                exit_by_signal(error.number)
            raise


@contextlib.contextmanager
def _run_task(task: Task, run: Run, signals: Signals, started: float) -> Iterator[RunSession]:
    """Prepare, yield the session of the updates, and report; print how to resume a run that did not finish."""
    resume = resume_command(task, run.folder)
    try:
        with signals.restore_interrupts():
            state = task.prepare(run)
            run.spent = clock.awake_seconds() - started
            run.tracking = start_tracking(task, run, state)
            with add_checkpoint_hint_to_errors(task, run, resume), _tracked(run):
                with signals.finishing(), updates(state, run, task) as session:
                    yield session
                if session.finished:
                    signals.check()
                    task.report(state, run)
        if not session.finished:
            print(f"stopped after step {state.step}; all progress is saved. Resume with\n  {resume}")
    except Interrupted:
        if run.processes.is_rank_zero and (run.folder / "config.json").exists():
            print(f"interrupted. Resume with\n  {resume}", flush=True)
        raise


def new_folder(name: str) -> Path:
    """Return the path of a new run folder in runs/."""
    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def remove_partial_files(folder: Path) -> None:
    """Remove what a kill cut off while it was being written."""
    for left_over in folder.rglob(".*.part"):
        left_over.unlink()


def run_folder_lock(folder: Path, processes: ProcessGroup) -> contextlib.AbstractContextManager[Any]:
    """Return the lock of a run folder, which rank 0 takes for all."""
    return FolderLock(folder) if processes.is_rank_zero else contextlib.nullcontext()


def _new_run(task: Task, folder: Path, signals: Signals, processes: ProcessGroup) -> Run:
    return Run(
        folder,
        say=say,
        stop=signals,
        # several processes leave together, between two updates
        interruptible=signals.interruptible if processes.size == 1 else contextlib.nullcontext,
        on_nan=task.arguments.on_nan,
        on_full_disk=task.arguments.on_full_disk,
        show_progress=processes.is_rank_zero,
        processes=processes,
    )


def say(text: str) -> None:
    """Print a line above the progress bar."""
    from tqdm import tqdm

    tqdm.write(text)


def start_tracking(task: Task, run: Run, state: TrainingState) -> Tracking | None:
    """Start the trackers of a run: rank 0 alone sends to them."""
    names = task.arguments.track
    if not names or not run.processes.is_rank_zero:
        return None
    return Tracking(names, run.folder, task.facts(state), say).start()


def _tracked(run: Run) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if run.tracking is None else run.tracking.finishing()


def resume_command(task: Task, folder: Path) -> str:
    """Return the command that resumes a run."""
    return f"{command_name(task.command, task.command)} --resume {shlex.quote(folder.as_posix())}"


@contextlib.contextmanager
def add_checkpoint_hint_to_errors(task: Task, run: Run, resume: str) -> Iterator[None]:
    """Within this block errors name what is saved: all until the last checkpoint, where there is one."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}. Checkpoints are as they were; try a lower {task.learning_rate_flag}") from None
    except OSError as error:
        if not run.last.exists():
            raise
        raise OSError(f"{error}. The last checkpoint is whole: continue with {resume}") from None
