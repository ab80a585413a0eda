"""Folder locks: exclusive, with the holder in the message, and released when the holder dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from tricycle.system import locks
from tricycle.system.locks import FolderLock, LockedError

HOLD = """
import sys, time
from tricycle.system.locks import FolderLock, lock_file
from tricycle.system import locks
if sys.argv[2] == "none":
    locks.lock_file = lambda handle: None
with FolderLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["system", "none"])
def kind(request, monkeypatch):
    """System locks, and a file system without locks."""
    if request.param == "none":
        monkeypatch.setattr(locks, "lock_file", lambda handle: None)
    return request.param


@pytest.fixture
def holder(tmp_path, kind):
    """Start another process that holds the lock until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run"), kind], stdout=subprocess.PIPE)
    assert process.stdout.readline().strip() == b"held"
    yield process
    process.kill()
    process.communicate()


def test_lock_names_its_owner_and_is_released_after_the_block(tmp_path, kind):
    folder = tmp_path / "run"
    with FolderLock(folder) as lock:
        holder = json.loads(lock.path.read_text())
        assert holder["pid"] == os.getpid()
        assert holder["host"] == socket.gethostname()
        (folder / "config.json").touch()
        with pytest.raises(LockedError, match=f"process {os.getpid()} on {re.escape(socket.gethostname())} since 20"):
            FolderLock(folder).__enter__()
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_unlock_removes_the_empty_folder_that_the_lock_created(tmp_path, kind):
    with pytest.raises(ZeroDivisionError), FolderLock(tmp_path / "a" / "run"):
        raise ZeroDivisionError
    assert not (tmp_path / "a" / "run").exists()
    (tmp_path / "empty").mkdir()
    with FolderLock(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()  # it existed before


def test_lock_error_names_the_process_and_kill_releases_the_lock(tmp_path, holder):
    for number in (None, signal.SIGSTOP) if os.name == "posix" else (None,):  # a suspended process keeps its lock
        if number is not None:
            holder.send_signal(number)
        with pytest.raises(LockedError, match=f"process {holder.pid} on "):
            FolderLock(tmp_path / "run").__enter__()
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / locks.LOCK_NAME).exists()
    with FolderLock(tmp_path / "run") as lock:
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    assert not lock.path.exists()


def test_wait_blocks_until_the_lock_is_released(tmp_path, holder):
    threading.Timer(0.3, holder.kill).start()
    started = time.monotonic()
    threading.Timer(0.4, holder.wait).start()
    with FolderLock(tmp_path / "run", wait=True):
        assert 0.2 < time.monotonic() - started < 10


def write_lock(folder, **changes) -> None:
    folder.mkdir(exist_ok=True)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": "2026-01-01", "began": "another time"}
    (folder / locks.LOCK_NAME).write_text(json.dumps({**owner, **changes}))


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads process start times from /proc")
def test_reused_process_id_does_not_keep_the_lock(tmp_path, kind):
    write_lock(tmp_path / "run")
    FolderLock(tmp_path / "run").__enter__()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": "1"}', '{"pid": -1}', "[" * 100_000, "\ud800"])
def test_invalid_lock_file_is_ignored_with_system_locks(tmp_path, text):
    (tmp_path / locks.LOCK_NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
    FolderLock(tmp_path).__enter__()


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"pid": "x"}, {"pid": 0}, {"pid": -1}])
def test_without_system_locks_owners_count_as_alive_unless_proven_dead(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(locks, "lock_file", lambda handle: None)
    write_lock(tmp_path, **changes)
    with pytest.raises(LockedError, match=r"remove .*\.lock|process"):
        FolderLock(tmp_path).__enter__()


def test_owner_that_exits_while_locking_leaves_no_stale_lock(tmp_path, kind, monkeypatch):
    write_lock(tmp_path, host="elsewhere")
    opened = os.open

    def open_slowly(path, flags, *mode):
        if path == tmp_path / locks.LOCK_NAME and not flags & os.O_EXCL:
            path.unlink(missing_ok=True)
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_slowly)
    with FolderLock(tmp_path) as lock:
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()


def test_only_one_of_concurrent_threads_holds_the_lock(tmp_path, kind):
    """Threads behave like processes here: each opens the file itself."""
    write_lock(tmp_path / "run", pid=2**22 + 1)  # a process that has exited
    holders, n_holders, rejections = [], [], []

    def work(_) -> None:
        try:
            with FolderLock(tmp_path / "run"):
                holders.append(1)
                n_holders.append(len(holders))
                time.sleep(0.0005)
                holders.pop()
        except LockedError:
            rejections.append(1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(80)))
    assert set(n_holders) == {1}
    assert rejections


@pytest.mark.parametrize("refused", [False, True])
def test_windows_locks_one_byte_with_msvcrt(tmp_path, monkeypatch, refused):
    """One byte far past the text is locked with msvcrt, which replaces fcntl on Windows."""
    calls = []

    def locking(handle, how, n_bytes):
        calls.append((os.lseek(handle, 0, os.SEEK_CUR), how, n_bytes))
        if refused:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.setattr(sys, "platform", "win32")
    if refused:
        with pytest.raises(LockedError):
            FolderLock(tmp_path).__enter__()
    else:
        with FolderLock(tmp_path) as lock:
            assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    assert calls == [(locks.LOCKED_BYTE, 2, 1)]
