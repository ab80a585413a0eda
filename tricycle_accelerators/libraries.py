"""Find native libraries that installed Python packages contain."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path


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
