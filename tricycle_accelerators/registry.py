"""Registration of all providers' kernels; the entry points of pyproject.toml name its two functions."""

from __future__ import annotations

from types import ModuleType

from tricycle.kernels.explanation import UNAVAILABLE
from tricycle_accelerators import compiled, cpu, onednn


def register_numpy(array: type) -> None:
    """Register the kernels of numba, onednn and numpy, in order of priority; record in UNAVAILABLE why not.

    `tricycle.kernels` calls it when the first one comes (the entry point `numpy` in pyproject.toml).
    """
    for provider in (compiled, onednn, cpu):
        _register(provider, array)


def register_cupy(array: type) -> None:
    """Register the CUDA kernels for CuPy's array type, or record in UNAVAILABLE why they cannot be used."""
    from tricycle_accelerators import cuda  # here, for it takes a while to import

    _register(cuda, array)


def _register(provider: ModuleType, array: type) -> None:
    """Register a provider's kernels for arrays of a type, or store in UNAVAILABLE why it cannot be used."""
    problem = provider.unavailable_reason()
    if problem is None:
        UNAVAILABLE.pop(provider.PROVIDER, None)
        provider.register(array)
    else:
        UNAVAILABLE[provider.PROVIDER] = problem
