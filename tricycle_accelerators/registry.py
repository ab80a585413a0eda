"""Registration of all providers' versions: what the entry points of pyproject.toml name."""

from __future__ import annotations

from types import ModuleType

from tricycle.kernels.explanation import UNAVAILABLE
from tricycle_accelerators import compiled, cpu, mkl, onednn


def register_numpy(array: type) -> None:
    """Offer all versions for NumPy arrays, in the order in which they are asked.

    `tricycle.kernels` calls it when the first one comes (the entry point `numpy` in pyproject.toml).
    """
    for provider in (compiled, mkl, onednn, cpu):
        _register(provider, array)


def register_cupy(array: type) -> None:
    """Offer all versions for CuPy arrays, when the first one comes (the entry point `cupy`)."""
    from tricycle_accelerators import cuda  # here, for it takes a while to import

    _register(cuda, array)


def _register(provider: ModuleType, array: type) -> None:
    problem = provider.unavailable_reason()
    if problem is None:
        UNAVAILABLE.pop(provider.PROVIDER, None)
        provider.register(array)
    else:
        UNAVAILABLE[provider.PROVIDER] = problem
