"""Fused array functions: arrays in, arrays out, no Tensor.

`reference.py` is plain and always right; `cpu.py` holds faster versions for NumPy under the same names, and
`tricycle_accelerators.cuda.kernels` those for CuPy.
An op calls `kernels.gelu(x)` and does not know which one ran: the type of the first array
decides, and a name that has no faster version falls back to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tricycle.kernels import cpu, reference

# Where to look for a faster version, by the type of the first array. CUDA's join when the first CuPy array comes.
FASTER: dict[type, ModuleType] = {np.ndarray: cpu}

_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)


@contextmanager
def use_reference() -> Iterator[None]:
    """Within this block every kernel is the plain one: a second opinion when a result looks wrong."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def _faster(kind: type) -> ModuleType | None:
    if kind not in FASTER and kind.__module__.split(".")[0] == "cupy":
        from tricycle_accelerators.cuda import kernels

        FASTER[kind] = kernels
    return FASTER.get(kind)


def _pick(plain: Callable) -> Callable:
    name = plain.__name__

    @wraps(plain)
    def run(array: Any, *args: Any, **options: Any) -> Any:
        module = None if _reference_only.get() else _faster(type(array))
        return getattr(module, name, plain)(array, *args, **options)

    return run


if TYPE_CHECKING:
    from tricycle.kernels.reference import *  # noqa: F403
else:
    globals().update({name: _pick(getattr(reference, name)) for name in reference.__all__})
