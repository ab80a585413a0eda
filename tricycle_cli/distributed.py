"""Run a command in several processes: check that ranks match, divide threads and GPUs, and report errors once."""

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
# A failing rank waits this long for the failures of other ranks, which are then reported together.
COLLECT_SECONDS = 0.3
# A signal may come from the launcher, which ends all ranks when one has failed; then the other ranks print nothing.
SIGNAL_SECONDS = 2.0
OUTPUT_SECONDS = 0.2  # until the launcher has printed the message; MPICH's loses it if all ranks end before
RANK_ZERO_SECONDS = 1.0  # until rank zero has printed an error that all ranks have found
INTERRUPTED = 130  # the exit status, by the convention of shells
VISIBLE = "CUDA_VISIBLE_DEVICES"
CODE_PACKAGES = "tricycle tricycle_accelerators tricycle_cli tricycle_datasets tricycle_mpi".split()


@contextlib.contextmanager
def process_group() -> Iterator[ProcessGroup]:
    """Yield the group of mpiexec's processes, or of one; share threads and GPUs, print on rank zero, end all on errors.

    Only rank zero prints within this context. An error on any rank ends all ranks with one message that names the rank.

    Raises:
        ImportError: several processes, and no library for communication.
    """
    if launch_info().size == 1:
        yield SINGLE_PROCESS
        return
    try:
        from tricycle_mpi.ranks import join_process_group

        processes = join_process_group()
    except (ImportError, RuntimeError, ValueError):
        _exit_other_ranks()
        raise
    except KeyboardInterrupt:
        # os._exit, because MPI would wait for the other ranks when Python ends; the launcher ends all ranks
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)
    with contextlib.ExitStack() as stack:
        if not processes.is_rank_zero:
            null_file = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(null_file))
        try:
            share_threads(processes)
            share_gpus(processes)
            yield processes
        except SystemExit:  # all ranks exit
            raise
        except BaseException as error:
            _end_all(processes, error)


def require_one_process(command: str) -> None:
    """If there are several processes, raise ValueError on rank zero, and exit on the other ranks."""
    size = launch_info().size
    if size > 1:
        _exit_other_ranks()
        got = f"{size}: start the command without mpiexec"
        raise ValueError(f"tricycle {command}: expected one process (only `tricycle train` runs in several), got {got}")


def _exit_other_ranks() -> None:
    """Exit with status 1, after a wait, on all ranks but zero, which reports an error that all ranks find early."""
    if launch_info().rank:
        time.sleep(RANK_ZERO_SECONDS)  # the launcher ends all ranks when one exits
        raise SystemExit(1) from None


def _end_all(processes: Any, error: BaseException) -> None:
    """Print an error once, with the rank where it occurred, and end all processes."""
    message = on_one_line(str(error) or type(error).__name__)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher sends it if another rank failed first
    if isinstance(error, KeyboardInterrupt):
        message = f"interrupted ({message})"
        time.sleep(SIGNAL_SECONDS)
    others = processes.collect_failures(message, COLLECT_SECONDS)
    is_on_all_ranks = len(others) == processes.size - 1 and set(others.values()) == {message}
    where = "" if is_on_all_ranks else f"rank {processes.rank} of {processes.size} on {socket.gethostname()}: "
    if os.environ.get("TRICYCLE_TRACEBACK"):
        traceback.print_exception(error)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        line = f"{Path(sys.argv[0]).name}: {where}{message}"
        line = line if processes.is_rank_zero else f"\n{line}"  # below the progress bar of rank zero
        print(line, file=sys.stderr, flush=True)
    time.sleep(OUTPUT_SECONDS)
    processes.abort()
    time.sleep(60)  # MPI ends this process


# -------------------------------------------------------------------- one after another
def on_rank_zero(processes: ProcessGroup, work: Callable[[], T]) -> T:
    """Call a function on rank zero only, and return its broadcast result on all ranks; a collective call."""
    result: Any = work() if processes.is_rank_zero else None
    return processes.broadcast(result)


def parse_on_all_ranks(processes: ProcessGroup, parse: Callable[[], T]) -> T:
    """Parse the command line on all ranks, rank zero first; if parsing exits on rank zero, exit on all ranks."""
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


# -------------------------------------------------------------------- properties that must be the same on all ranks
def check_same(processes: ProcessGroup, properties: dict[str, Any]) -> None:
    """Raise ValueError on all ranks if a property differs from rank zero's; the message names ranks and properties."""
    gathered = processes.all_gather((socket.gethostname(), properties))
    expected = gathered[0][1]
    problems = [
        f"rank {rank} on {host} has another {name} than rank 0: {_difference(own.get(name), value)}"
        for rank, (host, own) in enumerate(gathered)
        for name, value in expected.items()
        if own.get(name) != value
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _difference(own: Any, expected: Any) -> str:
    """Format the difference of two values; of lists and dicts only the items that differ."""
    if isinstance(own, dict) and isinstance(expected, dict):
        names = [name for name in {**own, **expected} if own.get(name) != expected.get(name)]
        own, expected = ({name: value.get(name) for name in names} for value in (own, expected))
    if isinstance(own, list) and isinstance(expected, list):
        own, expected = [x for x in own if x not in expected], [x for x in expected if x not in own]
    return f"{reprlib.repr(own)}, not {reprlib.repr(expected)}"


def common_properties() -> dict[str, Any]:
    """Return values that must be equal on all ranks, by description: code digest, versions and number of threads."""
    return {
        "version of Tricycle's code": code_digest(),
        "version of Python or NumPy": f"{platform.python_version()} and {np.__version__}",
        "number of threads (TRICYCLE_NUM_THREADS sets it)": n_threads(),
    }


def code_digest() -> str:
    """Return the first 12 hex digits of a SHA-256 of all of Tricycle's Python files."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for package in CODE_PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def check_batches(processes: ProcessGroup, n_batches: int, batch_size: int) -> None:
    """Raise ValueError if an update has fewer batches than ranks; print a note if the batches do not divide evenly."""
    size = processes.size
    batches = f"an update of this run has {n_batches} batches of {batch_size} sequences"
    if n_batches < size:
        raise ValueError(f"expected at most {n_batches} ranks, because {batches}, got {size}")
    if n_batches % size:
        most, fewest = -(-n_batches // size), n_batches // size
        print(f"note: {batches}, not a multiple of {size} ranks: some ranks compute {most}, others {fewest} and wait")


# -------------------------------------------------------------------- threads
def n_threads() -> int:
    """Return the number of threads that this process computes with; 1 without `tricycle_accelerators`."""
    try:
        from tricycle_accelerators import threads
    except ModuleNotFoundError:
        return 1
    return threads.n_threads()


def share_threads(processes: ProcessGroup) -> None:
    """Set and print TRICYCLE_NUM_THREADS, the fewest usable CPUs per rank; skip if it or OMP_NUM_THREADS is set."""
    if os.environ.get("TRICYCLE_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS"):
        return
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    gathered = processes.all_gather((socket.gethostname(), sorted(own)))
    here = [set(processors) for host, processors in gathered if host == socket.gethostname()]
    n_sharing = sum(bool(own & processors) for processors in here)
    fewest = min(processes.all_gather(max(1, len(own) // n_sharing)))
    os.environ["TRICYCLE_NUM_THREADS"] = str(fewest)
    with contextlib.suppress(ModuleNotFoundError):
        from tricycle_accelerators import threads

        threads.reset_n_threads()
    bound = n_sharing == 1 and len(own) < (os.cpu_count() or 1) // len(here)
    hint = " (limited by mpiexec's binding; --bind-to none or OMP_NUM_THREADS raises the limit)" if bound else ""
    print(f"{processes.size} ranks with {fewest} thread{'s' if fewest > 1 else ''} each{hint}")


def share_gpus(processes: ProcessGroup) -> None:
    """Set CUDA_VISIBLE_DEVICES so that each rank of a machine has one GPU, round-robin; call it before CUDA starts."""
    visible = [name for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if VISIBLE not in os.environ:
        visible = [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    gathered = processes.all_gather((socket.gethostname(), visible))
    local_rank = gathered[: processes.rank].count(gathered[processes.rank])
    if visible:
        os.environ[VISIBLE] = visible[local_rank % len(visible)]
