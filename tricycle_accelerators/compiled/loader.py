"""Import the modules of compiled loops at their first use: importing one compiles its loops, or loads them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


# Cache: valid for the life of the process: modules.
@cache
def load_loops(name: str) -> Any:
    """Return a module of this folder: "loops" that generation needs, too, "training_loops", and so on."""
    return import_module(f"{__package__}.{name}")
