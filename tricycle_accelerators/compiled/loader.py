"""Import the modules of compiled loops at first use: the import compiles the loops or loads cached machine code."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")


# Cache: valid for the life of the process: modules.
@cache
def load_loops(name: str) -> Any:
    """Import (or compile) and return this folder's module `name`; RuntimeError if Numba's libraries cannot be loaded.

    Raises:
        RuntimeError: Numba's libraries cannot be loaded, for example under a low memory limit.
    """
    try:
        loops = import_module(f"{__package__}.{name}")
        _release_library("libllvmlite")
        return loops
    except OSError as error:
        problem = str(error).partition(". ")[0]
        raise RuntimeError(f"Numba failed ({problem}): free some memory, or set TRICYCLE_KERNELS=-numba") from error


def _release_library(name: str) -> None:
    """Release the pages of a shared library's code, on Linux; the system reads them again where the code is executed.

    LLVM's code takes 60 MB of memory, and is executed only while loops are compiled or loaded.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for line in MAPS.read_text().splitlines():
        places, access, *_, path = line.split(maxsplit=5)
        if access == "r-xp" and name in path:  # code alone: other pages may have been written to
            start, end = (int(place, 16) for place in places.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
