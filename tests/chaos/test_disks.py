"""Trials of tests/chaos/disks.py, and tests of its fault injector and its model of a disk.

All trials: python -m tests.chaos.disks --seed 0
"""

import errno
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tricycle.system.files import append_lines, atomic_write

from .disks import EFFECTS, Fault, FaultInjector, FileSystem, fork_task, power_cut_images, wait_for_result, write_image
from .runs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")


def watched_call(folder: Path, action, fault: Fault | None = None):
    """Run a function in a process with a fault injector; return its outcome, calls, log and unintercepted events."""

    def child():
        disk = FaultInjector(folder, fault, record=True)
        disk.install()
        try:
            outcome = action()
        except OSError as error:
            outcome = errno.errorcode[error.errno]
        return outcome, disk.calls, disk.log, disk.unintercepted

    answer = wait_for_result(fork_task(child))
    assert isinstance(answer, tuple), answer
    return answer


@pytest.mark.nightly
def test_short_trials_pass_and_leave_no_files(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.chaos.disks", "--short", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 failed") == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.long
def test_all_trials_pass():
    command = [sys.executable, "-m", "tests.chaos.disks", "--seed", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------- fault injector
def write_all(folder: Path):
    """Write files with all functions that a program may use."""
    folder.mkdir(exist_ok=True)
    with atomic_write(folder / "whole", text=True) as file:
        file.write("zwölf")
    append_lines(folder / "lines", "one\n")
    append_lines(folder / "lines", "two\n")
    os.truncate(folder / "lines", 4)
    handle = os.open(folder / "handle", os.O_RDWR | os.O_CREAT)
    os.write(handle, b"12345")
    os.ftruncate(handle, 3)
    os.close(handle)
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_bytes(b"x" * 20_000)
    (folder / "inner" / "file").rename(folder / "moved")
    (folder / "inner").rmdir()
    with open(folder / "moved", "r+b") as file:
        file.seek(10)
        file.write(b"yy")
    (folder / "handle").unlink()
    return "done"


CONTENT = {"whole": "zwölf".encode(), "lines": b"one\n", "moved": b"x" * 10 + b"yy" + b"x" * 19_988}


def test_all_calls_are_intercepted_without_side_effects(tmp_path):
    outcome, calls, log, unintercepted = watched_call(tmp_path, lambda: write_all(tmp_path / "folder"))
    assert (outcome, unintercepted) == ("done", [])
    assert {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()} == CONTENT
    kinds = {kind for kind, _ in calls}
    assert kinds == set(EFFECTS)
    images = power_cut_images({}, log, tmp_path, seed=0)
    expected = {"folder": None, **{f"folder/{name}": content for name, content in CONTENT.items()}}
    assert expected in [image for _, _, image in images.values()]


def test_unintercepted_calls_are_reported(tmp_path):
    real = os.mkdir
    _, _, _, unintercepted = watched_call(tmp_path, lambda: real(tmp_path / "folder"))
    assert len(unintercepted) == 1 and unintercepted[0].startswith("os.mkdir")


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("effect", ["ENOSPC", "EIO", "EROFS"])
def test_error_is_injected_into_every_call(tmp_path, effect):
    _, calls, _, _ = watched_call(tmp_path, lambda: write_all(tmp_path / "folder"))
    for number, (kind, _) in enumerate(calls):
        folder = tmp_path / f"{effect}-{number}"
        folder.mkdir()
        outcome = watched_call(folder, partial(write_all, folder / "folder"), Fault(number, effect))[0]
        assert outcome == effect, (number, kind)


@pytest.mark.parametrize(
    ("effect", "expected"), [("full", "ENOSPC"), ("pause", "ENOSPC"), ("short", "ENOSPC"), ("half", "done")]
)
def test_full_disk_gives_the_expected_outcome(tmp_path, effect, expected):
    """Fill the disk at the large file."""
    _, calls, _, _ = watched_call(tmp_path, lambda: write_all(tmp_path / "folder"))
    number = calls.index(("write", "folder/inner/file"))
    folder = tmp_path / effect
    folder.mkdir()
    outcome, _, _, unintercepted = watched_call(folder, lambda: write_all(folder / "folder"), Fault(number, effect))
    assert (outcome, unintercepted) == (expected, [])
    place = folder / "folder" / ("moved" if effect == "half" else "inner/file")
    assert place.stat().st_size == {"half": 20_000, "short": 10_000}.get(effect, 0)


# -------------------------------------------------------------------- contents of a disk after a power cut
def contents(events, path) -> set:
    """Return the possible contents of a file after a power cut; None if it may be missing."""
    system = FileSystem({})
    for event in events:
        system.apply(*event)
    generator = random.Random(0)
    return {image.get(path) for _ in range(50) for image in system.images(generator)}


NEW = [("create", "part", 0), ("write", 0, 0, b"new")]
OLD = [("create", "name", 9), ("write", 9, 0, b"old"), ("sync", 9), ("sync folder", "")]


RENAME, SYNC = ("rename", "part", "name"), ("sync folder", "")
FOLDER = [
    ("mkdir", "folder"),
    ("create", "folder/file", 0),
    ("write", 0, 0, b"x"),
    ("sync", 0),
    ("sync folder", "folder"),
]


@pytest.mark.parametrize(
    ("events", "path", "some", "all_"),
    [
        pytest.param(NEW, "part", {None, b"", b"new", b"n", b"\0\0\0"}, None, id="unsynced data"),
        pytest.param([*OLD, *NEW, RENAME], "name", {b"old", b"", b"new"}, None, id="rename before content"),
        pytest.param([*OLD, *NEW, ("sync", 0), RENAME], "name", None, {b"old", b"new"}, id="sync before rename"),
        pytest.param([*OLD, *NEW, ("sync", 0), RENAME, SYNC], "name", None, {b"new"}, id="all synced"),
        pytest.param(FOLDER, "folder/file", {None, b"x"}, None, id="unsynced folder"),
        pytest.param([*FOLDER, SYNC], "folder/file", None, {b"x"}, id="synced folder"),
        pytest.param([*OLD, ("truncate", 9, 1)], "name", None, {b"old", b"o"}, id="delayed truncation"),
    ],
)
def test_contents_after_a_power_cut(events, path, some, all_):
    found = contents(events, path)
    assert found >= (some or set()) and all_ in (None, found)


def test_write_image_creates_folders_and_files(tmp_path):
    write_image(tmp_path / "image", {"a/b": b"x", "a": None, "c": b""})
    assert (tmp_path / "image" / "a" / "b").read_bytes() == b"x"
    assert (tmp_path / "image" / "c").read_bytes() == b""
