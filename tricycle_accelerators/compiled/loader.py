"""Import the modules of compiled loops at first use: the import compiles the loops or loads cached machine code."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from tricycle_accelerators import libraries

# Loops that a model with blocks needs for a token. They are loaded with those of its prompt, before its file is read,
# because LLVM takes up to 60 MB of memory meanwhile.
LOADED_BEFORE = {"block_loops": ("vector_loops", "sublayer_loops", "decode_loops")}


# Cache: valid for the life of the process: modules.
@cache
def load_loops(name: str) -> Any:
    """Import (or compile) and return this folder's module `name`; RuntimeError if Numba's libraries cannot be loaded.

    Raises:
        RuntimeError: Numba's libraries cannot be loaded, for example under a low memory limit.
    """
    for other in LOADED_BEFORE.get(name, ()):
        load_loops(other)
    try:
        loops = import_module(f"{__package__}.{name}")
    except OSError as error:
        problem = str(error).partition(". ")[0]
        raise RuntimeError(f"Numba failed ({problem}): free some memory, or set TRICYCLE_KERNELS=-numba") from error
    libraries.release_memory()
    return loops
