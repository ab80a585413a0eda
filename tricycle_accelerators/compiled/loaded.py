"""Import the modules of compiled loops at their first use: importing one compiles its loops, or loads them."""

from __future__ import annotations

from functools import cache
from types import ModuleType


# Cache: valid for the life of the process: a module.
@cache
def loops() -> ModuleType:
    """Return the loops that generation needs, too."""
    from tricycle_accelerators.compiled import loops

    return loops


# Cache: valid for the life of the process: a module.
@cache
def training_loops() -> ModuleType:
    """Return the loops that only training needs."""
    from tricycle_accelerators.compiled import training_loops

    return training_loops
