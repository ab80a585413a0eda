"""The kernel registry: array functions with a reference implementation, and dispatch to faster providers.

A package registers its implementations in a function that an entry point of the group `tricycle.kernels` names, under
the array library's name ("numpy", "cupy"). The function is called with the array type on the first use of that type.
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
Implementation: TypeAlias = Callable[P, R | NotImplementedType]
# The function that returns why an implementation declines its arguments (None: it accepts all), and the implementation.
Candidate: TypeAlias = tuple[Callable[P, str | None] | None, Implementation[P, R]]
ENTRY_POINT_GROUP = "tricycle.kernels"
KERNELS: dict[str, Kernel[..., Any]] = {}  # all kernels by name

# The active blocks of `tricycle.debug.use_reference` in this thread.
reference_only: ContextVar[tuple[object, ...]] = ContextVar("reference_only", default=())
_loading = threading.RLock()
_loaded: set[type] = set()  # packages that are installed later are found after a restart


class Kernel(Generic[P, R]):
    """Dispatch a call to the first provider that accepts its arguments, by the type of the first array."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference  # works on every array library; faster implementations are tested against it
        self.registered: dict[type, list[Implementation[P, R]]] = {}
        self.implementations: dict[type, list[Candidate[P, R]]] = {}  # in order; filled on the first call
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        """Call the first implementation that accepts the arguments, else the reference."""
        if not args:  # the first array is a keyword argument, too
            bound = inspect.signature(self.reference).bind(*args, **options)
            return self(*bound.args, **bound.kwargs)
        if not reference_only.get():
            candidates = self.implementations.get(type(args[0]))
            if candidates is None:
                candidates = self.implementations_for(type(args[0]))
            for decline_reason, run in candidates:
                if decline_reason is None or decline_reason(*args, **options) is None:
                    result = run(*args, **options)
                    if result is not NotImplemented:
                        return result
        return self.reference(*args, **options)

    def register(self, array_type: type) -> Callable[[Implementation[P, R]], Implementation[P, R]]:
        """Return a decorator that adds an implementation, tried last, and returns it; NotImplemented declines."""

        def add(implementation: Implementation[P, R]) -> Implementation[P, R]:
            with _loading:  # or another thread could cache the list without this implementation
                self.registered.setdefault(array_type, []).append(implementation)
                self.implementations.pop(array_type, None)
            return implementation

        return add

    def implementations_for(self, array_type: type) -> list[Candidate[P, R]]:
        """Return (decline function or None, implementation) pairs in order of registration; load providers at first."""
        with _loading:  # other threads wait until all providers are registered
            if array_type not in _loaded:
                _load(array_type)
                _loaded.add(array_type)
            registered = self.registered.get(array_type, ())
            found = [(getattr(x, "decline_reason", None), getattr(x, "run", x)) for x in registered]
            return self.implementations.setdefault(array_type, found)

    def __repr__(self) -> str:
        return f"<kernel {self.reference.__name__}>"


def kernel(reference: Callable[P, R]) -> Kernel[P, R]:
    """Return a Kernel made of a reference implementation, and add it to `KERNELS` under the function's name."""
    KERNELS[reference.__name__] = made = Kernel(reference)
    return made


def _load(array_type: type) -> None:
    """Call the functions that register kernels for an array type, of all installed packages; skip removed packages."""
    from importlib.metadata import entry_points  # takes longer to import than all of this package

    for entry in entry_points(group=ENTRY_POINT_GROUP, name=array_type.__module__.split(".")[0]):
        try:
            register = entry.load()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != entry.module.split(".")[0]:
                raise
            continue  # the package was installed and has been removed
        register(array_type)


def is_16_bit(x: Any) -> bool:
    """Return whether x is an array of 16-bit floats; False for anything else."""
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.itemsize == 2 and dtype.kind not in "biu"


def upcast(x: Any) -> Any:
    """Convert an array of 16-bit floats to float32; return anything else unchanged."""
    return x.astype(np.float32) if is_16_bit(x) else x


def upcasting(n_downcast: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: compute 16-bit input in float32, convert the first `n_downcast` results back to its dtype."""

    def decorate(kernel: Callable[..., Any]) -> Any:
        @wraps(kernel)
        def run(*args: Any, **options: Any) -> Any:
            if not is_16_bit(args[0]):
                return kernel(*args, **options)
            results = kernel(*map(upcast, args), **{name: upcast(option) for name, option in options.items()})
            if not n_downcast or results is NotImplemented:
                return results
            if not isinstance(results, tuple):
                return results.astype(args[0].dtype)
            return (*(result.astype(args[0].dtype) for result in results[:n_downcast]), *results[n_downcast:])

        return run

    return decorate


def upcasting_kernel(n_downcast: int) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Return a decorator: make a Kernel that computes 16-bit input in float32, rounding `n_downcast` results back."""
    return lambda reference: kernel(upcasting(n_downcast)(reference))
