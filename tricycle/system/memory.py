"""How much memory there is, so that what does not fit is refused before it is taken."""

from __future__ import annotations

import os
from pathlib import Path

# Counted as what is there, in GB, where the system tells less than there is.
VARIABLE = "TRICYCLE_MEMORY_GB"
_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that this process can still take without others being pushed out; None where nobody tells.

    It is the least of what the machine has free, what the limit of a container or of a cgroup leaves, and what
    `ulimit -v` leaves.

    Raises:
        ValueError: the variable TRICYCLE_MEMORY_GB is no number.
    """
    stated = os.environ.get(VARIABLE)
    if stated:
        try:
            return int(float(stated) * 1e9)
        except (ValueError, OverflowError):
            raise ValueError(f"{VARIABLE}: expected a number of gigabytes, got {stated!r}") from None
    left = [_machine(), _address_space(), *_groups()]
    return min((n for n in left if n is not None), default=None)


def gpu_memory() -> tuple[int, int]:
    """Bytes of the current GPU that a new array could have, and all of them."""
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return free + cupy.get_default_memory_pool().free_bytes(), total


def check_memory(needed: int, what: str, advice: str = "") -> None:
    """Refuse what needs more memory than there is.

    Args:
        needed: bytes, in any case.
        what: needs them, such as "the model".
        advice: what to do, for the end of the message.

    Raises:
        MemoryError: says how much is needed and how much there is.
    """
    free = free_memory()
    if free is not None and needed > free:
        end = f": {advice}" if advice else ""
        raise MemoryError(f"{what} needs at least {gigabytes(needed)} of memory, {gigabytes(free)} are free{end}")


def gigabytes(n_bytes: int) -> str:
    """Such as "1.5 GB", rounded to two digits at least."""
    amount = n_bytes / 1e9
    return f"{amount:,.0f} GB" if amount >= 100 else f"{amount:.1f} GB" if amount >= 1 else f"{amount:.2g} GB"


# -------------------------------------------------------------------- who tells
def _machine() -> int | None:
    """What is free on the machine; all that it has, where that is all that the system tells."""
    kilobytes = _field(_MEMINFO, "MemAvailable:")
    if kilobytes is not None:
        return kilobytes * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no such thing
        return None


def _address_space() -> int | None:
    """What `ulimit -v` leaves."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    kilobytes = _field(_STATUS, "VmSize:")
    if most == resource.RLIM_INFINITY or kilobytes is None:
        return None
    return max(0, most - kilobytes * 1024)


def _groups() -> list[int]:
    """What the limits of this process's cgroups leave, its own and those around it; of both versions."""
    left = []
    for line in _text(_CGROUP).splitlines():
        _, kinds, place = [*line.split(":", 2), "", ""][:3]
        if kinds and "memory" not in kinds.split(","):
            continue
        top = _CGROUPS if not kinds else _CGROUPS / "memory"
        names = ("memory.max", "memory.current") if not kinds else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        own = top / place.strip("/")
        for folder in [own, *own.parents]:
            if not folder.is_relative_to(top):
                break
            most, used = (_text(folder / name).strip() for name in names)
            if most.isdigit() and used.isdigit():
                reclaimable = _field(folder / "memory.stat", "inactive_file") or 0  # files that were read
                left.append(max(0, int(most) - max(0, int(used) - reclaimable)))
    return left


def _field(path: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


def _text(path: Path) -> str:
    """All of a small file; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
