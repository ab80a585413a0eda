"""Limits of this process's cgroups, in which containers and schedulers run programs on Linux.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, and /scheduler/sched-bwc.html for version 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def cgroup_folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, is cgroups v1) for a controller: this process's cgroup, then its parents up to the root.

    Args:
        controller: "memory" or "cpu".
    """
    for line in read_system_file(_CGROUP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        is_v1 = bool(controllers)
        top = _CGROUPS / controller if is_v1 else _CGROUPS
        own = top / path.strip("/")
        for folder in [own, *own.parents]:
            if not folder.is_relative_to(top):
                break
            yield folder, is_v1


def cpu_quota() -> float | None:
    """Return how many processors the cgroups let this process use on average, such as 1.5; None without a limit."""
    quotas = []
    for folder, is_v1 in cgroup_folders("cpu"):
        if is_v1:
            words = [read_system_file(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        else:
            words = read_system_file(folder / "cpu.max").split()
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):  # without a limit "-1" or "max"
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def read_system_file(path: Path) -> str:
    """Return the text of a small file of the system, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
