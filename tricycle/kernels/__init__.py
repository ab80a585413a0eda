"""Fused array functions: arrays in, arrays out, no Tensor.

`reference.py` is plain and always right; `tricycle_accelerators` holds faster versions under the same names, for
NumPy and for CuPy. An op calls `kernels.gelu(x)` and does not know which one ran: the type of the first array
decides, and a name that has no faster version falls back to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tricycle.kernels import reference

# Where to look for a faster version, by the type of the first array: imported when the first such array comes.
ACCELERATORS = {"numpy.ndarray": "tricycle_accelerators.cpu", "cupy.ndarray": "tricycle_accelerators.cuda.kernels"}
FASTER: dict[type, ModuleType] = {}

_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


@contextmanager
def use_reference() -> Iterator[None]:
    """Within this block every kernel is the plain one: a second opinion when a result looks wrong."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def _faster(kind: type) -> ModuleType:
    if kind not in FASTER:
        name = ACCELERATORS.get(f"{kind.__module__.split('.')[0]}.{kind.__name__}")
        FASTER[kind] = import_module(name) if name else reference
    return FASTER[kind]


def _pick(plain: Callable) -> Callable:
    name = plain.__name__

    @wraps(plain)
    def run(array: Any, *args: Any, **options: Any) -> Any:
        module = reference if _reference_only.get() else _faster(type(array))
        return getattr(module, name, plain)(array, *args, **options)

    return run


if TYPE_CHECKING:
    from tricycle.kernels.reference import *  # noqa: F403
else:
    globals().update({name: _pick(getattr(reference, name)) for name in reference.__all__})
