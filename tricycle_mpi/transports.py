"""Transports for all-reduce and broadcast of arrays: MPI through host memory, NCCL between GPUs, and CUDA-aware MPI.

Each rank computes on one GPU or on the host. All ranks start the same operations in the same order.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Literal, get_args

from tricycle import devices
from tricycle.devices import Array, array_module
from tricycle.distributed.processes import Pending, ProcessGroup

TRANSPORT_VARIABLE = "TRICYCLE_MPI_GPU"
Name = Literal["nccl", "mpi", "host"]
NCCL_TYPES = {"float16": "NCCL_FLOAT16", "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64"}


class Operation:
    """An asynchronous operation on an array, or on its copy in host memory or in contiguous memory.

    Args:
        array: gets the result, if the operation changes a copy.
        copy: the array that the operation changes.
        complete: waits for the operation, or runs it.
        poll: lets MPI make progress; None if another thread or processor runs the operation.
    """

    def __init__(self, array: Array, copy: Array, complete: Callable[[], Any], poll: Any = None) -> None:
        self.array, self.copy, self.complete, self.poll = array, copy, complete, poll

    def make_progress(self) -> None:
        """Let MPI make progress, without blocking."""
        if self.poll is not None:
            self.poll()

    def wait(self) -> None:
        """Block until the operation is complete (on a CUDA stream: make the current one wait); copy the result back."""
        self.complete()
        if self.copy is not self.array:
            self.array[...] = array_module(self.array).asarray(self.copy)


class HostTransport:
    """Transport by MPI through host memory; arrays on a GPU are copied to the host and back.

    Args:
        ranks: the process group.
        gradients: its MPI communicator for arrays.
    """

    def __init__(self, ranks: Any, gradients: Any) -> None:
        self.ranks, self.gradients = ranks, gradients

    def start_all_reduce(self, array: Array) -> Pending:
        """Start to sum a contiguous array over all ranks, in place; call `wait` of the result before using it."""
        host = devices.to_cpu(array)
        return self._operation(array, host, self.gradients.Iallreduce(self.ranks.mpi.IN_PLACE, host))

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Start to overwrite every rank's array with that of one rank; call `wait` of the result before using it."""
        host = _dense(devices.to_cpu(array))
        return self._operation(array, host, self.gradients.Ibcast(_flat(host), rank))

    def _operation(self, array: Array, host: Array, request: Any) -> Operation:
        """Return the operation that waits for an MPI request on `host`, with a timeout, and copies it to `array`."""
        return Operation(array, host, lambda: self.ranks.wait(request), request.Test)


class CUDAAwareTransport(HostTransport):
    """Transport by CUDA-aware MPI, which reads and writes GPU memory directly.

    The operations block: each starts when the caller waits for it, so none overlaps with the backward pass.
    """

    def start_all_reduce(self, array: Array) -> Pending:
        """Prepare the sum of a contiguous array over all ranks, in place; `wait` of the result computes it."""
        return self._blocking(array, lambda part: self.gradients.Allreduce(self.ranks.mpi.IN_PLACE, part))

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Prepare to overwrite every rank's array with that of one rank; `wait` of the result does it."""
        return self._blocking(array, lambda part: self.gradients.Bcast(part, rank))

    def _blocking(self, array: Array, call: Callable[[Array], Any]) -> Operation:
        """Return an operation whose `wait` synchronizes stream and ranks, then calls a function on the flat array."""
        dense = _dense(array)

        def complete() -> None:
            array_module(dense).cuda.get_current_stream().synchronize()  # MPI does not synchronize with CUDA streams
            self.ranks.wait(self.gradients.Ibarrier())  # this wait has a timeout; the call has none
            call(_flat(dense))

        return Operation(array, dense, complete)


# -------------------------------------------------------------------- NCCL
class NCCLTransport(HostTransport):
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

    def _start(self, array: Array, call: Any) -> Operation:
        """Start an NCCL call on its own stream, after the current one's work; TypeError for an unsupported dtype."""
        kind = NCCL_TYPES.get(array.dtype.name)
        if kind is None:
            raise TypeError(f"NCCL: expected an array of {', '.join(NCCL_TYPES)}, got {array.dtype}")
        dense = _dense(array)
        self.stream.wait_event(self._record(self.cuda.get_current_stream()))  # the array must have been computed
        call(dense.data.ptr, dense.size, getattr(self.nccl, kind))
        done = self._record(self.stream)
        return Operation(array, dense, lambda: self.cuda.get_current_stream().wait_event(done))

    def _record(self, stream: Any) -> Any:
        """Return a new event recorded on a stream."""
        event = self.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


# -------------------------------------------------------------------- selection
def select_gpu_transport(ranks: ProcessGroup, gradients: Any, cuda: Any) -> HostTransport:
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
    """Return why NCCL cannot be used, "" if it can; all ranks must call it, and get the same answer."""
    has_it = bool(getattr(getattr(cuda, "nccl", None), "available", False))
    bus = cuda.Device().pci_bus_id
    everybody = ranks.all_gather((has_it, socket.gethostname(), bus))
    without = [f"rank {rank}" for rank, (there, *_) in enumerate(everybody) if not there]
    if without:
        return f"CuPy finds no NCCL in {', '.join(without)} (pip install nvidia-nccl-cu13, or -cu12)"
    gpus = [tuple(where) for _, *where in everybody]
    twice = [f"rank {rank}" for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    return f"NCCL needs a GPU for each rank, and {', '.join(twice)} share one" if twice else ""


def _dense(array: Array) -> Array:
    """Return an array of contiguous memory, in the order of its axes or the reverse, else a contiguous copy."""
    return array if array.flags.c_contiguous or array.flags.f_contiguous else array.copy()


def _flat(array: Array) -> Array:
    """Return a 1-D view of a C- or Fortran-contiguous array, in the order of its memory."""
    return (array if array.flags.c_contiguous else array.T).reshape(-1)
