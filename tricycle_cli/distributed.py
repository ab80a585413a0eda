"""A program in several processes: who they are, what they must have in common, and how they end together."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import reprlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tricycle.distributed.processes import SINGLE_PROCESS, ProcessGroup
from tricycle_cli.flags import on_one_line
from tricycle_mpi.launch import launch_info

T = TypeVar("T")
# So long rank 0 waits, when it fails, for others that fail too; they speak later, if they still can.
TOGETHER_SECONDS = 0.3
# A signal may be the launcher's, which ends all ranks where one has failed; then there is nothing to say in the others.
SIGNAL_SECONDS = 2.0
SPOKEN_SECONDS = 0.2  # after which the launcher has passed the last words on; MPICH's forgets them where all end before
FIRST_SECONDS = 1.0  # in which rank 0 says what all have found
INTERRUPTED = 130  # the exit status, by the convention of shells
VISIBLE = "CUDA_VISIBLE_DEVICES"
OWN_CODE = "tricycle tricycle_accelerators tricycle_cli tricycle_datasets tricycle_mpi".split()


@contextlib.contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """Within this block, the processes that were started with this one, or nobody else.

    Only rank 0 prints. An error in any of them ends all, at once and with one message that says which.

    Raises:
        ImportError: there are others, and nothing to reach them by.
    """
    there = launch_info()
    if there.size == 1:
        yield SINGLE_PROCESS
        return
    try:
        from tricycle_mpi.ranks import join_process_group

        processes = join_process_group()
    except (ImportError, RuntimeError, ValueError):
        _leave_it_to_the_first()
        raise
    except KeyboardInterrupt:
        # the others wait for this process, as MPI would for them when Python ends: the launcher ends all instead
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
    with contextlib.ExitStack() as silent:
        if not processes.is_rank_zero:
            nowhere = silent.enter_context(open(os.devnull, "w", encoding="utf-8"))
            silent.enter_context(contextlib.redirect_stdout(nowhere))
        try:
            share_threads(processes)
            share_gpus(processes)
            yield processes
        except SystemExit:  # all of them leave so
            raise
        except BaseException as error:
            _end_all(processes, error)


def expect_one_process(command: str) -> None:
    """Raise ValueError, on rank 0, where several processes were started with a command that takes one."""
    there = launch_info()
    if there.size > 1:
        _leave_it_to_the_first()
        got = f"{there.size}: start it without mpiexec"
        raise ValueError(f"tricycle {command}: expected one process (`tricycle train` alone takes several), got {got}")


def _leave_it_to_the_first() -> None:
    """Where all processes find the same before they can reach each other: only rank 0 comes back from here."""
    if launch_info().rank:
        time.sleep(FIRST_SECONDS)  # a launcher ends all when one has left
        raise SystemExit(1) from None


def _end_all(processes: Any, error: BaseException) -> None:
    """Say once what happened, and where, and end every process."""
    message = on_one_line(str(error) or type(error).__name__)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's, where another rank was faster
    if isinstance(error, KeyboardInterrupt):
        message = f"interrupted ({message})"
        time.sleep(SIGNAL_SECONDS)
    others = processes.collect_failures(message, TOGETHER_SECONDS)
    all_say_so = len(others) == processes.size - 1 and set(others.values()) == {message}
    where = "" if all_say_so else f"rank {processes.rank} of {processes.size} on {socket.gethostname()}: "
    if os.environ.get("TRICYCLE_TRACEBACK"):
        traceback.print_exception(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        line = f"{Path(sys.argv[0]).name}: {where}{message}"
        print(
            line if processes.is_rank_zero else f"\n{line}", file=sys.stderr, flush=True
        )  # below rank 0's progress bar
    time.sleep(SPOKEN_SECONDS)
    processes.abort()
    time.sleep(60)  # MPI ends this process


# -------------------------------------------------------------------- one after another
def on_rank_zero(processes: ProcessGroup, work: Callable[[], T]) -> T:
    """What rank 0 returns from some work that it does alone, for all."""
    result: Any = work() if processes.is_rank_zero else None
    return processes.broadcast(result)


def parsed(processes: ProcessGroup, parse: Callable[[], T]) -> T:
    """A command line, which rank 0 reads first; where it leaves the program, so do all."""
    code: Any = None
    result = None
    if processes.is_rank_zero:
        try:
            result = parse()
        except SystemExit as leaving:
            code = leaving.code or 0
    code = processes.broadcast(code)
    if code is not None:
        raise SystemExit(code)
    return parse() if result is None else result


# -------------------------------------------------------------------- what they have in common
def check_same(processes: ProcessGroup, facts: dict[str, Any]) -> None:
    """Refuse to train with ranks that are not alike: their weights would drift apart.

    Raises:
        ValueError: names every rank and fact that differs from rank 0's.
    """
    if processes.size == 1:
        return
    everybody = processes.all_gather((socket.gethostname(), facts))
    wanted = everybody[0][1]
    problems = [
        f"rank {rank} on {host} has another {name} than rank 0: {_difference(own.get(name), fact)}"
        for rank, (host, own) in enumerate(everybody)
        for name, fact in wanted.items()
        if own.get(name) != fact
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _difference(own: Any, wanted: Any) -> str:
    """In what two facts differ; of lists and dicts only what does."""
    if isinstance(own, dict) and isinstance(wanted, dict):
        names = [name for name in {**own, **wanted} if own.get(name) != wanted.get(name)]
        own, wanted = ({name: fact.get(name) for name in names} for fact in (own, wanted))
    if isinstance(own, list) and isinstance(wanted, list):
        own, wanted = [each for each in own if each not in wanted], [each for each in wanted if each not in own]
    return f"{reprlib.repr(own)}, not {reprlib.repr(wanted)}"


def common_facts() -> dict[str, Any]:
    """What all ranks must have in common, whatever they do: code, libraries and the number of threads."""
    return {
        "version of Tricycle's code": code_digest(),
        "version of Python or NumPy": f"{platform.python_version()} and {np.__version__}",
        "number of threads (TRICYCLE_NUM_THREADS sets it)": n_threads(),
    }


def code_digest() -> str:
    """A few letters that stand for the text of all of Tricycle's modules."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for package in OWN_CODE:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def check_batches(processes: ProcessGroup, n_batches: int, batch_size: int) -> None:
    """Raise ValueError where an update has fewer batches than there are ranks."""
    size = processes.size
    each = f"an update of this run has {n_batches} batches of {batch_size} sequences"
    if n_batches < size:
        raise ValueError(f"expected at most {n_batches} ranks, for {each}, got {size}")
    if n_batches % size:
        most, fewest = -(-n_batches // size), n_batches // size
        print(f"note: {each}, which {size} ranks do not divide: some compute {most}, and the others, {fewest}, wait")


# -------------------------------------------------------------------- threads
def n_threads() -> int:
    """How many threads this process computes with."""
    try:
        from tricycle_accelerators import threads
    except ModuleNotFoundError:
        return 1
    return threads.n_threads()


def share_threads(processes: ProcessGroup) -> None:
    """Share the processors of a machine out among its ranks, unless somebody has said how many threads there are."""
    if processes.size == 1 or os.environ.get("TRICYCLE_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS"):
        return
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    everybody = processes.all_gather((socket.gethostname(), sorted(own)))
    here = [set(processors) for host, processors in everybody if host == socket.gethostname()]
    n_sharing = sum(bool(own & processors) for processors in here)
    fewest = min(processes.all_gather(max(1, len(own) // n_sharing)))
    os.environ["TRICYCLE_NUM_THREADS"] = str(fewest)
    with contextlib.suppress(ModuleNotFoundError):
        from tricycle_accelerators import threads

        threads.forget_n_threads()
    bound = n_sharing == 1 and len(own) < (os.cpu_count() or 1) // len(here)
    hint = " (mpiexec binds each to so many; --bind-to none, or OMP_NUM_THREADS, may give it more)" if bound else ""
    print(f"{processes.size} ranks with {fewest} thread{'s' if fewest > 1 else ''} each{hint}")


def share_gpus(processes: ProcessGroup) -> None:
    """Give each rank of a machine one of the GPUs that it may see; ranks take turns where there are fewer.

    Before CUDA is asked for anything: later it would not hear of it.
    """
    seen = [name for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if VISIBLE not in os.environ:
        seen = [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    if processes.size == 1:
        return
    everybody = processes.all_gather((socket.gethostname(), seen))
    place = everybody[: processes.rank].count(everybody[processes.rank])
    if seen:
        os.environ[VISIBLE] = seen[place % len(seen)]
