"""Files are written whole or not at all, and lines are added whole or not at all."""

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

# What a file system answers that cannot sync a folder, or a user who may write into a folder but not read it.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR)
_FULL = (errno.ENOSPC, errno.EDQUOT) if hasattr(errno, "EDQUOT") else (errno.ENOSPC,)


@contextmanager
def atomic_write(path: str | os.PathLike[str], text: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file beside `path` that takes its name once the block has ended well.

    The bytes are on the disk (fsync) before the rename, and the rename is before this returns, so a crash, a full
    disk or a kill at any moment leaves either the old file or the new one. On an error the temporary file is removed.

    Args:
        path: the file to write or replace; missing folders are made.
        text: write UTF-8 text with "\\n" line ends instead of bytes.

    Raises:
        OSError: of the disk; it names `path`.
        ValueError: there is a device or a pipe of that name, or a link to one: to take its name would take it away.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path}: expected a file or nothing of that name, got a device or a pipe")
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    how: dict[str, Any] = {"mode": "w", "encoding": "utf-8", "newline": "\n"} if text else {"mode": "wb"}
    with naming(path, instead_of=temporary):
        try:
            with temporary.open(**how) as file:
                yield file
                file.flush()
                _sync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error says more than a second one
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def append(path: str | os.PathLike[str], text: str) -> None:
    """Add lines to a file: all of them or, where that fails, none, so that it can be done again.

    A reader meets no half line, and a last line that something else cut off is dropped before. When this returns, the
    lines are on the disk.

    Args:
        text: whole lines, each with its "\\n".

    Raises:
        OSError: of the disk; it names `path`.
        ValueError: there is a link, a device or a pipe of that name.
    """
    path = Path(path)
    expect_plain(path)
    is_new = not path.exists()
    with naming(path), path.open("a+b", buffering=0) as file:  # one write, so that nobody sees half of it
        size = _end_of_lines(file)
        try:
            left = memoryview(text.encode("utf-8"))
            while left:
                left = left[file.write(left) :]
            _sync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise
    if is_new:
        _sync_folder(path.parent)


def _end_of_lines(file: IO[bytes]) -> int:
    """Where the last whole line of a file ends; what stands behind it is cut off."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        place = file.read(end - start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end < size:
        file.truncate(end)
    file.seek(end)
    return end


# -------------------------------------------------------------------- what others may have written
def expect_plain(path: str | os.PathLike[str]) -> None:
    """Before a file is changed in its place, which a link may have somewhere else altogether.

    Raises:
        ValueError: there is a link, a device, a pipe or a folder of that name.
    """
    try:
        mode = os.lstat(path).st_mode  # one look: the file may be replaced or removed between two
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: expected a file or nothing of that name, got a link, a device, a pipe or a folder")


def read_file(path: str | os.PathLike[str], at_most: int | None = None) -> bytes:
    """The content of a file that may be anybody's: a pipe would be waited for, and a device may have no end.

    Args:
        at_most: bytes that such a file can have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder, a device or a pipe; or a file of more bytes.
    """
    path = Path(path)
    if not path.is_file():
        if path.exists():
            raise ValueError(f"{path}: expected a file, got a folder, a device or a pipe")
        raise FileNotFoundError(f"{path}: there is no such file")
    size = path.stat().st_size
    if at_most is not None and size > at_most:
        raise ValueError(f"{path}: expected at most {at_most:,} bytes, got {size:,}")
    return path.read_bytes()


MOST_JSON = 2**24  # bytes: more than any config has
MOST_JSON_VALUES = 2**20


def read_json(path: str | os.PathLike[str], at_most: int = MOST_JSON, most_values: int = MOST_JSON_VALUES) -> Any:
    """What a JSON file holds.

    Args:
        at_most, most_values: bytes and values that such a file can have.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no JSON, nested too deeply, or of more values than such a file can have; names the file.
    """
    content = read_file(path, at_most)
    try:
        expect_few_values(content, most_values)
        return json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: expected JSON, got some that nests too deeply") from None


def expect_few_values(content: bytes, most: int = MOST_JSON_VALUES) -> None:
    """Before JSON becomes values, each of which takes some ninety bytes: `[]` has two in a file.

    Raises:
        ValueError: more values than that.
    """
    if sum(map(content.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"more than {most:,} values")


def read_json_object(
    path: str | os.PathLike[str], at_most: int = MOST_JSON, most_values: int = MOST_JSON_VALUES
) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        FileNotFoundError, ValueError: as of `read_json`; or it holds something else.
    """
    value = read_json(path, at_most, most_values)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


# -------------------------------------------------------------------- errors of the disk
def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or somebody's share of it, is full."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextmanager
def naming(path: str | os.PathLike[str], instead_of: Path | None = None) -> Iterator[None]:
    """Within this block errors of the disk say which file they are about: those of a write do not by themselves.

    Args:
        instead_of: a temporary file's name, which says nothing to anyone.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, os.fspath(instead_of or path)):
            raise _named(error, os.fspath(path)) from None
        raise


def _named(error: OSError, path: str) -> OSError:
    return OSError(error.errno, error.strerror, path)


def make_folder(folder: Path) -> None:
    """Make a folder and those that it lies in, durably."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        _sync_folder(place.parent)


def _sync(handle: int) -> None:
    """Return when what was written is on the disk itself: on a Mac fsync alone ends at the disk's own memory."""
    if sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):  # not every file system can
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; Windows has no folder handles and needs none."""
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
            raise _named(error, os.fspath(folder)) from None
