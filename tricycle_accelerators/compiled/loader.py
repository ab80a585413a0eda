"""Import the modules of compiled loops at first use: the import compiles the loops or loads cached machine code."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

MAPPINGS = Path("/proc/self/smaps")  # the memory of this process


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
    """Release the unchanged pages of a shared library, on Linux; the system reads them again where they are used.

    LLVM takes 75 MB of memory, and is used only while loops are compiled or loaded.
    """
    if sys.platform != "linux" or not MAPPINGS.exists():
        return
    libc = ctypes.CDLL(None)
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", MAPPINGS.read_text(encoding="utf-8")):
        head = mapping.partition("\n")[0]
        if name in head and " rw" not in head and re.search(r"(?m)^Private_Dirty: +0 kB$", mapping):
            start, end = (int(place, 16) for place in head.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
