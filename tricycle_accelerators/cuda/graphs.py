"""CUDA graphs: the kernels of a function, recorded once and replayed by one launch, without the time of Python.

The memory of a recorded function stays reserved for its replays. The host's numbers that differ between replays are
inputs, or are drawn anew: `draw` makes a kernel read its seed from the device.

Source: NVIDIA's CUDA C++ Programming Guide, section "CUDA Graphs".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.kernels.recording import RecordingError
from tricycle_accelerators.providers import decline_when, exclusion_reason

PROVIDER = "cuda_graphs"
MAX_DRAWS = 4096  # seeds of a recorded function
MEMORY_SHARE = 0.5  # of the device: with more in use nothing is recorded, for what is not replayed needs memory, too

_recording: ContextVar[Recorder | None] = ContextVar("recording", default=None)


def draw(seed: Callable[[], int]) -> tuple[int, Array | None]:
    """Return (seed(), None); while a recorder records, (0, its place on the device), where each replay writes a seed.

    Args:
        seed: draws a number of 64 bits.
    """
    recorder = _recording.get()
    return (seed(), None) if recorder is None else (0, recorder.place_of_draw(seed))


class Recorder:
    """Records the kernels of a function as a CUDA graph on a device, and replays them."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._draws: list[Callable[[], int]] = []

    def record(self, function: Callable[..., Array], inputs: Sequence[Any]) -> None:
        """Record function(*inputs), with arrays on the device for the inputs; RecordingError if that is not possible.

        Raises:
            RecordingError: the function reads from the device, copies to it or draws too often, or a library that it
                calls cannot be recorded; or too little memory is left.
        """
        import cupy

        with cupy.cuda.Device(self.device):
            shared, (_, total) = cupy.get_default_memory_pool(), cupy.cuda.runtime.memGetInfo()
            if shared.total_bytes() > MEMORY_SHARE * total:
                raise RecordingError(f"{shared.total_bytes() / 1e9:.1f} of {total / 1e9:.1f} GB are in use")
            shared.free_all_blocks()
            self._memory, self._stream = cupy.cuda.MemoryPool(), _stream(self.device, threading.get_ident())
            self._inputs = [cupy.asarray(value) for value in inputs]
            self._seeds = cupy.zeros(MAX_DRAWS, cupy.uint64)
            token = _recording.set(self)
            try:
                with ExitStack() as stack:
                    stack.enter_context(cupy.cuda.using_allocator(self._memory.malloc))
                    stack.enter_context(_without_copies_from_host())
                    stack.enter_context(self._stream)
                    self._record(function)
            finally:
                _recording.reset(token)

    def _record(self, function: Callable[..., Array]) -> None:
        """Record on the current stream; end the recording if the function fails, and raise a RecordingError."""
        self._stream.begin_capture()
        try:
            self._result = function(*self._inputs)
            self._graph = self._stream.end_capture()
        except BaseException as error:
            with suppress(RuntimeError):  # what failed has ended the recording, perhaps
                self._stream.end_capture()
            if isinstance(error, RecordingError) or not isinstance(error, Exception):
                raise
            raise RecordingError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    @property
    def n_bytes(self) -> int:
        """The bytes of device memory that are reserved for replays."""
        return self._memory.total_bytes()

    def place_of_draw(self, seed: Callable[[], int]) -> Array:
        """Return the place, (1,) of 64 bits on the device, that each replay fills with what `seed` draws."""
        if len(self._draws) == MAX_DRAWS:
            raise RecordingError(f"more than {MAX_DRAWS} random masks")
        self._draws.append(seed)
        return self._seeds[len(self._draws) - 1 : len(self._draws)]

    def replay(self, inputs: Sequence[Any]) -> Array:
        """Run the recorded kernels with these inputs, after what the current stream runs, and return a new array.

        The host does not wait. The random numbers are drawn in the order of the recording.
        """
        import cupy

        with cupy.cuda.Device(self.device):
            for own, value in zip(self._inputs, inputs):
                own[...] = cupy.asarray(value)
            if self._draws:
                seeds = np.array([seed() for seed in self._draws], np.uint64)
                self._seeds[: len(seeds)] = cupy.asarray(seeds)
            current = cupy.cuda.get_current_stream()
            self._stream.wait_event(current.record())
            self._graph.launch(self._stream)
            current.wait_event(self._stream.record())
            return self._result.copy()


# Cache: valid for the life of the process: one for each device and thread. cuBLASLt has a workspace for each stream.
@cache
def _stream(device: int, thread: int) -> Any:
    """Return the stream of a device on which recorders of a thread record, made on the current device; cached."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


@contextmanager
def _without_copies_from_host() -> Iterator[None]:
    """Make copies from the host raise a RecordingError: a replay would read memory that the host uses for others."""
    import cupy

    allocate = cupy.get_default_pinned_memory_pool().malloc

    def refuse(n_bytes: int) -> Any:
        if _recording.get() is None:  # another thread
            return allocate(n_bytes)
        raise RecordingError(f"{n_bytes} bytes are copied from the host")

    cupy.cuda.set_pinned_memory_allocator(refuse)
    try:
        yield
    finally:
        cupy.cuda.set_pinned_memory_allocator(allocate)


@decline_when(lambda like: exclusion_reason(PROVIDER))
def new_recorder(like: Array) -> Recorder:
    """Make a recorder for the device of `like`, unless TRICYCLE_KERNELS excludes `cuda_graphs`."""
    return Recorder(like.device.id)
