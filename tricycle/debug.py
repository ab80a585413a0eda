"""Debugging tools: force the reference kernels, and detect arrays changed in place before `backward`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from tricycle import devices
from tricycle.autograd import Mode, describe, graph_mode
from tricycle.devices import Array
from tricycle.kernels.dispatch import reference_only
from tricycle.tensor import Tensor


@contextmanager
def use_reference() -> Iterator[None]:
    """Force this thread's kernels to their reference implementations within a `with` block, to check results."""
    block = object()
    reference_only.set((*reference_only.get(), block))
    try:
        yield
    finally:  # remove only this block, because blocks in generators end in any order
        reference_only.set(tuple(other for other in reference_only.get() if other is not block))


def watch_arrays() -> AbstractContextManager[None]:
    """Return a context manager that makes `backward` raise a RuntimeError if an array was changed in place.

    It applies to the results of this block and thread, and their inputs. It is slow: it computes two checksums of every
    array. Otherwise `backward` detects only changes by optimizers and `Layer.load_state_dict`.
    """
    return graph_mode(Mode(on_record=_watch))


def _watch(node: Tensor) -> None:
    """Make the backward function of a result first compare the checksums of its array and its inputs."""
    watched = [(tensor, tensor.array) for tensor in node.args if devices.is_array(tensor.array)]
    sums = [_checksum(array) for _, array in watched]
    backward: Any = node._backward
    own, own_sum, title = node.array, _checksum(node.array), node.name or "a result"

    def check() -> None:
        changed = [describe(tensor) for (tensor, array), before in zip(watched, sums) if _checksum(array) != before]
        if changed or _checksum(own) != own_sum:
            what = changed[0] if changed else "it"
            raise RuntimeError(f"backward: {what} was changed in place after {title} was computed")

    @wraps(backward)
    def checked(*args: Any) -> Any:
        check()
        return backward(*args)

    checked.check = check  # type: ignore[attr-defined]  # for `create_graph`, which does not call backward functions
    node._backward = checked


def _checksum(array: Array) -> int:
    """Return the CRC-32 of an array's bytes, copied from a GPU if necessary."""
    return zlib.crc32(devices.to_cpu(array).tobytes())
