"""Ways by which arrays are summed over ranks, and given to all: through the host's memory, by NCCL between GPUs, or by
an MPI that takes addresses in a GPU's memory.

A rank computes on a GPU of its own, or on the host. All ranks begin the same sums in the same order.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Literal, get_args

import numpy as np

from tricycle import devices
from tricycle.devices import Array, array_module
from tricycle.distributed.processes import Pending, Processes

WAY = "TRICYCLE_MPI_GPU"
Name = Literal["nccl", "mpi", "host"]
NCCL_TYPES = {"float16": "NCCL_FLOAT16", "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64"}


class Way:
    """How the ranks of `tricycle_mpi.ranks` sum arrays.

    Args:
        ranks: what it is a part of.
        gradients: their communicator for arrays.
    """

    def __init__(self, ranks: Any, gradients: Any) -> None:
        self.ranks, self.gradients = ranks, gradients

    def start_sum(self, array: Array) -> Pending:
        """As `Processes.start_sum`."""
        raise NotImplementedError(f"{type(self).__name__} defines no start_sum")

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """As `Processes.start_broadcast`."""
        raise NotImplementedError(f"{type(self).__name__} defines no start_broadcast")


# -------------------------------------------------------------------- the host
class Host(Way):
    """Arrays in host memory; those on a GPU are copied there and back."""

    def start_sum(self, array: Array) -> Pending:
        host = array if isinstance(array, np.ndarray) else devices.to_cpu(array)
        return OnHost(self.ranks, self.gradients.Iallreduce(self.ranks.mpi.IN_PLACE, host), array, host)

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        host = array if isinstance(array, np.ndarray) else devices.to_cpu(array)
        if not _is_one_piece(host):
            host = host.copy()
        return OnHost(self.ranks, self.gradients.Ibcast(_flat(host), rank), array, host)


class OnHost:
    """What MPI has begun to do with an array, or with its copy in host memory."""

    def __init__(self, ranks: Any, request: Any, array: Array, host: np.ndarray) -> None:
        self.ranks, self.request, self.array, self.host = ranks, request, array, host

    def poke(self) -> None:
        self.request.Test()

    def wait(self) -> None:
        self.ranks.wait(self.request)
        if self.host is not self.array:
            self.array[...] = array_module(self.array).asarray(self.host)


# -------------------------------------------------------------------- addresses on a GPU
class DeviceBuffers(Way):
    """Arrays on a GPU, by an MPI that takes their addresses ("CUDA-aware").

    Such an MPI does so in calls that block, so nothing begins before it is waited for, and nothing overlaps.
    """

    def start_sum(self, array: Array) -> Pending:
        return Blocking(self, array, lambda part: self.gradients.Allreduce(self.ranks.mpi.IN_PLACE, part))

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        return Blocking(self, array, lambda part: self.gradients.Bcast(part, rank))


class Blocking:
    """A call that blocks, to be made when its result is needed."""

    def __init__(self, way: Way, array: Array, call: Any) -> None:
        self.way, self.array, self.call = way, array, call

    def poke(self) -> None:
        pass

    def wait(self) -> None:
        whole = self.array if _is_one_piece(self.array) else self.array.copy()
        array_module(whole).cuda.get_current_stream().synchronize()  # MPI knows nothing of streams
        self.way.ranks.wait(self.way.gradients.Ibarrier())  # which, unlike what follows, can be given up
        self.call(_flat(whole))
        if whole is not self.array:
            self.array[...] = whole


# -------------------------------------------------------------------- NCCL
class NCCL(Way):
    """Arrays on GPUs, one a rank, by NVIDIA's library.

    Sums have a stream of their own, which goes on while the backward pass does. Nobody on the host waits for them: who
    waits is the stream that the model is computed on.

    Args:
        cuda: the module `cupy.cuda`.
    """

    def __init__(self, ranks: Any, gradients: Any, cuda: Any) -> None:
        super().__init__(ranks, gradients)
        self.cuda, self.nccl = cuda, cuda.nccl
        unique = self.nccl.get_unique_id() if ranks.is_first else None
        self.all = self.nccl.NcclCommunicator(ranks.size, ranks.agree(unique), ranks.rank)
        self.stream = cuda.Stream(non_blocking=True)

    def start_sum(self, array: Array) -> Pending:
        add = self.nccl.NCCL_SUM
        return self._start(array, lambda at, n, kind: self.all.allReduce(at, at, n, kind, add, self.stream.ptr))

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        return self._start(array, lambda at, n, kind: self.all.broadcast(at, at, n, kind, rank, self.stream.ptr))

    def _start(self, array: Array, call: Any) -> OnStream:
        kind = NCCL_TYPES.get(array.dtype.name)
        if kind is None:
            raise TypeError(f"NCCL: expected an array of {', '.join(NCCL_TYPES)}, got {array.dtype}")
        whole = array if _is_one_piece(array) else array.copy()
        self.stream.wait_event(self._now(self.cuda.get_current_stream()))  # until the array is there
        call(whole.data.ptr, whole.size, getattr(self.nccl, kind))
        return OnStream(self.cuda, self._now(self.stream), array, whole)

    def _now(self, stream: Any) -> Any:
        event = self.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


class OnStream:
    """What a stream has begun to do with an array, or with its copy in one piece."""

    def __init__(self, cuda: Any, done: Any, array: Array, whole: Array) -> None:
        self.cuda, self.done, self.array, self.whole = cuda, done, array, whole

    def poke(self) -> None:
        pass

    def wait(self) -> None:
        self.cuda.get_current_stream().wait_event(self.done)
        if self.whole is not self.array:
            self.array[...] = self.whole


# -------------------------------------------------------------------- which
def way_of_gpus(ranks: Processes, gradients: Any, cuda: Any) -> Way:
    """The way for arrays on GPUs: as TRICYCLE_MPI_GPU says; or else NCCL where all ranks have it, and a GPU each.

    An MPI that takes addresses on a GPU cannot be told from one that crashes with them, so it must be asked for.

    Args:
        cuda: the module `cupy.cuda`.

    Raises:
        ValueError: TRICYCLE_MPI_GPU says something else, or not the same in all ranks.
        RuntimeError: it asks for NCCL, which is not there, or ranks share a GPU.
    """
    said = ranks.gather(os.environ.get(WAY, ""))
    if set(said) - {"", *get_args(Name)} or len(set(said)) > 1:
        wanted = ", ".join(get_args(Name))
        raise ValueError(f"{WAY}: expected one of {wanted}, the same in all ranks, got {', '.join(sorted(set(said)))}")
    name = said[0]
    problem = _problem_of_nccl(ranks, cuda) if name in ("", "nccl") else ""
    if name == "nccl" and problem:
        raise RuntimeError(f"{WAY}=nccl: {problem}")
    if name == "nccl" or not (name or problem):
        return NCCL(ranks, gradients, cuda)
    return DeviceBuffers(ranks, gradients) if name == "mpi" else Host(ranks, gradients)


def _problem_of_nccl(ranks: Processes, cuda: Any) -> str:
    """Why NCCL cannot be used, the same in all ranks; "" where it can."""
    has_it = bool(getattr(getattr(cuda, "nccl", None), "available", False))
    bus = cuda.Device().pci_bus_id
    everybody = ranks.gather((has_it, socket.gethostname(), bus))
    without = [f"rank {rank}" for rank, (there, *_) in enumerate(everybody) if not there]
    if without:
        return f"CuPy finds no NCCL in {', '.join(without)} (pip install nvidia-nccl-cu13, or -cu12)"
    gpus = [tuple(where) for _, *where in everybody]
    twice = [f"rank {rank}" for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    return f"NCCL needs a GPU for each rank, and {', '.join(twice)} share one" if twice else ""


def _is_one_piece(array: Array) -> bool:
    return bool(array.flags.c_contiguous or array.flags.f_contiguous)


def _flat(array: Array) -> Array:
    """An array in one piece, in the order of its memory; a view."""
    return (array if array.flags.c_contiguous else array.T).reshape(-1)
