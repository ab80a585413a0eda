"""Texts shared by several studies: Python's standard library, and Shakespeare's plays."""

import sysconfig
from pathlib import Path

from tricycle_datasets.download import fetch
from tricycle_datasets.python_code import SKIPPED_FOLDERS
from tricycle_datasets.shakespeare import SHA256, URL


def python_root() -> Path:
    """Return the folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def python_files() -> list[str]:
    """Return the relative paths of all files that `PythonCode` reads, held-out ones too, in its order."""
    paths = [path.relative_to(python_root()) for path in python_root().rglob("*.py")]
    return sorted(path.as_posix() for path in paths if not SKIPPED_FOLDERS & set(path.parts[:-1]))


def plays() -> bytes:
    """Return Tiny Shakespeare, 1.1 million characters. Raises OSError and ValueError as `fetch` does."""
    return fetch("input.txt", URL, SHA256, folder="tinyshakespeare").read_bytes()
