"""The kernel that makes recorders: they record what a function runs on a device, and replay it with new inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tricycle.devices import Array
from tricycle.kernels.dispatch import kernel


class RecordingError(RuntimeError):
    """A function cannot be recorded: it reads from the device, copies to it, or needs too much memory."""


class Recorder(Protocol):
    """Records the work of a function on a device, and replays it.

    Attributes:
        n_bytes: the bytes of device memory that are reserved for replays.
    """

    n_bytes: int

    def record(self, function: Callable[..., Array], inputs: Sequence[Any]) -> None:
        """Record `function(*inputs)`, with arrays on the device for the inputs, without running it on the device.

        Raises:
            RecordingError: the function cannot be recorded.
        """

    def replay(self, inputs: Sequence[Any]) -> Array:
        """Run what was recorded with other inputs of the same shapes and dtypes, and return a copy of its result."""


@kernel
def new_recorder(like: Array) -> Recorder | None:
    """Make a recorder for functions on the device of `like`; None if nothing can record there."""
    return None
