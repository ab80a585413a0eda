"""Select providers (packages of faster kernels), register their kernels, and decline arguments with a reason.

A provider is a module with a name PROVIDER, a function `unavailable_reason()` and a function `register(array)`.

The environment variable TRICYCLE_KERNELS selects providers by name ("numpy", "numba,numpy") or excludes some
("-onednn"); "plain" selects none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.explanation import PLAIN

Run = TypeVar("Run", bound=Callable[..., Any])

VARIABLE = "TRICYCLE_KERNELS"
NAMES = ("numba", "amx", "mkl", "onednn", "numpy", "cuda", "cuda_graphs")


def exclusion_reason(name: str) -> str | None:
    """Return why TRICYCLE_KERNELS excludes a provider, or None; ValueError if the variable has an unknown name."""
    said = os.environ.get(VARIABLE, "")
    words = [word.strip() for word in said.split(",") if word.strip()]
    if any(word.removeprefix("-") not in (*NAMES, PLAIN) for word in words):
        names = ", ".join((*NAMES, PLAIN))
        raise ValueError(f"{VARIABLE}: expected names among {names}, with - before those to exclude, got {said!r}")
    selected = [word for word in words if not word.startswith("-")]
    return f"excluded by {VARIABLE}={said}" if f"-{name}" in words or (selected and name not in selected) else None


def register_kernels(array: type, *versions: tuple[ModuleType, Sequence[Kernel[..., Any]]]) -> None:
    """For each (module, kernels), register for an array type the module's function with each kernel's name."""
    for module, kernels in versions:
        for kernel in kernels:
            kernel.register(array)(getattr(module, kernel.reference.__name__))


def decline_when(decline_reason: Callable[..., str | None]) -> Callable[[Run], Run]:
    """Return a decorator that makes a kernel return NotImplemented where `decline_reason` of its arguments is not None.

    `decline_reason` takes the kernel's arguments, reads shapes, dtypes and layouts, and computes nothing;
    `tricycle.kernels.explain` asks it, too. None says that the version takes them.
    """

    def decorate(run: Run) -> Run:
        @wraps(run)
        def version(*args: Any, **options: Any) -> Any:
            return run(*args, **options) if decline_reason(*args, **options) is None else NotImplemented

        version.decline_reason, version.run = decline_reason, run  # type: ignore[attr-defined]  # a kernel calls both itself
        return version  # type: ignore[return-value]

    return decorate
