"""Atomic writes and appends, also on disk errors; test_checkpoint.py kills a process that writes."""

import errno
import os
import stat
from pathlib import Path

import pytest

from tricycle.system.files import append_lines, atomic_write, is_disk_full


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_atomic_write_of_bytes_and_text(tmp_path):
    with atomic_write(tmp_path / "new" / "folder" / "bytes") as file:
        file.write(b"\r\n\xff")
    assert (tmp_path / "new" / "folder" / "bytes").read_bytes() == b"\r\n\xff"
    with atomic_write(str(tmp_path / "text"), text=True) as file:
        file.write("zwölf\n")
    assert (tmp_path / "text").read_bytes() == "zwölf\n".encode()


def test_old_file_is_readable_until_the_block_ends(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path, text=True) as file:
        file.write("new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_file_is_synced_before_the_rename_and_new_folders_after_it(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    path = tmp_path / "a" / "b" / "file"
    with atomic_write(path) as file:
        file.write(b"new")
    inode, a, b = (place.stat().st_ino for place in (path, tmp_path / "a", tmp_path / "a" / "b"))
    assert calls[-3:] == [inode, "replace", b]
    assert {tmp_path.stat().st_ino, a} <= set(calls)


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, function, existed):
    path = tmp_path / "file"
    if existed:
        path.write_bytes(b"old")
    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="No space left") as caught, atomic_write(path) as file:
        file.write(b"new")
    assert caught.value.filename == str(path)
    assert names(tmp_path) == (["file"] if existed else [])
    assert not existed or path.read_bytes() == b"old"


def test_an_error_of_the_folder_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match="No space left") as caught, atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert caught.value.filename == str(tmp_path)


def fail(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_atomic_write_to_a_folder_raises(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), atomic_write(tmp_path / "folder") as file:
        file.write(b"new")
    assert names(tmp_path) == ["folder"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path, umask, mode):
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
def test_atomic_write_rejects_and_keeps_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="expected a file"), atomic_write(tmp_path / name):
        pytest.fail("nothing is to be written")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "link").is_symlink() and (tmp_path / "pipe").is_fifo()


# -------------------------------------------------------------------- lines
def test_append_lines_appends_utf8_lines(tmp_path):
    path = tmp_path / "lines"
    for i in range(3):
        append_lines(path, f"zwölf {i}\nand more\n")
    assert path.read_bytes() == "".join(f"zwölf {i}\nand more\n" for i in range(3)).encode()
    append_lines(path, "")
    assert path.read_text(encoding="utf-8").count("\n") == 6


@pytest.mark.parametrize("length", [0, 1, 3, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("before", ["", "whole\n", "whole\n" * 3000])
def test_incomplete_last_line_is_removed_before_appending(tmp_path, before, length):
    path = tmp_path / "lines"
    path.write_text(before + "x" * length)
    append_lines(path, "new\n")
    assert path.read_text() == before + "new\n"


class Disk:
    """A file that accepts `n_bytes` bytes, at most half of each write, and then raises."""

    def __init__(self, file, n_bytes: int, number: int) -> None:
        self.file, self.left, self.number = file, n_bytes, number

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, content):
        n_taken = min(self.left, -(-len(content) // 2))
        if not n_taken:
            raise OSError(self.number, os.strerror(self.number))
        self.left -= n_taken
        return self.file.write(bytes(content)[:n_taken])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("n_bytes", [0, 1, 7, 100])
def test_append_lines_is_atomic_on_disk_errors(tmp_path, monkeypatch, n_bytes, number):
    path, text, usual = tmp_path / "lines", "new line\n" * 3, Path.open
    path.write_text("old\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda place, *args, **how: Disk(usual(place, *args, **how), n_bytes, number))
        if n_bytes == 100:
            append_lines(path, text)
        else:
            with pytest.raises(OSError) as caught:
                append_lines(path, text)
            assert caught.value.errno == number and caught.value.filename == str(path)
            assert is_disk_full(caught.value) == (number == errno.ENOSPC)
    assert path.read_text() == "old\n" + (text if n_bytes == 100 else "")


# -------------------------------------------------------------------- disk errors
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_folder_sync_errors_are_ignored(tmp_path, monkeypatch, number):
    """Some file systems cannot sync folders, and some folders are writable but not readable."""
    usual = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        usual(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
