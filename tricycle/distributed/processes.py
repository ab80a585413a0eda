"""Data-parallel training: process groups, gradient all-reduce in buckets, and reproducible dropout masks.

Every process holds the whole model. In each update a process computes the gradients of its own batches. The gradients
are summed over all processes, and each process makes the same update. The loss is divided by the number of labels of
all processes, so the sum of the gradients is the gradient of the mean loss.

`ProcessGroup` is the interface that training uses, and its implementation for a single process. A subclass for several
processes (`tricycle_mpi.ranks`) defines six methods: `broadcast`, `all_gather`, `all_reduce`, `start_all_reduce`,
`start_broadcast` and `answer_pings`.

Gradients are summed in flat buckets. The backward pass computes the gradients of the last layers first; their
all-reduce overlaps with the rest of the backward pass (Li et al. 2020, "PyTorch Distributed").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from tricycle import devices
from tricycle.devices import Array, array_module
from tricycle.layers import Layer
from tricycle.tensor import Tensor

T = TypeVar("T")
BUCKET_BYTES = 4 * 2**20


class Pending(Protocol):
    """An asynchronous communication operation."""

    def make_progress(self) -> None:
        """Let the operation make progress, without blocking; abstract."""

    def wait(self) -> None:
        """Block until the operation is complete; abstract."""


class ProcessGroup:
    """The processes that train one model together, as seen from one of them. This class is a single process.

    All processes must call the collective methods in the same order.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
        bucket_bytes: the least size of a gradient bucket.
        overlap: start the all-reduce of a bucket during the backward pass, not after it.
        wait_seconds: the time that this process has spent waiting for gradients.
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.bucket_bytes = BUCKET_BYTES
        self.overlap = True
        self.wait_seconds = 0.0
        self._reducers: WeakKeyDictionary[Layer, GradientReducer] = WeakKeyDictionary()

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero, the process that prints and writes files."""
        return self.rank == 0

    def shard(self, n_items: int) -> range:
        """Return the range of items that this process handles: consecutive, of equal number on all ranks +- 1."""
        return range(self.rank * n_items // self.size, (self.rank + 1) * n_items // self.size)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true in any process; all processes must call this."""
        return self.all_reduce([float(bool(flag))])[0] > 0

    @property
    def reducer(self) -> Callable[[Layer], GradientReducer] | None:
        """The function that gives `training.compute_gradients` a gradient reducer; None for one process."""
        return None if self.size == 1 else self.gradient_reducer

    def gradient_reducer(self, model: Layer) -> GradientReducer:
        """Return the GradientReducer of a model, cached while its trainable parameters stay, after `start_update()`."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        reducer = self._reducers.get(model)
        if reducer is None or not reducer.matches(parameters):
            reducer = self._reducers[model] = GradientReducer(self, parameters)
        reducer.start_update()
        return reducer

    def broadcast(self, value: T) -> T:
        """Return rank zero's value in every process (here, with one process, `value`); all processes must call this."""
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return a list of all processes' values by rank, in every process (here [value]); all must call this."""
        return [value]

    def all_reduce(self, numbers: Sequence[float]) -> list[float]:
        """Return the elementwise sum over all processes in every process (here `numbers`); all must call this."""
        return list(numbers)

    def start_all_reduce(self, array: Array) -> Pending:
        """Start to sum a contiguous array over all ranks, in place; use it only after wait() on the result. Abstract.

        The result is bit-identical on all ranks and between runs.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no start_all_reduce")

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Overwrite every rank's array with that of `rank`, asynchronously: use it only after wait(). Abstract."""
        raise NotImplementedError(f"{type(self).__name__} defines no start_broadcast")

    def answer_pings(self) -> None:
        """Answer the pings of waiting ranks; called regularly in computations of minutes. Here, it does nothing."""

    def set_status(self, status: str) -> None:
        """Store the current work, such as "update 3", for a timeout's error message. Here, it does nothing."""


SINGLE_PROCESS = ProcessGroup()


# -------------------------------------------------------------------- gradients
class Bucket:
    """The gradients of consecutive parameters in one flat array.

    Attributes:
        flat: the array.
        parts: a view of the array for each parameter, in the parameter's shape.
        missing: the parameters that have no complete gradient yet.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        first = parameters[0]
        self.flat: Array = first.xp.zeros(sum(parameter.size for parameter in parameters), first.dtype)
        self.parts: dict[Tensor, Array] = {}
        start = 0
        for parameter in parameters:
            self.parts[parameter] = self.flat[start : start + parameter.size].reshape(parameter.shape)
            start += parameter.size
        self.missing: set[Tensor] = set()
        self.pending: Pending | None = None


class GradientReducer:
    """All-reduces the gradients of a model over all processes, once per update.

    The summed gradients are views of the buckets, valid until the next update starts.
    """

    def __init__(self, processes: ProcessGroup, parameters: list[Tensor]) -> None:
        self.processes = processes
        self.parameters = parameters
        self.buckets = [Bucket(group) for group in _grouped(parameters[::-1], processes.bucket_bytes)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parts}

    def matches(self, parameters: list[Tensor]) -> bool:
        """Return whether the buckets were made for these parameters, with the same shapes, dtypes and devices."""
        same = len(parameters) == len(self.parameters) and all(a is b for a, b in zip(parameters, self.parameters))
        return same and all(_is_like(bucket.parts[p], p.array) for bucket in self.buckets for p in bucket.parts)

    def start_update(self) -> None:
        """Mark all gradients as missing, and set `grad` to None on all ranks but zero, before an update."""
        self._n_started = 0
        for bucket in self.buckets:
            bucket.missing, bucket.pending = set(bucket.parts), None
        for parameter in self.parameters:
            if parameter.grad is not None and not self.processes.is_rank_zero:
                parameter.grad = None  # every rank has the same gradient, which must be counted once

    def total_labels(self, n_labels: Any) -> int:
        """Return the sum of `n_labels` over all processes; all processes must call this."""
        return int(self.processes.all_reduce([float(n_labels)])[0])

    def start_batch(self) -> None:
        """Answer the pings of waiting ranks between two batches."""
        self.processes.answer_pings()

    def on_gradient_complete(self, parameter: Tensor) -> None:
        """Move a complete gradient into its bucket (`grad` becomes a view); with `overlap`, all-reduce full buckets."""
        bucket = self.bucket_of.get(parameter)
        if bucket is None:  # an input of the model
            return
        if parameter.grad is not None:
            part = bucket.parts[parameter]
            part[...] = parameter.grad.array
            parameter.grad.array = part
        bucket.missing.discard(parameter)
        if self.processes.overlap:
            self._start_buckets()

    def _start_buckets(self, incomplete: bool = False) -> None:
        """Start all-reducing the next full (or all) buckets, missing gradients as 0; let started ones make progress."""
        while self._n_started < len(self.buckets):
            bucket = self.buckets[self._n_started]
            if bucket.missing and not incomplete:
                break
            for parameter in bucket.missing:  # no gradient reached it in this process
                bucket.parts[parameter][...] = 0
            bucket.pending = self.processes.start_all_reduce(bucket.flat)
            self._n_started += 1
        for bucket in self.buckets[: self._n_started]:
            if bucket.pending is not None:
                bucket.pending.make_progress()

    def finish(self, loss: Any, problem: str) -> tuple[Any, str]:
        """Complete the all-reduce; set each `grad` to the sum (None on a problem); return the total loss and problems.

        Args:
            loss: the part of the mean loss that this process computed.
            problem: a description of values that were not finite in this process; "" if there were none.
        """
        for parameter in self.parameters:
            if parameter in self.bucket_of[parameter].missing and parameter.grad is not None:
                self.on_gradient_complete(parameter)  # from an earlier batch
        has_grad = [float(parameter.grad is not None) for parameter in self.parameters]
        self._start_buckets(incomplete=True)
        started = perf_counter()
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        loss, n_problems, *n_grads = self._reduce_loss(loss, [float(bool(problem)), *has_grad])
        self.processes.wait_seconds += perf_counter() - started
        for parameter, n in zip(self.parameters, n_grads):
            part = self.bucket_of[parameter].parts[parameter]
            parameter.grad = Tensor(part, False, parameter.is_batched) if n and not n_problems else None
        problems = self.processes.all_gather(problem) if n_problems else []
        return loss, "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)

    def _reduce_loss(self, loss: Any, flags: list[float]) -> list[Any]:
        """Return [sum of the loss over processes, number of processes with each flag]; all processes must call this."""
        on_gpu = devices.is_array(loss) and devices.on_gpu(loss)
        total, *others = self.processes.all_reduce([0.0 if on_gpu else float(loss), *flags])
        if not on_gpu:
            return [total, *others]
        box = loss.reshape(1).copy()
        self.processes.start_all_reduce(box).wait()
        return [box[0], *others]


def _grouped(parameters: list[Tensor], n_bytes: int) -> list[list[Tensor]]:
    """Group consecutive parameters of one dtype and device; each group but the last has at least `n_bytes`."""
    groups: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        if not groups or size >= n_bytes or not _is_like(groups[-1][-1].array, parameter.array, shape=False):
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.array.nbytes
    return groups


def _is_like(a: Array, b: Array, shape: bool = True) -> bool:
    """Return whether arrays agree in dtype, array module and, if `shape`, in shape."""
    return (not shape or a.shape == b.shape) and a.dtype == b.dtype and array_module(a) is array_module(b)


# -------------------------------------------------------------------- dropout masks
class GeneratorAdvance(NamedTuple):
    """The number of random draws that one batch makes, to skip the dropout masks of other ranks' batches.

    Attributes:
        n_draws: of 64 bits each; of 32 bits each if `is_32_bit`.
        is_32_bit: whether the generator buffers the second half of a 64-bit draw.
    """

    n_draws: int
    is_32_bit: bool

    @classmethod
    def from_states(cls, before: Any, after: Any) -> GeneratorAdvance:
        """Return the number of draws between two PCG64 `bit_generator.state` dicts; ValueError for other generators."""
        kind = before["bit_generator"]
        if kind != "PCG64":
            raise ValueError(f"dropout over several processes: expected a PCG64 generator, got {kind}")
        n = _distance(before["state"]["state"], after["state"]["state"], before["state"]["inc"])
        halves = bool(before["has_uint32"] or after["has_uint32"])
        return cls(2 * n + before["has_uint32"] - after["has_uint32"] if halves else n, halves)

    def skip(self, generator: np.random.Generator, before: Any, n_batches: int) -> None:
        """Set a generator to the state `before`, advanced by `n_batches` times this number of draws."""
        generator.bit_generator.state = before
        n = n_batches * self.n_draws
        if self.is_32_bit:
            if n and before["has_uint32"]:
                generator.random(1, np.float32)
                n -= 1
            n, odd = divmod(n, 2)
        if n:
            generator.bit_generator.advance(n)  # type: ignore[attr-defined]
        if self.is_32_bit and odd:
            generator.random(1, np.float32)


def _distance(state: int, goal: int, increment: int) -> int:
    """Return the number of steps of a generator, state = state * FACTOR + increment modulo 2^128, between two states.

    The lowest k bits of states repeat after 2^k steps, so each bit of the number follows from one bit of the states
    (O'Neill 2014, "PCG", section 4.3.1).
    """
    factor, modulus = 0x2360ED051FC65DA44385DF649FCCF645, 2**128
    n_steps, bit = 0, 1
    while state != goal:
        if (state ^ goal) & bit:
            state = (state * factor + increment) % modulus
            n_steps += bit
        increment = (factor + 1) * increment % modulus
        factor = factor * factor % modulus
        bit *= 2
    return n_steps
