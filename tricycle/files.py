"""Files are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_write(path: str | os.PathLike[str], text: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file beside `path` that takes its name once the block has ended well.

    The bytes are on the disk (fsync) before the rename, so a crash, a full disk or a kill at any
    moment leaves either the old file or the new one. On an error the temporary file is removed.

    Args:
        path: the file to write or replace; missing folders are made.
        text: write UTF-8 text with "\\n" line ends instead of bytes.

    Raises:
        ValueError: there is a device or a pipe of that name, or a link to one: to take its name would take it away.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path}: expected a file or nothing of that name, got a device or a pipe")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    how: dict[str, Any] = {"mode": "w", "encoding": "utf-8", "newline": "\n"} if text else {"mode": "wb"}
    try:
        with temporary.open(**how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; Windows has no folder handles and needs none."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # not every file system can; the file itself is safe
            os.fsync(handle)
        os.close(handle)
