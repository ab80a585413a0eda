"""Atomic writing of files, atomic appending of lines, and reading of untrusted files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

# Errors of a file system that cannot sync a folder, and of a folder without permission to read.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC,)


@contextmanager
def atomic_write(path: str | os.PathLike[str], text: bool = False) -> Iterator[IO[Any]]:
    """Give a block a temporary file; sync and rename it to `path` unless the block fails; make missing folders.

    The bytes are synced to the disk (fsync) before the rename, and the rename before this returns, so after a crash, a
    full disk or a kill there is either the old file or the new one. On an error the temporary file is removed.

    Args:
        path: the file to write or replace; missing folders are made.
        text: write UTF-8 text with "\\n" line ends instead of bytes.

    Raises:
        OSError: an error of the disk; it names `path`.
        ValueError: `path` is a device or a pipe, or a link to one, which the rename would replace.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path}: expected a file or nothing of that name, got a device or a pipe")
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    open_args: dict[str, Any] = {"mode": "w", "encoding": "utf-8", "newline": "\n"} if text else {"mode": "wb"}
    with add_path_to_errors(path, instead_of=temporary):
        try:
            with temporary.open(**open_args) as file:
                yield file
                file.flush()
                _sync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is more informative than a second one
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def append_lines(path: str | os.PathLike[str], text: str) -> None:
    """Append text and sync it, after removing an incomplete last line; on an error, restore the file's length.

    Readers never see half a line. After an error the call can be repeated.

    Args:
        text: complete lines, each with its "\\n".

    Raises:
        OSError: an error of the disk; it names `path`.
        ValueError: `path` is a link, a device, a pipe or a folder.
    """
    path = Path(path)
    check_regular_file(path)
    is_new = not path.exists()
    # Without a buffer there is a single write, so that readers never see half a line.
    with add_path_to_errors(path), path.open("a+b", buffering=0) as file:
        size = _remove_incomplete_line(file)
        try:
            remaining = memoryview(text.encode("utf-8"))
            while remaining:
                remaining = remaining[file.write(remaining) :]
            _sync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise
    if is_new:
        _sync_folder(path.parent)


def _remove_incomplete_line(file: IO[bytes]) -> int:
    """Truncate a file after its last complete line (to 0 if none), seek to the end, and return the size."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    file.seek(end)
    return end


# -------------------------------------------------------------------- untrusted files
def check_regular_file(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a path exists and is a link (even to a file), folder, device, pipe (for in-place writes)."""
    try:
        mode = os.lstat(path).st_mode  # a single call: the file may be replaced or removed between two
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: expected a file or nothing of that name, got a link, a device, a pipe or a folder")


def read_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes`; raise ValueError for larger ones, pipes and devices.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder, a device or a pipe; or a larger file.
    """
    path = Path(path)
    if not path.is_file():
        if path.exists():
            raise ValueError(f"{path}: expected a file, got a folder, a device or a pipe")
        raise FileNotFoundError(f"{path}: there is no such file")
    size = path.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"{path}: expected at most {max_bytes:,} bytes, got {size:,}")
    return path.read_bytes()


MAX_JSON_BYTES = 2**24  # more than any config has
MAX_JSON_VALUES = 2**20


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES, max_values: int = MAX_JSON_VALUES) -> Any:
    """Return the parsed content of a JSON file; raise ValueError if invalid, or above `max_bytes` or `max_values`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, nested too deeply, or too large; the message names the file.
    """
    content = read_file(path, max_bytes)
    try:
        check_n_json_values(content, max_values)
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, ValueError) else "values are nested too deeply"
        raise ValueError(f"{path}: expected JSON: {reason}") from None


def check_n_json_values(content: bytes, max_values: int = MAX_JSON_VALUES) -> None:
    """Raise ValueError if JSON text has over `max_values` values, counted by commas and brackets, before parsing.

    A parsed value takes about 90 bytes of memory, but as little as two bytes (`[]`) in the file.
    """
    if sum(map(content.count, (b",", b"[", b"{"))) > max_values:
        raise ValueError(f"more than {max_values:,} values")


def read_json_object(
    path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES, max_values: int = MAX_JSON_VALUES
) -> dict[str, Any]:
    """Return the content of a JSON file as a dict; raise ValueError if it is not an object, or as `read_json`."""
    value = read_json(path, max_bytes, max_values)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


# -------------------------------------------------------------------- errors of the disk
def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that a disk, or the quota of a user, is full."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


@contextmanager
def add_path_to_errors(path: str | os.PathLike[str], instead_of: Path | None = None) -> Iterator[None]:
    """Raise OSErrors of a block that have no file name, or that of a temporary file, with `path` as file name.

    Args:
        instead_of: a temporary file, whose name is replaced by `path`.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, os.fspath(instead_of or path)):
            raise _with_path(error, os.fspath(path)) from None
        raise


def _with_path(error: OSError, path: str) -> OSError:
    """Return a new OSError with the number and the message of `error`, and this path as its file name."""
    return OSError(error.errno, error.strerror, path)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and sync them to the disk; do nothing if it exists."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for new_folder in missing:
        _sync_folder(new_folder.parent)


def _sync(handle: int) -> None:
    """Sync a file to the disk, on macOS by F_FULLFSYNC where possible: fsync does not flush the disk's cache there."""
    if sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):  # not every file system supports it
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def _sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk (OSError if it fails); do nothing on Windows or if it is unsupported."""
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise _with_path(error, os.fspath(folder)) from None
