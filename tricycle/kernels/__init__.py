"""Fused array functions: arrays in, arrays out, no Tensor.

`reference.py` is plain and always right; `cpu.py` (and for GPUs `cuda.py`) hold faster versions under the
same names. An op calls `kernels.gelu(x)` and does not know which one ran: the type of the first array
decides, and a name that has no faster version falls back to the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from tricycle.kernels import cpu, reference

# Where to look for a faster version, by the type of the first array.
FASTER: dict[type, ModuleType] = {np.ndarray: cpu}

_reference_only: ContextVar[bool] = ContextVar("reference_only", default=False)
Kernel = TypeVar("Kernel", bound=Callable)


@contextmanager
def use_reference() -> Iterator[None]:
    """Within this block every kernel is the plain one: a second opinion when a result looks wrong."""
    token = _reference_only.set(True)
    try:
        yield
    finally:
        _reference_only.reset(token)


def _pick(plain: Kernel) -> Kernel:
    name = plain.__name__

    @wraps(plain)
    def run(array: Any, *args: Any) -> Any:
        module = None if _reference_only.get() else FASTER.get(type(array))
        return getattr(module, name, plain)(array, *args)

    return run  # type: ignore[return-value]


softmax = _pick(reference.softmax)
softmax1 = _pick(reference.softmax1)
softmax_backward = _pick(reference.softmax_backward)
log_softmax = _pick(reference.log_softmax)
gelu = _pick(reference.gelu)
gelu_backward = _pick(reference.gelu_backward)
layer_norm = _pick(reference.layer_norm)
layer_norm_backward = _pick(reference.layer_norm_backward)
embedding_backward = _pick(reference.embedding_backward)
cross_entropy = _pick(reference.cross_entropy)
cross_entropy_backward = _pick(reference.cross_entropy_backward)
attention = _pick(reference.attention)
attention_backward = _pick(reference.attention_backward)
rotate = _pick(reference.rotate)
adamw = _pick(reference.adamw)
