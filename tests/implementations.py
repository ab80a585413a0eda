"""Helpers that list the implementations of the kernels, and select the ones used in a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tricycle.kernels import KERNELS


def registered_by(register: Callable[[type], None]) -> dict[str, list[Callable]]:
    """Return the implementations, by kernel name, that a function such as `registry.register_numpy` registers."""

    class NewArray:
        """An array type without registered implementations."""

    register(NewArray)
    registered = {name: kernel.registered.pop(NewArray, []) for name, kernel in KERNELS.items()}
    return {name: functions for name, functions in registered.items() if functions}


def replace_implementations(monkeypatch: Any, array_type: type, implementations: Mapping[str, list[Callable]]) -> None:
    """Replace all registered implementations for an array type during a test.

    Args:
        implementations: by kernel name; other kernels have only the reference.
    """
    for name, kernel in KERNELS.items():
        functions = [(None, function) for function in implementations.get(name, ())]
        monkeypatch.setitem(kernel.implementations, array_type, functions)
