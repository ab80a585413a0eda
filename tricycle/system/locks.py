"""Locks of folders, so that one process at a time works in each; the message for others names the holder.

The lock is the operating system's own, on a file in the folder: it goes with the process that holds it, however that
ends, so no lock outlives its holder. The text of the file is for the message. Where a file system has no locks (some
network folders), the file itself is the lock, and a holder that is dead is found by its process number and start time.

`filelock` (4.2) does not replace this: it writes no holder into a file with a system lock, leaves the file behind,
and uses the file itself only after ENOSYS, while ENOLCK, EOPNOTSUPP and EINVAL of network file systems are errors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tricycle.system.files import expect_plain, make_folder

NAME = ".lock"
# Windows keeps others from reading what is locked, so a byte far behind the text is.
FAR = 2**30
# What a file system says that knows no locks.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
WAIT = 0.1  # seconds between two looks at a lock that somebody else holds


class LockedError(RuntimeError):
    """Another process works in the folder."""


class FolderLock:
    """Held within a `with` block: no other process, and no other FolderLock, works in the folder meanwhile.

    Args:
        folder: made if it is not there, and removed at the end if it was, and is empty.
        wait: wait until the folder is free, instead of raising.

    Raises:
        LockedError: on entering: somebody else is at work; says who, on which machine and since when.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], wait: bool = False) -> None:
        self.folder, self.wait = Path(folder), wait
        self.path = self.folder / NAME
        self._handle: int | None = None
        self._made_folder = False

    def __enter__(self) -> FolderLock:
        self._made_folder = not self.folder.exists()
        make_folder(self.folder)
        while not self._take():
            if not self.wait:
                raise LockedError(self._who())
            time.sleep(WAIT)
        return self

    def __exit__(self, *error: object) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # first the name, while the lock is held, so that nobody else's is removed; Windows removes no open file
        steps: list[Callable[[], None]] = [self.path.unlink, lambda: os.close(handle)]
        steps = steps if os.name == "posix" else steps[::-1]
        for step in [*steps, self.folder.rmdir] if self._made_folder else steps:
            with contextlib.suppress(OSError):  # as where the folder is not empty
                step()

    def _take(self) -> bool:
        """Try to become the holder; return whether that worked."""
        handle, is_new = self._open()
        try:
            locked = lock_file(handle)
            if locked is None and not is_new:
                os.close(handle)
                handle = self._succeed()
            if handle >= 0 and locked is not False and self._has_its_name(handle):
                _write(handle)
                self._handle, handle = handle, -1
        finally:
            if handle >= 0:
                os.close(handle)
        return self._handle is not None

    def _open(self) -> tuple[int, bool]:
        """Return a handle of the file, and whether it was made here."""
        expect_plain(self.path)  # a link would have us write elsewhere
        while True:
            try:
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # its holder has just left
                    return os.open(self.path, os.O_RDWR), False

    def _has_its_name(self, handle: int) -> bool:
        """Return whether an open file still has the lock's name: a holder that left may have removed it."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _succeed(self) -> int:
        """Without locks: make the file anew in place of a dead holder's. Returns a handle, or -1 where none is dead."""
        text = _read(self.path)
        if not _is_dead(text):
            return -1
        claim = self.path.with_name(f"{NAME}.{zlib.crc32(text.encode()):08x}")  # made by one successor at a time
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError:
            return -1
        try:
            if _read(self.path) != text:  # another successor was faster
                return -1
            self.path.unlink()
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError:
            return -1
        finally:
            claim.unlink(missing_ok=True)

    def _who(self) -> str:
        """Return the message for a process that does not get the lock."""
        holder = _parsed(_read(self.path))
        if not holder:
            return f"{self.folder}: another process works in this folder (if there is none, remove {self.path})"
        who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
        elsewhere = holder.get("host") != socket.gethostname()
        advice = f" (if there is no such process any more, remove {self.path})" if elsewhere else ""
        return f"{self.folder}: another process works in this folder, {who}{advice}"


def lock_file(handle: int) -> bool | None:
    """Lock an open file for this process alone.

    Returns:
        whether it worked; None where there are no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return None
    except OSError as error:
        return None if error.errno in NO_LOCKS else False
    return True


def _write(handle: int) -> None:
    """Write this process as the holder."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "began": _began(os.getpid()),
    }
    with contextlib.suppress(OSError):  # a full disk: it is locked all the same
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, json.dumps(holder).encode())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parsed(text: str) -> dict[str, Any]:
    """Return the holder in a lock file; nothing where it is none, or where the holder has not written yet."""
    try:
        holder = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_dead(text: str) -> bool:
    """Return whether the process that wrote a lock file is known to have ended."""
    holder = _parsed(text)
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or type(pid) is not int or pid <= 0 or os.name != "posix":
        return False
    try:
        os.kill(pid, 0)  # asks, and sends nothing
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return holder.get("began") != _began(pid)  # its number is another process's today


def _began(pid: int) -> str | None:
    """Return the boot and the time at which a process began, as Linux has them; None elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return f"{boot} {fields[19]}"
    except (OSError, IndexError):
        return None
