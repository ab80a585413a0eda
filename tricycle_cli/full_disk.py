"""How much room a run needs, and what it does when its disk is full: it waits until there is room, or ends."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from tricycle.system.files import is_full
from tricycle.tokeniser import Tokeniser
from tricycle.training_state import TrainingState

T = TypeVar("T")
OnFullDisk = Literal["wait", "stop"]

LOOK_SECONDS = 0.5  # how often it is looked whether there is more room, and whether the run is to stop
LONGEST_SECONDS = 30.0  # to try again after; a share of a disk can have room that the disk's own figure does not show

# The most bytes of a line of metrics and of a sample, of what a checkpoint says about a tensor and about itself, and of
# the picture of the losses.
LINE, SAMPLE, TENSOR, ABOUT, PICTURE = 160, 4000, 200, 20_000, 200_000


def max_folder_bytes(state: TrainingState, tokeniser: Tokeniser) -> int:
    """The most that a run folder takes, once the number of updates is known.

    The last checkpoint, the best one and the one that is being written; with weights and two moments of each.
    """
    n_tensors = len(list(state.model.parameters()))
    n_bytes = sum(parameter.array.nbytes for parameter in state.model.parameters())
    text = len(json.dumps(json.dumps(tokeniser.to_dict())))
    checkpoint = 3 * (n_bytes + n_tensors * TENSOR) + text + ABOUT
    every = state.config.sample_interval
    samples = SAMPLE * (state.total_steps // every + 3 if every else 3)
    estimates = state.total_steps // state.config.eval_interval + 2
    return 3 * checkpoint + 2 * text + LINE * (state.total_steps + estimates) + samples + PICTURE


def describe_disk_space(state: TrainingState, tokeniser: Tokeniser, folder: Path) -> str:
    """How much room a run takes, for people; and how much there is, where that is less."""
    size, free = max_folder_bytes(state, tokeniser), _free(folder)
    used = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    said = f"up to {size / 1e6:,.0f} MB" if size >= 1e6 else "less than 1 MB"
    return said if free >= size - used else f"{said}, of which the disk has {free / 1e6:,.1f} MB free"


def retry_on_full_disk(
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
