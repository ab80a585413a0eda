"""Kernels: functions of arrays that may have faster versions, and the choice of the one that runs.

An installed package offers faster versions by an entry point of the group `tricycle.kernels`, named after an array
library ("numpy", "cupy"). It points to a function that is called with the array type when the first such array comes.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import update_wrapper, wraps
from types import NotImplementedType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
Version: TypeAlias = Callable[P, R | NotImplementedType]
Asked: TypeAlias = tuple[Callable[P, str | None] | None, Version[P, R]]  # why not these arguments (None: it takes all)
GROUP = "tricycle.kernels"
KERNELS: dict[str, Kernel[..., Any]] = {}  # all of them, by name

# The blocks of `tricycle.debug.use_reference` that this thread is in.
reference_only: ContextVar[tuple[object, ...]] = ContextVar("reference_only", default=())
_loading = threading.RLock()
_loaded: set[type] = set()  # packages that are installed later are found after a restart


class Kernel(Generic[P, R]):
    """Call the first faster version for the first array's type that does not decline, else `plain`."""

    def __init__(self, plain: Callable[P, R]) -> None:
        self.reference = plain  # right on every array library: what faster versions are tested against
        self.registered: dict[type, list[Version[P, R]]] = {}
        self.implementations: dict[type, list[Asked[P, R]]] = {}  # those asked, in order; filled when an array comes
        update_wrapper(self, plain)

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        if not args:  # even the first array came by its name
            bound = inspect.signature(self.reference).bind(*args, **options)
            return self(*bound.args, **bound.kwargs)
        if not reference_only.get():
            versions = self.implementations.get(type(args[0]))
            if versions is None:
                versions = self.implementations_for(type(args[0]))
            for decline_reason, run in versions:
                if decline_reason is None or decline_reason(*args, **options) is None:
                    result = run(*args, **options)
                    if result is not NotImplemented:
                        return result
        return self.reference(*args, **options)

    def register(self, array_type: type) -> Callable[[Version[P, R]], Version[P, R]]:
        """Register a version, with the signature of the plain one, for arrays of this type, after those before."""

        def add(version: Version[P, R]) -> Version[P, R]:
            with _loading:  # or another thread could look up the versions of before, and keep them
                self.registered.setdefault(array_type, []).append(version)
                self.implementations.pop(array_type, None)
            return version

        return add

    def implementations_for(self, array_type: type) -> list[Asked[P, R]]:
        with _loading:  # no other thread may see half of what is being registered
            if array_type not in _loaded:
                _load(array_type)
                _loaded.add(array_type)
            found = [
                (getattr(x, "decline_reason", None), getattr(x, "run", x)) for x in self.registered.get(array_type, ())
            ]
            return self.implementations.setdefault(array_type, found)

    def __repr__(self) -> str:
        return f"<kernel {self.reference.__name__}>"


def kernel(plain: Callable[P, R]) -> Kernel[P, R]:
    """Make a kernel of its plain version, and list it in `KERNELS`."""
    KERNELS[plain.__name__] = made = Kernel(plain)
    return made


def _load(array_type: type) -> None:
    """Call the `register` functions of the packages that have kernels for the library of an array type."""
    from importlib.metadata import entry_points  # takes longer to import than all of this package

    for entry in entry_points(group=GROUP, name=array_type.__module__.split(".")[0]):
        try:
            register = entry.load()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != entry.module.split(".")[0]:
                raise
            continue  # the package was installed and has been removed
        register(array_type)


def is_16_bit(x: Any) -> bool:
    """Return whether x is an array of floats of 16 bits."""
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.itemsize == 2 and dtype.kind not in "biu"


def upcast(x: Any) -> Any:
    """Return floats of 16 bits as float32, anything else as it is."""
    return x.astype(np.float32) if is_16_bit(x) else x


def upcasting(n_narrow: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compute a kernel in float32 where its first array has 16 bits, and return `n_narrow` results in its dtype.

    The other results (statistics, losses, sums, gradients of parameters) stay float32.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        @wraps(kernel)
        def run(*args: Any, **options: Any) -> Any:
            if not is_16_bit(args[0]):
                return kernel(*args, **options)
            results = kernel(*map(upcast, args), **{name: upcast(option) for name, option in options.items()})
            if not n_narrow or results is NotImplemented:
                return results
            if not isinstance(results, tuple):
                return results.astype(args[0].dtype)
            return (*(result.astype(args[0].dtype) for result in results[:n_narrow]), *results[n_narrow:])

        return run

    return decorate


def upcasting_kernel(n_narrow: int) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a kernel of its plain version, which is `upcasting(n_narrow)`."""
    return lambda plain: kernel(upcasting(n_narrow)(plain))
