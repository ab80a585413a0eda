"""Libraries of other languages that Python packages bring along."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def shipped(distribution: str, name: str) -> Path | None:
    """Where an installed distribution has put the file whose name begins so; None where there is none.

    Raises:
        PackageNotFoundError: the distribution is not installed.
    """
    files = metadata.files(distribution) or []
    paths = (Path(str(file.locate())).resolve() for file in files if file.name.startswith(name))
    return next((path for path in paths if path.exists()), None)
