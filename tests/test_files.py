"""A file is written whole or not at all, whatever fails and whenever."""

import errno
import os
import signal
import stat
import subprocess
import sys

import pytest

from tricycle.files import atomic_write

POSIX_ONLY = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and permissions")


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_writes_bytes_and_text(tmp_path):
    with atomic_write(tmp_path / "new" / "folder" / "bytes") as file:
        file.write(b"\r\n\xff")
    assert (tmp_path / "new" / "folder" / "bytes").read_bytes() == b"\r\n\xff"
    with atomic_write(str(tmp_path / "text"), text=True) as file:
        file.write("zwölf\n")
    assert (tmp_path / "text").read_bytes() == "zwölf\n".encode()


def test_the_old_file_stands_until_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path, text=True) as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_the_bytes_are_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    with atomic_write(tmp_path / "file") as file:
        file.write(b"x")
    assert order[:2] == ["fsync", "replace"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, function, existed):
    path = tmp_path / "file"
    if existed:
        path.write_bytes(b"old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, function, full)
    with pytest.raises(OSError, match="No space left"), atomic_write(path) as file:
        file.write(b"new")
    assert names(tmp_path) == (["file"] if existed else [])
    assert not existed or path.read_bytes() == b"old"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_folder_in_the_place_is_an_error(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), atomic_write(tmp_path / "folder") as file:
        file.write(b"new")
    assert names(tmp_path) == ["folder"]


@POSIX_ONLY
def test_kill_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    program = """
import os, signal, sys
from tricycle.files import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write(b"new" * 100_000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    with atomic_write(path) as file:
        file.write(b"newer")
    assert path.read_bytes() == b"newer"


@POSIX_ONLY
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_are_those_of_any_new_file(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with atomic_write(tmp_path / "file") as file:
            file.write(b"x")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Unix alone has named pipes")
@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_keeps_its_name(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="expected a file or nothing of that name"), atomic_write(tmp_path / name):
        pytest.fail("nothing is to be written")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "link").is_symlink() and (tmp_path / "pipe").is_fifo()
