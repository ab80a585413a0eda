"""A sample of the disks that fail, and of the power cuts; and that the wrapper and its disks are what they should be.

All of it: python -m tests.chaos.disks --seed 0
"""

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tricycle.system.files import append_lines, atomic_write

from .disks import Disk, Fault, FileSystem, answer_of, cuts, in_child, write_image
from .runs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, files known by /proc")


def watched(folder: Path, act, fault: Fault | None = None):
    """Do something in a process whose calls are counted: how it ended, the calls and the log."""

    def child():
        disk = Disk(folder, fault, record=True)
        disk.install()
        try:
            outcome = act()
        except OSError as error:
            outcome = errno.errorcode[error.errno]
        return outcome, disk.calls, disk.log, disk.unseen

    answer = answer_of(in_child(child))
    assert isinstance(answer, tuple), answer
    return answer


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sample_of_everything(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.chaos.disks", "--short", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 lost") == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif("TRICYCLE_LONG" not in os.environ, reason="takes a quarter of an hour: TRICYCLE_LONG=1 runs it")
def test_everything():
    command = [sys.executable, "-m", "tests.chaos.disks", "--seed", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------- the wrapper
def write_all(folder: Path):
    """All ways in which a program may write."""
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


def test_it_sees_every_call_and_changes_nothing(tmp_path):
    outcome, calls, log, unseen = watched(tmp_path, lambda: write_all(tmp_path / "folder"))
    assert (outcome, unseen) == ("done", [])
    assert {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()} == CONTENT
    kinds = {kind for kind, _ in calls}
    names = "create open write truncate sync close rename mkdir unlink rmdir"
    assert kinds == {*names.split(), "sync folder"}
    images = cuts({}, log, tmp_path, seed=0)
    expected = {"folder": None, **{f"folder/{name}": content for name, content in CONTENT.items()}}
    assert expected in [image for _, _, image in images.values()]


def test_unseen_calls_are_reported(tmp_path):
    real = os.mkdir
    _, _, _, unseen = watched(tmp_path, lambda: real(tmp_path / "folder"))
    assert len(unseen) == 1 and unseen[0].startswith("os.mkdir")


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("way", ["ENOSPC", "EIO", "EROFS"])
def test_every_call_can_fail(tmp_path, way):
    _, calls, _, _ = watched(tmp_path, lambda: write_all(tmp_path / "folder"))
    for number, (kind, _) in enumerate(calls):
        folder = tmp_path / f"{way}-{number}"
        folder.mkdir()
        outcome, _, _, _ = watched(folder, lambda folder=folder: write_all(folder / "folder"), Fault(number, way))
        assert outcome == way, (number, kind)


@pytest.mark.parametrize(
    ("way", "expected"), [("full", "ENOSPC"), ("pause", "ENOSPC"), ("short", "ENOSPC"), ("half", "done")]
)
def test_a_disk_that_fills_up(tmp_path, way, expected):
    """At the large file."""
    _, calls, _, _ = watched(tmp_path, lambda: write_all(tmp_path / "folder"))
    number = calls.index(("write", "folder/inner/file"))
    folder = tmp_path / way
    folder.mkdir()
    outcome, _, _, unseen = watched(folder, lambda: write_all(folder / "folder"), Fault(number, way))
    assert (outcome, unseen) == (expected, [])
    place = folder / "folder" / ("moved" if way == "half" else "inner/file")
    assert place.stat().st_size == {"half": 20_000, "short": 10_000}.get(way, 0)


# -------------------------------------------------------------------- disks after a power cut
def contents(events, path, seed: int = 0) -> set:
    """What the file of a name may hold at the end; None where it may not be there."""
    system = FileSystem({})
    for event in events:
        system.apply(*event)
    generator = random.Random(seed)
    return {image.get(path) for _ in range(50) for image in system.images(generator)}


NEW = [("create", "part", 0), ("write", 0, 0, b"new")]
OLD = [("create", "name", 9), ("write", 9, 0, b"old"), ("sync", 9), ("sync folder", "")]


def test_unsynced_data_may_exist_or_not():
    assert contents(NEW, "part") >= {None, b"", b"new", b"n", b"\0\0\0"}


def test_a_name_may_get_there_before_the_content():
    assert contents([*OLD, *NEW, ("rename", "part", "name")], "name") >= {b"old", b"", b"new"}


def test_with_a_sync_before_the_rename_there_is_the_old_file_or_the_new_one():
    events = [*OLD, *NEW, ("sync", 0), ("rename", "part", "name")]
    assert contents(events, "name") == {b"old", b"new"}
    assert contents([*events, ("sync folder", "")], "name") == {b"new"}


def test_a_folder_that_was_not_synced_may_be_gone_with_all_that_is_in_it():
    events = [("mkdir", "folder"), ("create", "folder/file", 0), ("write", 0, 0, b"x"), ("sync", 0)]
    assert contents([*events, ("sync folder", "folder")], "folder/file") >= {None, b"x"}
    assert contents([*events, ("sync folder", "folder"), ("sync folder", "")], "folder/file") == {b"x"}


def test_truncation_may_come_late():
    assert contents([*OLD, ("truncate", 9, 1)], "name") == {b"old", b"o"}


def test_images_are_laid_out_as_they_are(tmp_path):
    write_image(tmp_path / "image", {"a/b": b"x", "a": None, "c": b""})
    assert (tmp_path / "image" / "a" / "b").read_bytes() == b"x"
    assert (tmp_path / "image" / "c").read_bytes() == b""
