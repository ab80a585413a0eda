"""Several processes that train one model together, each on its own batches: data-parallel training.

Every process holds the whole model. In each update it computes the gradients of its own share of the batches; the sum
of all processes' gradients is the gradient of all batches, and with it each makes the same update. Labels are weighed
over all processes before, so that the sum is the mean.

`Processes` is what training needs to know and ask of the others. The one here is alone: it computes nothing and imports
nothing. Who knows a way to reach others makes a subclass with six methods: `agree`, `gather`, `sum`, `start_sum`,
`start_broadcast` and `answer`.

Gradients travel in flat buckets. The backward pass ends at the first layers, so the gradients of the last ones are
complete first, and their sum over processes goes on while the rest is computed (Li et al. 2020, "PyTorch Distributed").
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
    """A sum that has begun."""

    def poke(self) -> None:
        """Let it go on, where it needs somebody to; returns at once."""

    def wait(self) -> None:
        """Return when it is done."""


class Processes:
    """Those that train together, as one of them sees it. This one is alone.

    What is said here of all processes holds for calls too: each of them calls the same methods in the same order.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        bucket_bytes: gradients are summed in buckets of at least so many bytes.
        overlap: sums begin while the backward pass goes on, not after it.
        waited: seconds that this process has done nothing but wait for sums of gradients.
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.bucket_bytes = BUCKET_BYTES
        self.overlap = True
        self.waited = 0.0
        self._sums: WeakKeyDictionary[Layer, GradientSum] = WeakKeyDictionary()

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks and writes for all."""
        return self.rank == 0

    def share(self, n_items: int) -> range:
        """Which of so many items are this process's own: neighbours, as many as any other's, or one more."""
        return range(self.rank * n_items // self.size, (self.rank + 1) * n_items // self.size)

    def any(self, flag: bool) -> bool:
        """Whether it is so in any of the processes."""
        return self.sum([float(bool(flag))])[0] > 0

    @property
    def reducer(self) -> Callable[[Layer], GradientSum] | None:
        """What `training.gradients` sums gradients with; None for one process."""
        return None if self.size == 1 else self.gradient_sum

    def gradient_sum(self, model: Layer) -> GradientSum:
        """Return what sums the gradients of a model in the next update."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        known = self._sums.get(model)
        if known is None or not known.fits(parameters):
            known = self._sums[model] = GradientSum(self, parameters)
        known.begin()
        return known

    def agree(self, value: T) -> T:
        """Rank 0's value."""
        return value

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        return [value]

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sums over processes, one for each number."""
        return list(numbers)

    def start_sum(self, array: Array) -> Pending:
        """Begin to add up a contiguous array over all processes, in place; it is to be left alone until it is done.

        All of them get the same bits, and the same again when it is done again.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no start_sum")

    def start_broadcast(self, array: Array, rank: int) -> Pending:
        """Begin to give all processes what the array of one of them holds, in place."""
        raise NotImplementedError(f"{type(self).__name__} defines no start_broadcast")

    def answer(self) -> None:
        """Let the others know that this process is at work; called now and then in work that takes minutes."""

    def at(self, place: str) -> None:
        """Note what this process is at, such as "update 3", for the message of one that waits for others in vain."""


ALONE = Processes()


# -------------------------------------------------------------------- gradients
class Bucket:
    """Gradients of neighbouring parameters in one flat array.

    Attributes:
        flat: the array.
        parts: for each parameter its part, in its shape.
        missing: how many of the parameters have no complete gradient yet.
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


class GradientSum:
    """The sum of a model's gradients over all processes, once an update.

    The gradients that it leaves are parts of its buckets: they hold until the next update begins.
    """

    def __init__(self, processes: Processes, parameters: list[Tensor]) -> None:
        self.processes = processes
        self.parameters = parameters
        self.buckets = [Bucket(group) for group in _grouped(parameters[::-1], processes.bucket_bytes)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parts}

    def fits(self, parameters: list[Tensor]) -> bool:
        """Whether these are the parameters that it was made for, and lie where they lay."""
        same = len(parameters) == len(self.parameters) and all(a is b for a, b in zip(parameters, self.parameters))
        return same and all(_is_like(bucket.parts[p], p.array) for bucket in self.buckets for p in bucket.parts)

    def begin(self) -> None:
        """Before the first forward pass of an update."""
        self._n_started = 0
        for bucket in self.buckets:
            bucket.missing, bucket.pending = set(bucket.parts), None
        for parameter in self.parameters:
            if parameter.grad is not None and not self.processes.is_first:
                parameter.grad = None  # all have the same, and it is to count once

    def total(self, n_labels: Any) -> int:
        """Sum a number of labels over processes."""
        return int(self.processes.sum([float(n_labels)])[0])

    def next_batch(self) -> None:
        """Let the others know that this process is at work."""
        self.processes.answer()

    def is_complete(self, parameter: Tensor) -> None:
        """The gradient of a parameter is, in this process. A bucket that is full is sent off."""
        bucket = self.bucket_of.get(parameter)
        if bucket is None:  # no parameter, but an input
            return
        if parameter.grad is not None:
            part = bucket.parts[parameter]
            part[...] = parameter.grad.array
            parameter.grad.array = part
        bucket.missing.discard(parameter)
        if self.processes.overlap:
            self._send_off()

    def _send_off(self, all_of_them: bool = False) -> None:
        """Begin the sums of full buckets, in the same order in every process."""
        while self._n_started < len(self.buckets):
            bucket = self.buckets[self._n_started]
            if bucket.missing and not all_of_them:
                break
            for parameter in bucket.missing:  # that no gradient came to here
                bucket.parts[parameter][...] = 0
            bucket.pending = self.processes.start_sum(bucket.flat)
            self._n_started += 1
        for bucket in self.buckets[: self._n_started]:
            if bucket.pending is not None:
                bucket.pending.poke()

    def finish(self, loss: Any, problem: str) -> tuple[Any, str]:
        """Wait for all sums, and give every parameter its gradient that has one in any process.

        Args:
            loss: this process's share of the mean.
            problem: what was not finite in this process, whose gradients then count for nothing; "" for nothing.

        Returns:
            the sum of all processes' shares, and what was not finite in any; where something was, there are no
            gradients.
        """
        for parameter in self.parameters:
            if parameter in self.bucket_of[parameter].missing and parameter.grad is not None:
                self.is_complete(parameter)  # of an earlier batch
        has_grad = [float(parameter.grad is not None) for parameter in self.parameters]
        self._send_off(all_of_them=True)
        started = perf_counter()
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        loss, n_problems, *n_grads = self._sum_up(loss, [float(bool(problem)), *has_grad])
        self.processes.waited += perf_counter() - started
        for parameter, n in zip(self.parameters, n_grads):
            part = self.bucket_of[parameter].parts[parameter]
            parameter.grad = Tensor(part, False, parameter.is_batched) if n and not n_problems else None
        problems = self.processes.gather(problem) if n_problems else []
        return loss, "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)

    def _sum_up(self, loss: Any, flags: list[float]) -> list[Any]:
        """The sums of the loss, and of how many processes have each flag."""
        on_gpu = devices.is_array(loss) and devices.on_gpu(loss)
        total, *others = self.processes.sum([0.0 if on_gpu else float(loss), *flags])
        if not on_gpu:
            return [total, *others]
        box = loss.reshape(1).copy()
        self.processes.start_sum(box).wait()
        return [box[0], *others]


def _grouped(parameters: list[Tensor], n_bytes: int) -> list[list[Tensor]]:
    """Neighbours of one dtype and device, in groups of at least so many bytes, but for the last of its kind."""
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
    return (not shape or a.shape == b.shape) and a.dtype == b.dtype and array_module(a) is array_module(b)


# -------------------------------------------------------------------- dropout masks
class Draws(NamedTuple):
    """How far a generator moves on while a batch is computed, so that the masks of other batches can be passed over.

    Attributes:
        n: draws of 64 bits; or where the generator keeps halves of them, of 32 bits.
        halves: whether it does.
    """

    n: int
    halves: bool

    @classmethod
    def between(cls, before: Any, after: Any) -> Draws:
        """From the states of a PCG64 generator before and after.

        Raises:
            ValueError: another kind of generator.
        """
        kind = before["bit_generator"]
        if kind != "PCG64":
            raise ValueError(f"dropout over several processes: expected a PCG64 generator, got {kind}")
        n = _distance(before["state"]["state"], after["state"]["state"], before["state"]["inc"])
        halves = bool(before["has_uint32"] or after["has_uint32"])
        return cls(2 * n + before["has_uint32"] - after["has_uint32"] if halves else n, halves)

    def skip(self, generator: np.random.Generator, before: Any, n_batches: int) -> None:
        """Put a generator where it stands after so many batches that began at a state."""
        generator.bit_generator.state = before
        n = n_batches * self.n
        if self.halves:
            if n and before["has_uint32"]:
                generator.random(1, np.float32)
                n -= 1
            n, odd = divmod(n, 2)
        if n:
            generator.bit_generator.advance(n)  # type: ignore[attr-defined]
        if self.halves and odd:
            generator.random(1, np.float32)


def _distance(state: int, goal: int, increment: int) -> int:
    """How many steps a generator has made, state = state * FACTOR + increment modulo 2^128, from one state to another.

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
