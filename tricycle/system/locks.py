"""Exclusive locks of folders; the error message of a second process names the process that holds the lock.

The lock is an operating-system lock of a file in the folder, so it ends with its process. The file contains the holder,
for the message. On file systems without locks (some network file systems), the existence of the file is the lock; a
dead holder is recognized by its process id and start time.

`filelock` (4.2) cannot replace this: it does not write the holder into a file with a system lock, does not remove the
file, and uses the existence of the file only after ENOSYS; ENOLCK, EOPNOTSUPP and EINVAL of network file systems are
errors there.
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

from tricycle.system.files import check_regular_file, make_folder

LOCK_NAME = ".lock"
# On Windows a locked byte cannot be read by others, so a byte far behind the text is locked.
LOCKED_BYTE = 2**30
# Errors of file systems without locks.
NO_LOCKS_ERRORS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
RETRY_SECONDS = 0.1  # between two attempts to get a lock


class LockedError(RuntimeError):
    """Raised when another process holds the lock of a folder."""


class FolderLock:
    """Context manager that holds the exclusive lock of a folder.

    Args:
        folder: made if it does not exist; a folder that was made is removed at the end if it is empty.
        wait: wait until the lock is free, instead of raising LockedError.

    Raises:
        LockedError: another process or FolderLock holds the lock; the message has process, machine and time.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], wait: bool = False) -> None:
        self.folder, self.wait = Path(folder), wait
        self.path = self.folder / LOCK_NAME
        self._handle = -1  # of the lock file while it is locked
        self._made_folder = False

    def __enter__(self) -> FolderLock:
        """Make the folder if needed, and lock it; if it is locked, wait if `wait`, else raise a LockedError."""
        self._made_folder = not self.folder.exists()
        make_folder(self.folder)
        while not self._try_lock():
            if not self.wait:
                raise LockedError(self._locked_message())
            time.sleep(RETRY_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock and remove its file; also remove a folder that was made for it and is empty."""
        handle, self._handle = self._handle, -1
        # The file is removed while the lock is held, so that no other process's file is removed. Windows cannot remove
        # an open file, so it is closed first there.
        steps: list[Callable[[], None]] = [self.path.unlink, lambda: os.close(handle)]
        steps = steps if os.name == "posix" else steps[::-1]
        for step in [*steps, self.folder.rmdir] if self._made_folder else steps:
            with contextlib.suppress(OSError):  # for example because the folder is not empty
                step()

    def _try_lock(self) -> bool:
        """Try to get the lock, also from a dead holder, and write this holder; return whether this succeeded."""
        handle, is_new = self._open()
        try:
            locked = lock_file(handle)
            if locked is None and not is_new:
                os.close(handle)
                handle = self._replace_dead_holder()
            if handle >= 0 and locked is not False and self._is_current_file(handle):
                _write_holder(handle)
                self._handle, handle = handle, -1
        finally:
            if handle >= 0:
                os.close(handle)
        return self._handle >= 0

    def _open(self) -> tuple[int, bool]:
        """Open the lock file, or make it; return its handle, and whether it is new; ValueError for a link or folder."""
        check_regular_file(self.path)  # writing through a link would change another file
        while True:
            try:
                return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # its holder has just removed it
                    return os.open(self.path, os.O_RDWR), False

    def _is_current_file(self, handle: int) -> bool:
        """Return whether an open file is still the lock file: its holder may have removed it."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _replace_dead_holder(self) -> int:
        """Replace the lock file of a dead holder if there are no system locks; return a handle, or -1 on failure."""
        text = _read_text(self.path)
        if not _is_dead(text):
            return -1
        claim = self.path.with_name(f"{LOCK_NAME}.{zlib.crc32(text.encode()):08x}")  # only one process can make it
        try:
            os.close(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError:
            return -1
        try:
            if _read_text(self.path) != text:  # another process was faster
                return -1
            self.path.unlink()
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError:
            return -1
        finally:
            claim.unlink(missing_ok=True)

    def _locked_message(self) -> str:
        """Return a LockedError's message: the folder, its holder if known, and advice when to remove the lock file."""
        holder = _parse_holder(_read_text(self.path))
        if not holder:
            return f"{self.folder}: another process works in this folder (if there is none, remove {self.path})"
        process = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
        is_on_other_host = holder.get("host") != socket.gethostname()
        advice = f" (if there is no such process any more, remove {self.path})" if is_on_other_host else ""
        return f"{self.folder}: another process works in this folder, {process}{advice}"


def lock_file(handle: int) -> bool | None:
    """Try to lock an open file exclusively, without waiting; return whether it was free, None if unsupported."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return None
    except OSError as error:
        return None if error.errno in NO_LOCKS_ERRORS else False
    return True


def _write_holder(handle: int) -> None:
    """Write process id, host and start time of this process to the lock file as JSON; ignore any OSError."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "began": _start_time(os.getpid()),
    }
    with contextlib.suppress(OSError):  # a full disk does not affect the lock
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, json.dumps(holder).encode())


def _read_text(path: Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parse_holder(text: str) -> dict[str, Any]:
    """Return the holder in a lock file, or {} if the file is damaged or the holder has not written it yet."""
    try:
        holder = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_dead(text: str) -> bool:
    """Return whether the process that wrote a lock file is known to have ended; False on other hosts and Windows."""
    holder = _parse_holder(text)
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or type(pid) is not int or pid <= 0 or os.name != "posix":
        return False
    try:
        os.kill(pid, 0)  # signal 0 only checks whether the process exists
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return holder.get("began") != _start_time(pid)  # another process has the same id now


def _start_time(pid: int) -> str | None:
    """Return "BOOT_ID START_TIME" of a process on Linux; None on other systems, or if there is no such process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return f"{boot} {fields[19]}"
    except (OSError, IndexError):
        return None
