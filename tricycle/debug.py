"""Compute with the plain kernels only, and find arrays that were changed in place before `backward`."""

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
    """Within this block every kernel is the plain one: a second opinion when a result looks wrong."""
    block = object()
    reference_only.set((*reference_only.get(), block))
    try:
        yield
    finally:  # by itself, for blocks in generators end in any order
        reference_only.set(tuple(other for other in reference_only.get() if other is not block))


def watch_arrays() -> AbstractContextManager[None]:
    """Have `backward` refuse results of this block (and thread) whose array, or an input's, has been changed in place.

    Slow: it reads every array twice more, for a checksum. Elsewhere `backward` notices only the changes that optimisers
    and `Layer.load_state_dict` make.
    """
    return graph_mode(Mode(on_record=_watch))


def _watch(node: Tensor) -> None:
    """Compare the checksums of a result's array, and its inputs', before its backward function is called."""
    watched = [(tensor, tensor.array) for tensor in node.args if devices.is_array(tensor.array)]
    sums = [_checksum(array) for _, array in watched]
    backward: Any = node._backward
    own, own_sum, title = node.array, _checksum(node.array), node.name or "a result"

    @wraps(backward)
    def checked(*args: Any) -> Any:
        changed = [describe(tensor) for (tensor, array), before in zip(watched, sums) if _checksum(array) != before]
        if changed or _checksum(own) != own_sum:
            what = changed[0] if changed else "it"
            raise RuntimeError(f"backward: {what} was changed in place after {title} was computed")
        return backward(*args)

    node._backward = checked


def _checksum(array: Array) -> int:
    return zlib.crc32(devices.to_cpu(array).tobytes())
