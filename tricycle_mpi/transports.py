"""Transports for all-reduce and broadcast of arrays: MPI through host memory, NCCL between GPUs, and CUDA-aware MPI.

Each rank computes on one GPU or on the host. All ranks start the same operations in the same order.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Literal, get_args

import numpy as np

from tricycle import devices
from tricycle.devices import Array, array_module
from tricycle.distributed.processes import Pending, ProcessGroup

TRANSPORT_VARIABLE = "TRICYCLE_MPI_GPU"
Name = Literal["nccl", "mpi", "host"]
NCCL_TYPES = {"float16": "NCCL_FLOAT16", "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64"}


class Transport:
    """The base class of transports.

    Args:
        ranks: the process group.
        gradients: its MPI communicator for arrays.
    """

    def __init__(self, ranks: Any, gradients: Any) -> None:
        self.ranks, self.gradients = ranks, gradients

    def start_all_reduce(self, array: Array) -> Pending:
        """Raise NotImplementedError; subclasses start to sum a contiguous array over ranks in place, until `wait`."""
        raise NotImplementedError(f"{type(self).__name__} defines no start_all_reduce")

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Raise NotImplementedError; subclasses start to overwrite all ranks' arrays with one rank's, until `wait`."""
        raise NotImplementedError(f"{type(self).__name__} defines no start_broadcast")


# -------------------------------------------------------------------- the host
class HostTransport(Transport):
    """Transport by MPI through host memory; arrays on a GPU are copied to the host and back."""

    def start_all_reduce(self, array: Array) -> Pending:
        """Start to sum a contiguous array over all ranks, in place, GPU arrays by a host copy; `wait` completes it."""
        host = array if isinstance(array, np.ndarray) else devices.to_cpu(array)
        return HostRequest(self.ranks, self.gradients.Iallreduce(self.ranks.mpi.IN_PLACE, host), array, host)

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Start to overwrite all ranks' arrays with one rank's, by a host copy if on a GPU; `wait` completes it."""
        host = array if isinstance(array, np.ndarray) else devices.to_cpu(array)
        if not _is_dense(host):
            host = host.copy()
        return HostRequest(self.ranks, self.gradients.Ibcast(_flat(host), rank), array, host)


class HostRequest:
    """A nonblocking MPI operation on an array, or on its copy in host memory."""

    def __init__(self, ranks: Any, request: Any, array: Array, host: np.ndarray) -> None:
        self.ranks, self.request, self.array, self.host = ranks, request, array, host

    def make_progress(self) -> None:
        """Let MPI make progress, without blocking."""
        self.request.Test()

    def wait(self) -> None:
        """Block until the operation is complete; copy the result to the GPU if the array is there."""
        self.ranks.wait(self.request)
        if self.host is not self.array:
            self.array[...] = array_module(self.array).asarray(self.host)


# -------------------------------------------------------------------- addresses on a GPU
class CUDAAwareTransport(Transport):
    """Transport by CUDA-aware MPI, which reads and writes GPU memory directly.

    The operations block: each starts when the caller waits for it, so none overlaps with the backward pass.
    """

    def start_all_reduce(self, array: Array) -> Pending:
        """Prepare the sum of a contiguous array over all ranks, in place; `wait` of the result computes it."""
        return BlockingRequest(self, array, lambda part: self.gradients.Allreduce(self.ranks.mpi.IN_PLACE, part))

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Prepare to overwrite every rank's array with that of one rank; `wait` of the result does it."""
        return BlockingRequest(self, array, lambda part: self.gradients.Bcast(part, rank))


class BlockingRequest:
    """A blocking MPI call, made when the caller waits for its result."""

    def __init__(self, transport: Transport, array: Array, call: Any) -> None:
        self.transport, self.array, self.call = transport, array, call

    def make_progress(self) -> None:
        """Do nothing: the operation runs in `wait`."""

    def wait(self) -> None:
        """Wait for all ranks (UnresponsiveRankError), then make the MPI call on the array, in place, and block."""
        dense = self.array if _is_dense(self.array) else self.array.copy()
        array_module(dense).cuda.get_current_stream().synchronize()  # MPI does not synchronize with CUDA streams
        self.transport.ranks.wait(self.transport.gradients.Ibarrier())  # this wait has a timeout; the call has none
        self.call(_flat(dense))
        if dense is not self.array:
            self.array[...] = dense


# -------------------------------------------------------------------- NCCL
class NCCLTransport(Transport):
    """Transport by NCCL between GPUs, one GPU for each rank.

    The operations run on a separate CUDA stream and overlap with the backward pass. `wait` does not block the host: it
    makes the stream of the model wait for the operation.

    Args:
        cuda: the module `cupy.cuda`.
    """

    def __init__(self, ranks: Any, gradients: Any, cuda: Any) -> None:
        super().__init__(ranks, gradients)
        self.cuda, self.nccl = cuda, cuda.nccl
        unique = self.nccl.get_unique_id() if ranks.is_rank_zero else None
        self.all = self.nccl.NcclCommunicator(ranks.size, ranks.broadcast(unique), ranks.rank)
        self.stream = cuda.Stream(non_blocking=True)

    def start_all_reduce(self, array: Array) -> Pending:
        """Start to sum a contiguous array over all ranks, in place; call `wait` of the result before using it."""
        add = self.nccl.NCCL_SUM
        return self._start(array, lambda at, n, kind: self.all.allReduce(at, at, n, kind, add, self.stream.ptr))

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Start to overwrite every rank's array with that of one rank; call `wait` of the result before using it."""
        return self._start(array, lambda at, n, kind: self.all.broadcast(at, at, n, kind, rank, self.stream.ptr))

    def _start(self, array: Array, call: Any) -> StreamRequest:
        kind = NCCL_TYPES.get(array.dtype.name)
        if kind is None:
            raise TypeError(f"NCCL: expected an array of {', '.join(NCCL_TYPES)}, got {array.dtype}")
        dense = array if _is_dense(array) else array.copy()
        self.stream.wait_event(self._record(self.cuda.get_current_stream()))  # the array must have been computed
        call(dense.data.ptr, dense.size, getattr(self.nccl, kind))
        return StreamRequest(self.cuda, self._record(self.stream), array, dense)

    def _record(self, stream: Any) -> Any:
        event = self.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


class StreamRequest:
    """An operation on a CUDA stream, on an array or its dense copy."""

    def __init__(self, cuda: Any, done: Any, array: Array, dense: Array) -> None:
        self.cuda, self.done, self.array, self.dense = cuda, done, array, dense

    def make_progress(self) -> None:
        """Do nothing: the GPU runs the operation."""

    def wait(self) -> None:
        """Make the current CUDA stream wait, and copy a dense copy back to the array, without blocking the host."""
        self.cuda.get_current_stream().wait_event(self.done)
        if self.dense is not self.array:
            self.array[...] = self.dense


# -------------------------------------------------------------------- selection
def select_gpu_transport(ranks: ProcessGroup, gradients: Any, cuda: Any) -> Transport:
    """Return the GPU arrays' transport: TRICYCLE_MPI_GPU's (ValueError, RuntimeError), else NCCL if usable, else host.

    CUDA-aware MPI must be requested with TRICYCLE_MPI_GPU=mpi, because other MPI libraries crash.

    Args:
        cuda: the module `cupy.cuda`.

    Raises:
        ValueError: TRICYCLE_MPI_GPU has an unknown value, or differs between ranks.
        RuntimeError: TRICYCLE_MPI_GPU=nccl, but NCCL is not installed or ranks share a GPU.
    """
    values = ranks.all_gather(os.environ.get(TRANSPORT_VARIABLE, ""))
    if set(values) - {"", *get_args(Name)} or len(set(values)) > 1:
        wanted, got = ", ".join(get_args(Name)), ", ".join(sorted(set(values)))
        raise ValueError(f"{TRANSPORT_VARIABLE}: expected one of {wanted}, the same on all ranks, got {got}")
    name = values[0]
    problem = _problem_of_nccl(ranks, cuda) if name in ("", "nccl") else ""
    if name == "nccl" and problem:
        raise RuntimeError(f"{TRANSPORT_VARIABLE}=nccl: {problem}")
    if name == "nccl" or not (name or problem):
        return NCCLTransport(ranks, gradients, cuda)
    return CUDAAwareTransport(ranks, gradients) if name == "mpi" else HostTransport(ranks, gradients)


def _problem_of_nccl(ranks: ProcessGroup, cuda: Any) -> str:
    """Return the reason why NCCL cannot be used, the same on all ranks; "" if it can."""
    has_it = bool(getattr(getattr(cuda, "nccl", None), "available", False))
    bus = cuda.Device().pci_bus_id
    everybody = ranks.all_gather((has_it, socket.gethostname(), bus))
    without = [f"rank {rank}" for rank, (there, *_) in enumerate(everybody) if not there]
    if without:
        return f"CuPy finds no NCCL in {', '.join(without)} (pip install nvidia-nccl-cu13, or -cu12)"
    gpus = [tuple(where) for _, *where in everybody]
    twice = [f"rank {rank}" for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    return f"NCCL needs a GPU for each rank, and {', '.join(twice)} share one" if twice else ""


def _is_dense(array: Array) -> bool:
    return bool(array.flags.c_contiguous or array.flags.f_contiguous)


def _flat(array: Array) -> Array:
    """Return a flat view of a dense array, in the order of its memory."""
    return (array if array.flags.c_contiguous else array.T).reshape(-1)
