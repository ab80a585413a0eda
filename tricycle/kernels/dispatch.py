"""Kernels that may have faster versions, and how the one that runs is chosen.

`@kernel` makes a `Kernel` of a plain function. It is called as that function is, with its signature and docstring, and
asks the faster versions registered for the type of its first array, in the order in which they registered; one that
answers NotImplemented has declined, and when all have, the plain function runs.

Nothing here knows who has faster versions. An installed package says so itself, by an entry point of the group
`tricycle.kernels`: its name is that of an array library ("numpy", "cupy"), and it points to a function `register`,
which is called with the array type when the first array of that library comes.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, update_wrapper
from types import NotImplementedType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

GROUP = "tricycle.kernels"

# The blocks of `use_reference` that this thread is in. Each is taken out by itself: generators end them in any order.
_reference_only: ContextVar[tuple[object, ...]] = ContextVar("reference_only", default=())
_loading = threading.RLock()
# Cache: valid for the life of the process: packages that are installed later are found after a restart.
_loaded: set[type] = set()


@contextmanager
def use_reference() -> Iterator[None]:
    """Within this block every kernel is the plain one: a second opinion when a result looks wrong."""
    block = object()
    _reference_only.set((*_reference_only.get(), block))
    try:
        yield
    finally:
        _reference_only.set(tuple(other for other in _reference_only.get() if other is not block))


class Kernel(Generic[P, R]):
    """A function of arrays with faster versions for some types of arrays.

    Attributes:
        plain: the function itself, right on every array library: what the faster versions are tested against.
        versions: those that are asked, in this order, by the type of the first array. Cache: filled when such an array
            comes, cleared for its type by `on`.
    """

    __name__: str

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        self.registered: dict[type, list[Callable[P, R | NotImplementedType]]] = {}
        self.versions: dict[type, tuple[Callable[P, R | NotImplementedType], ...]] = {}
        update_wrapper(self, plain)

    # Cache: valid as long as the kernel, whose plain function never changes.
    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.plain)

    def __call__(self, *args: P.args, **options: P.kwargs) -> R:
        if not args:  # even the first array came by its name
            bound = self.signature.bind(*args, **options)
            return self(*bound.args, **bound.kwargs)
        if not _reference_only.get():
            array_type = type(args[0])
            try:
                versions = self.versions[array_type]
            except KeyError:
                versions = self._look_up(array_type)
            for version in versions:
                result = version(*args, **options)
                if result is not NotImplemented:
                    return result
        return self.plain(*args, **options)

    def on(
        self, array_type: type
    ) -> Callable[[Callable[P, R | NotImplementedType]], Callable[P, R | NotImplementedType]]:
        """Register a version for arrays of this type, to be asked after those that registered before.

        It has the signature of the plain function, and returns NotImplemented for what it does not take.
        """

        def register(version: Callable[P, R | NotImplementedType]) -> Callable[P, R | NotImplementedType]:
            with _loading:  # or another thread could look up the versions of before, and keep them
                self.registered.setdefault(array_type, []).append(version)
                self.versions.pop(array_type, None)
            return version

        return register

    def _look_up(self, array_type: type) -> tuple[Callable[P, R | NotImplementedType], ...]:
        with _loading:  # nobody may see half of what is being registered: results would depend on who came first
            if array_type not in _loaded:
                _load(array_type)
                _loaded.add(array_type)
            self.versions[array_type] = tuple(self.registered.get(array_type, ()))
        return self.versions[array_type]

    def __repr__(self) -> str:
        return f"<kernel {self.__name__}>"


KERNELS: dict[str, Kernel[..., Any]] = {}  # all of them, by name


def kernel(plain: Callable[P, R]) -> Kernel[P, R]:
    """The kernel whose plain version this function is."""
    made = Kernel(plain)
    KERNELS[made.__name__] = made
    return made


def _load(array_type: type) -> None:
    """Have everybody register who has kernels for the library that the type comes from."""
    from importlib.metadata import entry_points  # takes longer to import than all of this package

    library = array_type.__module__.split(".")[0]
    for entry in entry_points(group=GROUP, name=library):
        try:
            register = entry.load()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != entry.module.split(".")[0]:
                raise
            continue  # it has been installed, and is not there: it has nothing to offer
        register(array_type)
