"""What a run does when its disk is full: it waits until there is room, or ends."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from tricycle.files import is_full

T = TypeVar("T")
OnFullDisk = Literal["wait", "stop"]

LOOK_SECONDS = 0.5  # how often it is looked whether there is more room, and whether the run is to stop
LONGEST_SECONDS = 30.0  # to try again after; a share of a disk can have room that the disk's own figure does not show


def write_with_room(
    write: Callable[[], T],
    folder: Path,
    on_full_disk: OnFullDisk,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> T:
    """What a function returns that writes into a folder, called again as long as its disk is full.

    Args:
        write: leaves nothing behind where it fails.
        on_full_disk: "wait" for room, or "stop" with the error.
        stop: asked while waiting; True ends it.

    Raises:
        OSError: of the disk, where it is not to be waited for, or no longer.
    """
    delay = 0.0
    while True:
        try:
            result = write()
        except OSError as error:
            if on_full_disk == "stop" or not is_full(error):
                raise
            if not delay:
                name = error.filename or folder
                free = _free(folder) / 1e6
                say(f"{name}: the disk is full ({free:,.1f} MB are free): waiting for room; Ctrl-C ends the run")
            delay = min(2 * delay or 1.0, LONGEST_SECONDS)
            if not _wait(folder, delay, stop):
                raise
        else:
            if delay:
                say("there is room again: going on")
            return result


def _wait(folder: Path, seconds: float, stop: Callable[[], bool]) -> bool:
    """Wait so long, or until there is more room than now. Returns whether it is to be tried again."""
    free, end = _free(folder), time.monotonic() + seconds
    while not stop():
        left = end - time.monotonic()
        if left <= 0 or _free(folder) > free:
            return True
        time.sleep(min(left, LOOK_SECONDS))
    return False


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
