"""The amount of free memory, with checks that raise an error before too much is allocated."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tricycle.system.cgroups import cgroup_folders, read_system_file

# The environment variable that overrides the amount of free memory, in GB.
MEMORY_VARIABLE = "TRICYCLE_MEMORY_GB"
_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")


def available_memory() -> int | None:
    """Return the bytes this process can allocate, None if unknown; TRICYCLE_MEMORY_GB overrides (ValueError if bad).

    This is the smallest of the free memory of the machine, the rest of the limits of a container or cgroup, and the
    rest of `ulimit -v`.
    """
    stated = os.environ.get(MEMORY_VARIABLE)
    if stated:
        try:
            return int(float(stated) * 1e9)
        except (ValueError, OverflowError):
            raise ValueError(f"{MEMORY_VARIABLE}: expected a number of gigabytes, got {stated!r}") from None
    limits = [_available_on_machine(), _available_address_space(), *_available_in_cgroups()]
    return min((n for n in limits if n is not None), default=None)


def gpu_memory() -> tuple[int, int]:
    """Return the number of bytes of the current GPU that new arrays can use, and its total memory."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return free + cupy.get_default_memory_pool().free_bytes(), total


def check_memory(n_bytes: int, what: str, advice: str = "") -> None:
    """Raise a MemoryError with what needs memory, and the advice, if `n_bytes` exceed the free memory, if known.

    Args:
        n_bytes: the least that is needed.
        what: the subject of the message, such as "the model".
        advice: what to do, for the end of the message.
    """
    free = available_memory()
    if free is not None and n_bytes > free:
        end = f": {advice}" if advice else ""
        needed = f"{what} needs at least {format_gigabytes(n_bytes)} of memory"
        raise MemoryError(f"{needed}, {format_gigabytes(free)} are free{end}")


def format_gigabytes(n_bytes: int) -> str:
    """Format a number of bytes in GB with at least two significant digits, such as "1.5 GB"."""
    amount = n_bytes / 1e9
    return f"{amount:,.0f} GB" if amount >= 100 else f"{amount:.1f} GB" if amount >= 1 else f"{amount:.2g} GB"


# -------------------------------------------------------------------- sources
def _available_on_machine() -> int | None:
    """Return the machine's available memory in bytes, its total if only that is reported; None if unknown."""
    kilobytes = _read_number(_MEMINFO, "MemAvailable:")
    if kilobytes is not None:
        return kilobytes * 1024
    if sys.platform == "win32":
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _available_address_space() -> int | None:
    """Return the bytes left of the limit of `ulimit -v`, None without a limit or on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    kilobytes = _read_number(_STATUS, "VmSize:")
    if limit == resource.RLIM_INFINITY or kilobytes is None:
        return None
    return max(0, limit - kilobytes * 1024)


def _available_in_cgroups() -> list[int]:
    """Return the free bytes within each memory limit of this process's cgroup and its parents; [] without any."""
    free = []
    for folder, is_v1 in cgroup_folders("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        limit, used = (read_system_file(folder / name).strip() for name in names)
        if limit.isdigit() and used.isdigit():
            cached = (_read_number(folder / "memory.stat", f"{kind}_file") or 0 for kind in ("inactive", "active"))
            free.append(max(0, int(limit) - max(0, int(used) - sum(cached))))  # the page cache is reclaimed
    return free


def _read_number(path: Path, name: str) -> int | None:
    """Return the integer after a name at the beginning of a line of a system file; None if there is none."""
    for line in read_system_file(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None
