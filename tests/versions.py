"""Which faster versions of the kernels there are, and which are asked during a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tricycle.kernels import KERNELS


def registered_by(register: Callable[[type], None]) -> dict[str, list[Callable]]:
    """The versions that a function like `registry.register_numpy` offers, by the kernels' names."""

    class NewArray:
        """A type of arrays for which nobody has registered."""

    register(NewArray)
    offered = {name: kernel.registered.pop(NewArray, []) for name, kernel in KERNELS.items()}
    return {name: versions for name, versions in offered.items() if versions}


def offer(monkeypatch: Any, array_type: type, versions: Mapping[str, list[Callable]]) -> None:
    """During this test arrays of that type have these faster versions, and no others."""
    for name, kernel in KERNELS.items():
        monkeypatch.setitem(kernel.implementations, array_type, [(None, version) for version in versions.get(name, ())])
