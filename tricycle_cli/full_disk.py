"""Estimate the disk space of a run, and wait for free space or stop when the disk is full."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from tricycle.system.files import is_disk_full
from tricycle.tokeniser import Tokeniser
from tricycle.training_state import TrainingState

T = TypeVar("T")
OnFullDisk = Literal["wait", "stop"]

POLL_SECONDS = 0.5  # between two checks of the free space and of a request to stop
MAX_RETRY_SECONDS = 30.0  # between two attempts; with a quota there may be space that the disk's figure does not show

# Maximum bytes of a line of metrics, a sample, the metadata of a tensor and of a checkpoint, and the plot.
LINE, SAMPLE, TENSOR, ABOUT, PICTURE = 160, 4000, 200, 20_000, 200_000


def max_folder_bytes(state: TrainingState, tokeniser: Tokeniser) -> int:
    """Return the maximum bytes of a run folder: three checkpoints, tokenizer, metrics of all steps, samples, plot.

    The checkpoints are the last, the best, and one that is being written; each has the weights and two moments.
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
    """Return a run folder's maximum size as text, such as "up to 12 MB"; with the free space, if not sufficient."""
    size, free = max_folder_bytes(state, tokeniser), _free(folder)
    used = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    needed = f"up to {size / 1e6:,.0f} MB" if size >= 1e6 else "less than 1 MB"
    return needed if free >= size - used else f"{needed} (only {free / 1e6:,.1f} MB free)"


def retry_on_full_disk(
    write: Callable[[], T],
    folder: Path,
    on_full_disk: OnFullDisk,
    print_line: Callable[[str], None],
    stop: Callable[[], bool],
) -> T:
    """Call `write` and return its result; while the disk is full, wait and retry until `stop()`, or with "stop" raise.

    Args:
        write: the function, which removes its partial files when it fails.
        folder: a folder on the disk.
        on_full_disk: "wait" for free space, or "stop" with the error.
        print_line: prints a line.
        stop: called while waiting; True stops the waiting.

    Raises:
        OSError: writing failed for another reason, or the function stopped waiting.
    """
    delay = 0.0
    while True:
        try:
            result = write()
        except OSError as error:
            if on_full_disk == "stop" or not is_disk_full(error):
                raise
            if not delay:
                name = error.filename or folder
                free = _free(folder) / 1e6
                print_line(f"{name}: the disk is full ({free:,.1f} MB free): waiting for space; Ctrl-C stops the run")
            delay = min(2 * delay or 1.0, MAX_RETRY_SECONDS)
            if not _wait(folder, delay, stop):
                raise
        else:
            if delay:
                print_line("the disk has space again: the run continues")
            return result


def _wait(folder: Path, seconds: float, stop: Callable[[], bool]) -> bool:
    """Wait for some seconds, or until there is more free space than now; return False if the run should stop."""
    free, end = _free(folder), time.monotonic() + seconds
    while not stop():
        left = end - time.monotonic()
        if left <= 0 or _free(folder) > free:
            return True
        time.sleep(min(left, POLL_SECONDS))
    return False


def _free(folder: Path) -> int:
    """Return the free bytes of a folder's file system; 0 if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
