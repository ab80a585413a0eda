"""The session of a training run, which `tricycle train`, `finetune` and `distill` share.

A session locks the run folder, handles signals, processes and trackers, and calls the steps of a run in order: claim
the folder, prepare, train, report. A `Task` defines the model and the data.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from tricycle.distributed.processes import ProcessGroup
from tricycle.system.locks import FolderLock
from tricycle.training import NonFiniteError
from tricycle_cli import clock
from tricycle_cli.distributed import on_rank_zero, process_group
from tricycle_cli.run import Run
from tricycle_cli.signals import Interrupted, Signals, exit_by_signal
from tricycle_cli.streams import tolerant_streams
from tricycle_cli.task import Task, command_name
from tricycle_cli.tracking import Tracking
from tricycle_cli.updates import RunSession, evaluate_and_record, update_session


@contextlib.contextmanager
def open_session(new_task: Callable[[ProcessGroup], Task]) -> Iterator[RunSession]:
    """Lock and prepare a task's run; yield its session; report if session.finished; signals: Interrupted or exit.

        with open_session(new_task) as session:
            session.finished = train(**session.state.train_arguments(), session=session)

    Args:
        new_task: parses the command line and returns the task; raises errors before any file is written.

    Raises:
        Interrupted: a signal arrived before or after training; all progress is saved.
        ValueError: the processes differ in code, settings or data; and the errors of the task.
    """
    with tolerant_streams(), Signals() as signals, process_group() as processes:
        signals.announces = processes.size == 1
        started = clock.awake_seconds()
        try:
            task = new_task(processes)
            folder = processes.broadcast(task.folder or new_folder(task.name))
            with FolderLock(folder) if processes.is_rank_zero else contextlib.nullcontext():
                task.claim_folder(folder, processes)
                on_rank_zero(processes, lambda: remove_partial_files(folder))
                run = Run(
                    folder,
                    print_line=print_line,
                    stop=signals,
                    # several processes stop together, between two updates
                    interruptible=signals.interruptible if processes.size == 1 else contextlib.nullcontext,
                    on_nan=task.arguments.on_nan,
                    on_full_disk=task.arguments.on_full_disk,
                    show_progress=processes.is_rank_zero,
                    processes=processes,
                )
                with _run_task(task, run, signals, started) as session:
                    yield session
        except Interrupted as error:
            if processes.size == 1:
                exit_by_signal(error)
            raise


@contextlib.contextmanager
def _run_task(task: Task, run: Run, signals: Signals, started: float) -> Iterator[RunSession]:
    """Prepare, yield the session of the updates, evaluate and report; print the resume command of an unfinished run."""
    resume = f"{command_name(task.command, task.command)} --resume {shlex.quote(run.folder.as_posix())}"
    try:
        with signals.restore_interrupts():
            state = task.prepare(run)
            run.spent = clock.awake_seconds() - started
            if task.arguments.track and run.processes.is_rank_zero:
                settings = task.tracked_settings(state)
                run.tracking = Tracking(task.arguments.track, run.folder, settings, print_line).start()
            tracked = contextlib.nullcontext() if run.tracking is None else run.tracking.finishing()
            with add_checkpoint_hint_to_errors(task, run, resume), tracked:
                with signals.deferred(), update_session(state, run, task) as session:
                    yield session
                if session.finished:
                    signals.check()
                    if state.evaluated_step != state.step:
                        evaluate_and_record(state, run, task)
                    task.report(state, run)
        if not session.finished:
            print(f"stopped after step {state.step}; all progress is saved. Resume with\n  {resume}")
    except Interrupted:
        if run.processes.is_rank_zero and (run.folder / "config.json").exists():
            print(f"interrupted. Resume with\n  {resume}", flush=True)
        raise


def new_folder(name: str) -> Path:
    """Return the path of a new run folder, runs/NAME-DATE-TIME, which is not created."""
    return Path("runs") / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def remove_partial_files(folder: Path) -> None:
    """Delete partial files in the folder and its subfolders, which remain if a process was killed while writing."""
    for partial_file in folder.rglob(".*.part"):
        partial_file.unlink()


def print_line(text: str) -> None:
    """Print a line above the progress bar."""
    from tqdm import tqdm

    tqdm.write(text)


@contextlib.contextmanager
def add_checkpoint_hint_to_errors(task: Task, run: Run, resume: str) -> Iterator[None]:
    """Re-raise with hints: OSError how to resume (given a last checkpoint), NonFiniteError a lower learning rate."""
    try:
        yield
    except NonFiniteError as error:
        advice = f"The checkpoints are unchanged; try a lower {task.learning_rate_flag}"
        raise NonFiniteError(f"{error}. {advice}") from None
    except OSError as error:
        if not run.last.exists():
            raise
        raise OSError(f"{error}. The last checkpoint is intact: resume with {resume}") from None
