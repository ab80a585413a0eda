"""Find native libraries that installed Python packages contain, and release their memory."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

MAPPINGS = Path("/proc/self/smaps")  # the memory of this process


def find_distribution_file(distribution: str, name: str) -> Path | None:
    """Return a package's first existing file that starts with `name`, or None; PackageNotFoundError if absent."""
    files = metadata.files(distribution) or []
    paths = (Path(str(file.locate())).resolve() for file in files if file.name.startswith(name))
    return next((path for path in paths if path.exists()), None)


def find_library(title: str, distribution: str, name: str, extra: str) -> Path | str:
    """Return a distribution's library path, or why not: other than Linux on x86-64, not installed, no `name` file.

    Args:
        title: of the library, for the reason. extra: how the distribution is installed.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        return f"{title} is called on Linux on x86-64 alone, and this is {platform.system()} on {machine}"
    try:
        path = find_distribution_file(distribution, name)
    except metadata.PackageNotFoundError:
        return f"{title} is not installed ({extra})"
    return path or f"{distribution} holds no {name} (reinstall it: {extra})"


def release_memory() -> None:
    """Release freed memory and the unchanged pages of shared libraries, on Linux.

    Loading libraries and compiled loops reads or allocates 100 MB that are hardly used later: LLVM's code, for example,
    or that of an import. The system reads pages of libraries again where they are used.
    """
    if sys.platform != "linux" or not MAPPINGS.exists():
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", MAPPINGS.read_text(encoding="utf-8")):
        head = mapping.partition("\n")[0]
        is_as_in_file = all(re.search(rf"(?m)^{kind}: +0 kB$", mapping) for kind in ("Anonymous", "Swap"))
        if ".so" in head and " rw" not in head and is_as_in_file:
            start, end = (int(place, 16) for place in head.split()[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
