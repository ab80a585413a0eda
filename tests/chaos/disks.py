"""Disk faults and power cuts: inject a fault into every writing call of a training run, and cut power after each.

python -m tests.chaos.disks --seed 0      all trials, about 15 minutes on two cores
python -m tests.chaos.disks --short       a sample of the trials

1. Faults. The writing calls of a run (open, write, sync, rename, ...) are counted. Then the run is repeated for each
   call and each kind of fault. Each run must exit with status 0, or with 1 and one line, leave undamaged files, and
   give the results of an uninterrupted run after it is resumed.
2. Power cuts. The calls are recorded with their data. For each prefix of the calls, possible disk contents are written
   to new folders: data that was not synced may be complete, missing or partial, and names may change in another order
   (Pillai et al. 2014, "All File Systems Are Not Created Equal", section 3). From each of them a resumed run must give
   the same results, and no saved checkpoint may be lost.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import importlib
import importlib.util
import io
import json
import math
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, partialmethod
from itertools import count
from pathlib import Path
from typing import Any

from tricycle.checkpoint import load_checkpoint
from tricycle.system.files import atomic_write

from .runs import Outcome, TrainingRun, Workspace, differences, new_parser

# The faults of each kind of call.
ERRORS = ("ENOSPC", "EIO", "EROFS")
EFFECTS = {
    "create": ERRORS,
    "open": ERRORS,
    "write": (*ERRORS, "short", "half"),
    "truncate": ("EIO", "EROFS"),
    "sync": ("EIO", "ENOSPC"),
    "sync folder": ("EIO",),
    "rename": ERRORS,
    "mkdir": ERRORS,
    "unlink": ("EIO", "EROFS"),
    "rmdir": ("EIO",),
    "close": ("EIO", "ENOSPC"),
}
ALLOCATING_CALLS = ("create", "write", "mkdir")
HANDLE_CALLS = ("write", "sync", "sync folder", "close")  # whose errors name no file
N_PAUSED_CALLS = 3  # calls that fail before there is space again
IMPORTED = (
    "matplotlib.backends.backend_agg matplotlib.figure tqdm tyro tricycle_cli.train tricycle_datasets.text".split()
)
# A small checkpoint is written in few calls.
SMALL = "--embedding-dim 8 --n-layers 1 --n-heads 1 --vocab-size 272 --context-window 16 --eval-batches 2".split()
MAX_BUFFERED_LINES = 3  # of metrics, so that a short run writes them before its end, too


@dataclass(frozen=True)
class Fault:
    """A fault of one call, counted from 0.

    Attributes:
        effect: the name of an error; "short": half is written, then the disk is full; "half": half is written, without
            an error; "full": the disk is full from this call on; "pause": it is full for some calls.
    """

    call: int
    effect: str


# -------------------------------------------------------------------- the wrapper
class FaultInjector:
    """Counts and records the calls of this process that write below a folder, and makes one of them fail.

    Attributes:
        calls: (kind, path) of each, the path from the folder.
        log: each call with its data, for `FileSystem`.
        unintercepted: audit events of writes in the folder that bypassed this wrapper.
    """

    def __init__(self, folder: Path, fault: Fault | None = None, record: bool = False) -> None:
        self.folder, self.fault, self.record = os.path.realpath(folder), fault, record
        self.calls: list[tuple[str, str]] = []
        self.log: list[tuple[Any, ...]] = []
        self.unintercepted: list[str] = []
        self._inside = False
        self._cut: set[int] = set()  # files whose next write fails with ENOSPC
        self._inodes: dict[str, int] = {}
        self._files: dict[int, int] = {}  # file descriptors and their inodes
        self._next = 0

    def install(self) -> None:
        """Replace the functions of `os` and `io` for the rest of this process."""
        self._originals = {name: getattr(os, name) for name in OS_CALLS}
        self._open = io.open
        for place in sorted(Path(self.folder).rglob("*")):
            if place.is_file():
                self._new_inode(str(place))
        builtins.open = io.open = self._io_open  # type: ignore[assignment]
        for name in OS_CALLS:
            setattr(os, name, getattr(self, f"_os_{name}"))
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._inside or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        reads = event == "open" and not (isinstance(args[2], int) and args[2] & WRITING)
        if not reads and isinstance(args[0], (str, os.PathLike)) and self._watches(args[0]):
            self.unintercepted.append(f"{event} {args[0]}\n{''.join(traceback.format_stack()[-6:])}")

    def _watches(self, path: Any, dir_fd: int | None = None) -> bool:
        return self._path(path, dir_fd).startswith(self.folder + os.sep)

    def _path(self, path: Any, dir_fd: int | None = None) -> str:
        name = os.fsdecode(path)
        if dir_fd is not None:
            name = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), name)
        return os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(name))), os.path.basename(name))

    def _new_inode(self, path: str) -> int:
        self._inodes[path] = self._next
        self._next += 1
        return self._inodes[path]

    def call(self, kind: str, path: str, action: Callable[[], Any], *event: Any) -> Any:
        """Count and log a call, and run it unless it must fail."""
        number = len(self.calls)
        self.calls.append((kind, os.path.relpath(path, self.folder)))
        if kind != "close":  # which closes a file even if it raises an error
            self._fail(kind, number, path)
        before, self._inside = self._inside, True
        try:
            result = action()
        finally:
            self._inside = before
        if kind == "close":
            self._fail(kind, number, path)
        if self.record and event:
            self.log.append(event)
        return result

    def _fail(self, kind: str, number: int, path: str) -> None:
        fault = self.fault
        if fault is None or number < fault.call:
            return
        lasting = fault.effect == "full" or (fault.effect == "pause" and number < fault.call + N_PAUSED_CALLS)
        name = "ENOSPC" if lasting and kind in ALLOCATING_CALLS else fault.effect if number == fault.call else ""
        if hasattr(errno, name):
            value = getattr(errno, name)
            raise OSError(value, os.strerror(value), *([] if kind in HANDLE_CALLS else [path]))

    # ---------------------------------------------------------------- files
    def _io_open(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **how: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or not self._watches(file):
            return self._open(file, mode, buffering, *args, **how)
        raw = _Raw(self, self._path(file), mode)
        if buffering == 0:
            return raw
        buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)  # type: ignore[arg-type]
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *args, **how)

    def open_file(self, path: str, mode: str, action: Callable[[], Any]) -> int:
        """Open a file with `action`, and return its inode."""
        if not os.path.exists(path):
            self.call("create", path, action, "create", path, self._next)
            return self._new_inode(path)
        inode = self._inodes[path]
        self.call("open", path, action, *(("truncate", inode, 0) if "w" in mode else ()))
        return inode

    def write_data(self, path: str, inode: int, offset: int, data: bytes, action: Callable[[bytes], int]) -> int:
        """Write with `action`, and return the number of written bytes."""
        fault, number = self.fault, len(self.calls)
        if inode in self._cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault is not None and fault.call == number and fault.effect in ("short", "half") and len(data) > 1:
            data = data[: len(data) // 2]
            if fault.effect == "short":
                self._cut.add(inode)
        return int(self.call("write", path, lambda: action(data), "write", inode, offset, data))

    # ---------------------------------------------------------------- system calls
    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        kept: list[int] = []
        action = lambda: kept.append(self._originals["open"](path, flags, mode, dir_fd=dir_fd))
        if flags & WRITING and self._watches(path, dir_fd):
            inode = self.open_file(self._path(path, dir_fd), "w" if flags & os.O_TRUNC else "a", action)
            self._files[kept[0]] = inode
        else:
            action()
        return kept[0]

    def _os_write(self, handle: int, data: bytes) -> int:
        original = self._originals["write"]
        if handle not in self._files:
            return int(original(handle, data))
        offset = os.lseek(handle, 0, os.SEEK_CUR)
        path = os.readlink(f"/proc/self/fd/{handle}")
        return self.write_data(path, self._files[handle], offset, bytes(data), lambda part: original(handle, part))

    def _os_ftruncate(self, handle: int, size: int) -> None:
        original = self._originals["ftruncate"]
        if handle not in self._files:
            return original(handle, size)
        path = os.readlink(f"/proc/self/fd/{handle}")
        return self.call("truncate", path, lambda: original(handle, size), "truncate", self._files[handle], size)

    def _os_close(self, handle: int) -> None:
        original = self._originals["close"]
        if handle not in self._files:
            return original(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        del self._files[handle]
        return self.call("close", path, lambda: original(handle))

    def _os_fsync(self, handle: int) -> None:
        original = self._originals["fsync"]
        path = os.readlink(f"/proc/self/fd/{handle}")
        if not (path + os.sep).startswith(self.folder + os.sep):
            return original(handle)
        if os.path.isdir(path):  # not synced really, because that takes time and has no effect on the test
            return self.call("sync folder", path, lambda: None, "sync folder", path)
        return self.call("sync", path, lambda: None, "sync", self._inodes[path])

    def _os_truncate(self, path: Any, size: int) -> None:
        original = self._originals["truncate"]
        if not self._watches(path):
            return original(path, size)
        place = self._path(path)
        return self.call("truncate", place, lambda: original(path, size), "truncate", self._inodes[place], size)

    def _rename_with(self, name: str, src: Any, dst: Any) -> None:
        original = self._originals[name]
        if not self._watches(dst):
            original(src, dst)
            return
        a, b = self._path(src), self._path(dst)
        self.call("rename", b, lambda: original(src, dst), "rename", a, b)
        self._inodes[b] = self._inodes.pop(a)

    _os_replace = partialmethod(_rename_with, "replace")
    _os_rename = partialmethod(_rename_with, "rename")

    def _remove_with(self, name: str, kind: str, path: Any, *, dir_fd: int | None = None) -> None:
        original = self._originals[name]
        if not self._watches(path, dir_fd):
            original(path, dir_fd=dir_fd)
            return
        place = self._path(path, dir_fd)
        event = (kind, place) if os.path.lexists(place) else ()  # a missing file raises an error itself
        self.call(kind, place, lambda: original(path, dir_fd=dir_fd), *event)
        self._inodes.pop(place, None)

    _os_unlink = partialmethod(_remove_with, "unlink", "unlink")
    _os_remove = partialmethod(_remove_with, "remove", "unlink")
    _os_rmdir = partialmethod(_remove_with, "rmdir", "rmdir")

    def _os_mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        original = self._originals["mkdir"]
        if not self._watches(path, dir_fd):
            return original(path, mode, dir_fd=dir_fd)
        place = self._path(path, dir_fd)
        if os.path.isdir(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return self.call("mkdir", place, lambda: original(path, mode, dir_fd=dir_fd), "mkdir", place)


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OS_CALLS = "open write ftruncate close fsync truncate replace rename unlink remove rmdir mkdir".split()


class _Raw(io.FileIO):
    """An open file below the watched folder."""

    def __init__(self, disk: FaultInjector, path: str, mode: str) -> None:
        self.disk, self.path = disk, path
        self.appends = "a" in mode
        bare = mode.replace("b", "").replace("t", "")
        self.inode = disk.open_file(path, bare, lambda: super(_Raw, self).__init__(path, bare))

    def write(self, data: Any) -> int:  # type: ignore[override]
        offset = os.fstat(self.fileno()).st_size if self.appends else self.tell()
        return self.disk.write_data(self.path, self.inode, offset, bytes(data), super().write)

    def truncate(self, size: int | None = None) -> int:
        end = self.tell() if size is None else size
        original = super().truncate
        return int(self.disk.call("truncate", self.path, lambda: original(end), "truncate", self.inode, end))

    def close(self) -> None:
        if not self.closed:
            self.disk.call("close", self.path, super().close)


# -------------------------------------------------------------------- possible contents of a disk after a power cut
Image = dict[str, bytes | None]  # by path from the folder: a file's content, or None for a folder


class FileSystem:
    """The state of a file system after a log of calls, and its durable part.

    Attributes:
        names, durable: paths of files and folders with their inodes, as a program sees them and as a disk holds them at
            least; folders have the inode -1.
        pending: changes of names that no sync of their folder has made durable.
        data, synced: the files' contents, likewise.
        writes: for each file, what was done to it since its last sync.
        step: of the latest checkpoint that was saved.
    """

    def __init__(self, start: Image) -> None:
        files = sorted((path for path, content in start.items() if content is not None), key=Path)
        self.names = dict.fromkeys(start, -1) | {path: inode for inode, path in enumerate(files)}
        self.data = {inode: start[path] or b"" for inode, path in enumerate(files)}
        self.durable, self.synced = dict(self.names), dict(self.data)
        self.pending: list[tuple[Any, ...]] = []
        self.writes: dict[int, list[tuple[Any, ...]]] = {}
        self.step = -1

    def apply(self, kind: str, *args: Any) -> None:
        """Apply an entry of the log, with paths relative to the folder."""
        if kind in ("write", "truncate"):
            inode = args[0]
            self.data[inode] = _apply_writes(self.data[inode], [(kind, *args[1:])])
            self.writes.setdefault(inode, []).append((kind, *args[1:]))
        elif kind == "sync":
            self.synced[args[0]] = self.data[args[0]]
            self.writes.pop(args[0], None)
        elif kind == "sync folder":
            for change in [change for change in self.pending if args[0] in _folders_of(change)]:
                _rename(self.durable, change)
                self.pending.remove(change)
        elif kind == "saved":
            self.step = args[0]
        else:
            change = (kind, *args, self.names.get(args[0], -1)) if kind == "rename" else (kind, *args)
            if kind == "create":
                self.data[args[1]] = self.synced[args[1]] = b""
            _rename(self.names, change)
            self.pending.append(change)

    def images(self, generator: random.Random) -> Iterator[Image]:
        """Yield possible contents of the disk after a power cut now."""
        written = sorted(self.writes.items())
        halves = {i: _torn(self.synced[i], writes, generator) for i, writes in written}
        holes = {
            i: _apply_writes(self.synced[i], [write for write in writes if generator.random() < 0.5])
            for i, writes in written
        }
        zeros = {i: self.synced[i].ljust(len(self.data[i]), b"\0") for i, _ in written}
        yield _image(self.names, self.data)
        yield _image(self.durable, self.synced)
        yield _image(self.durable, self.data)
        yield _image(self.names, self.synced)
        for some in (halves, holes, zeros):
            yield _image(self.names, {**self.synced, **some})
        for _ in range(3):
            names = dict(self.durable)
            for change in self.pending:
                if generator.random() < 0.5:
                    _rename(names, change)
            yield _image(names, generator.choice([self.synced, self.data, {**self.synced, **halves}]))


Writes = Sequence[tuple[Any, ...]]


def _apply_writes(content: bytes, writes: Writes) -> bytes:
    for kind, first, *rest in writes:
        if kind == "truncate":
            content = content[:first].ljust(first, b"\0")
        else:
            content = content[:first].ljust(first, b"\0") + rest[0] + content[first + len(rest[0]) :]
    return content


def _torn(content: bytes, writes: Writes, generator: random.Random) -> bytes:
    """Return the content of a file after a prefix of its writes, of which the last is partial."""
    *whole, (kind, *args) = writes[: generator.randint(1, len(writes))]
    if kind == "write":
        args[1] = args[1][: generator.randrange(len(args[1]) + 1)]
    return _apply_writes(content, [*whole, (kind, *args)])


def _folders_of(change: tuple[Any, ...]) -> set[str]:
    """Return the folders whose entries a change modifies."""
    return {os.path.dirname(path) for path in change[1:] if isinstance(path, str)}


def _rename(names: dict[str, int], change: tuple[Any, ...]) -> None:
    kind, path, *rest = change
    if kind == "create":
        names[path] = rest[0]
    elif kind == "mkdir":
        names[path] = -1
    else:
        names.pop(path, None)
    if kind == "rename":
        names[rest[0]] = rest[1]


def _image(names: dict[str, int], data: dict[int, bytes]) -> Image:
    image: Image = {}
    for path in sorted(names, key=len):
        parent = os.path.dirname(path)
        if parent and image.get(parent, b"") is not None:
            continue  # the folder itself was not written
        image[path] = None if names[path] < 0 else data[names[path]]
    return image


def read_image(folder: Path) -> Image:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in paths}


def write_image(folder: Path, image: Image) -> None:
    folder.mkdir(parents=True)
    for path in sorted(image, key=len):
        content = image[path]
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).write_bytes(content)


def _relative(event: tuple[Any, ...], folder: str) -> tuple[Any, ...]:
    """Return an entry of the log with paths relative to the folder, which is ""."""
    return tuple(
        "" if part == folder else part.removeprefix(folder + os.sep) if i and isinstance(part, str) else part
        for i, part in enumerate(event)
    )


def power_cut_images(
    start: Image, log: Sequence[tuple[Any, ...]], folder: Path, seed: int
) -> dict[bytes, tuple[int, int, Image]]:
    """Return all distinct disk contents: the number of calls, the step of the last saved checkpoint, and the image."""
    generator = random.Random(seed)
    system = FileSystem(start)
    hash_of = cache(lambda content: hashlib.sha256(content).digest())
    images: dict[bytes, tuple[int, int, Image]] = {}
    for number, event in enumerate([("saved", -1), *log]):
        system.apply(*_relative(event, os.path.realpath(folder)))
        for image in system.images(generator):
            digest = hashlib.sha256(str(system.step).encode())
            for path in sorted(image):
                content = image[path]
                digest.update(path.encode() + (b"/" if content is None else hash_of(content)))
            images.setdefault(digest.digest(), (number, system.step, image))
    return images


# -------------------------------------------------------------------- programs in forked processes
def fork_task(action: Callable[[], Any]) -> tuple[int, int]:
    """Run a function in a forked process; return the process id, and the file descriptor of the pickled result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    try:
        answer = action()
    except BaseException:
        answer = traceback.format_exc()
    with os.fdopen(writing, "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)


def wait_for_result(child: tuple[int, int]) -> Any:
    with os.fdopen(child[1], "rb") as file:
        content = file.read()
    os.waitpid(child[0], 0)
    return pickle.loads(content) if content else "the process exited without a result"


def run_in_processes(tasks: Sequence[Callable[[], Any]], n_jobs: int, on_progress: Callable[[int], None]) -> list[Any]:
    """Return the results of all tasks, which run in at most `n_jobs` processes at a time."""
    answers: list[Any] = []
    running: list[tuple[int, int]] = []
    for task in tasks:
        if len(running) == n_jobs:
            answers.append(wait_for_result(running.pop(0)))
            on_progress(len(answers))
        running.append(fork_task(task))
    return answers + [wait_for_result(child) for child in running]


def train_in_child(
    case: TrainingRun, words: Sequence[str], disk: FaultInjector | None = None, keep: Path | None = None
) -> Outcome:
    """Run training with these flags in a forked process, and return the outcome.

    Args:
        keep: file for the calls, the log and the unintercepted events.
    """
    case.folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp())

    def action() -> None:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), number)
        status: Any = 70
        try:
            status = _run(case, words, disk)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        (place / "status").write_text(str(status))
        if keep is not None and disk is not None:
            keep.write_bytes(pickle.dumps((disk.calls, disk.log, disk.unintercepted)))
        os._exit(0)

    wait_for_result(fork_task(action))
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in place.iterdir()}
    shutil.rmtree(place)
    return Outcome(int(texts["status"]) if "status" in texts else None, texts["out"], texts["err"])


def _run(case: TrainingRun, words: Sequence[str], disk: FaultInjector | None) -> int:
    from tricycle.training_state import TrainingState
    from tricycle_cli import full_disk, run
    from tricycle_cli.flags import run_main
    from tricycle_cli.train import main

    os.environ.update(case.environment(), TRICYCLE_TUNE_HOST="0")
    sys.argv = ["train_smol_gpt.py", *words]
    run.MAX_BUFFERED_LINES, full_disk.MAX_RETRY_SECONDS = MAX_BUFFERED_LINES, 0.01
    run.MAX_BUFFERED_SECONDS = math.inf  # the calls must not depend on the time
    make_fast_and_deterministic()
    if disk is not None:
        original = TrainingState.save

        def save(state: TrainingState, path: Path, tokeniser: Any, *memory: Any) -> None:
            original(state, path, tokeniser, *memory)
            if path.name == "last.safetensors":
                disk.log.append(("saved", state.step))

        TrainingState.save = save  # type: ignore[method-assign]
        disk.install()
    try:
        run_main(lambda: main(list(words)))
    except SystemExit as leaving:
        return int(leaving.code or 0)


def make_fast_and_deterministic() -> None:
    """Disable syncing and plots, and replace clocks by counters, for the rest of this process."""
    from tricycle_cli import text_task

    def draw(metrics: Any, path: Path, *rest: Any, **settings: Any) -> Path:
        losses = [line.get("loss", line.get("held_out_loss")) for line in metrics]
        with atomic_write(path) as file:
            file.write(json.dumps(losses).encode())
        return path

    ticks = count()
    os.fsync = lambda handle: None
    time.perf_counter = time.monotonic = lambda: next(ticks) / 1000  # type: ignore[assignment]
    text_task.plot_losses = draw
    text_task.compressor_bits_per_byte = lambda content: {}


def resume_or_restart(case: TrainingRun) -> Outcome:
    """Resume a run as a user would, or start it again if the program tells them to."""
    done = train_in_child(case, case.resume_args)
    if done.status and "start again without --resume" in done.err:
        return train_in_child(case, case.start_args)
    return done


# -------------------------------------------------------------------- trials
@dataclass(frozen=True)
class Setup:
    """The reference run and the initial state of the trials.

    Attributes:
        reference: an uninterrupted run.
        interrupted: the content of the folder of a killed run.
    """

    workspace: Workspace
    reference: TrainingRun
    interrupted: Image

    def trial(self, name: str) -> TrainingRun:
        return self.workspace.new_run(name, *SMALL)


def new_setup(folder: Path) -> Setup:
    """Make the reference run and the killed run.

    Raises:
        RuntimeError: the reference run fails.
    """
    workspace = Workspace(folder)
    reference = workspace.new_run("reference", *SMALL)
    done = train_in_child(reference, reference.start_args)
    if done.status != 0:
        raise RuntimeError(f"the reference run failed: {done.err}")
    killed = workspace.new_run("killed", *SMALL)
    process = killed.start(prelude=KILLED)
    process.communicate()
    interrupted = read_image(killed.folder)
    killed.remove()
    return Setup(workspace, reference, interrupted)


# Kills the run after a sample, with metrics lines that the resumed run must discard.
KILLED = """
import signal
from tricycle_cli import run, updates
run.MAX_BUFFERED_LINES = 1
original = updates.RunSession.batches
def batches(session, source):
    if session.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(session, source)
updates.RunSession.batches = batches
"""


def record_calls(setup: Setup, resumed: bool, record: bool = False) -> tuple[TrainingRun, Image, list[Any], list[Any]]:
    """Record the writing calls of a run; return its folder, the initial image, the calls and the log.

    Raises:
        RuntimeError: the run fails, or some of its writes are not intercepted.
    """
    case = setup.trial(f"watched-{resumed}")
    case.remove()
    start = setup.interrupted if resumed else {}
    write_image(case.folder, start)
    keep = setup.workspace.folder / "watched.pkl"
    disk = FaultInjector(case.folder, record=record)
    done = train_in_child(case, case.resume_args if resumed else case.start_args, disk, keep)
    calls, log, unintercepted = pickle.loads(keep.read_bytes())
    found = differences(case.run_folder, setup.reference.run_folder)
    problems = [*unintercepted, *found] if done.status == 0 else [done.err]
    case.remove()
    if problems:
        raise RuntimeError(f"the recorded run failed: {problems}")
    return case, start, calls, log


@dataclass
class Result:
    """The outcome of a trial.

    Attributes:
        end: a short description.
        problems: descriptions of all failed checks.
        new: whether no earlier trial left an equal folder.
    """

    name: str
    end: str
    problems: list[str] = field(default_factory=list)
    new: bool = True


def run_fault_trial(setup: Setup, fault: Fault, resumed: bool, policy: str) -> Result:
    """Make one call fail, check the exit and the files, and compare the resumed run with the reference."""
    name = f"{'resumed' if resumed else 'begun'}-{policy}-{fault.call}-{fault.effect}"
    case = setup.trial(name)
    write_image(case.folder, setup.interrupted if resumed else {})
    words = [*(case.resume_args if resumed else case.start_args), "--on-full-disk", policy]
    done = train_in_child(case, words, FaultInjector(case.folder, fault))
    result = Result(name, {0: "continued", 1: "stopped"}.get(done.status or 0, str(done.status)))
    if done.status not in (0, 1) or "Traceback" in done.err or len(done.error_lines) != done.status:
        result.problems.append(f"ended with status {done.status}: {done.err[-2000:]}")
    if done.status == 1 and str(case.folder) not in done.err:
        result.problems.append(f"names no file: {done.err}")
    result.problems += find_damage(case.run_folder)
    with contextlib.suppress(OSError):
        (case.run_folder / ".lock").unlink()  # of the exited process, which could not remove it
    if done.status == 0 and (case.run_folder / "loss.png").exists():
        found = differences(case.run_folder, setup.reference.run_folder)
        result.problems += [f"at once: {difference}" for difference in found]
    return resume_and_compare(setup, case, result)


def resume_and_compare(setup: Setup, case: TrainingRun, result: Result) -> Result:
    """Resume a run to its end, and compare it with the reference; only once for equal folders.

    Temporary files are removed without being read, so of their content only its existence is compared.
    """
    digest = hashlib.sha256()
    for path, content in read_image(case.folder).items():
        unread = path.endswith(".part") or ".build-" in path
        digest.update(re.sub(r"\d+-\d+\.part$|(?<=\.build-)\w+", "", path).encode())
        digest.update(b"/" if content is None else b":" + hashlib.sha256(content[:1] if unread else content).digest())
    try:
        (setup.workspace.folder / f"seen-{digest.hexdigest()}").touch(exist_ok=False)
    except FileExistsError:
        result.new = False
    else:
        done = resume_or_restart(case)
        if done.status != 0:
            result.problems.append(f"could not be resumed: {done.err[-2000:]}")
        else:
            result.problems += differences(case.run_folder, setup.reference.run_folder)
    if not result.problems:
        case.remove()
    return result


def find_damage(run: Path) -> list[str]:
    """Return the damaged files of a run folder: incomplete checkpoints, JSON files and lines."""
    problems = []
    for path in sorted(run.glob("*")) if run.exists() else []:
        try:
            if path.suffix == ".safetensors":
                load_checkpoint(path)
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".jsonl":
                _ = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except ValueError as error:
            problems.append(f"{path.name}: {error}")
    return problems


def run_power_cut_trial(setup: Setup, number: int, step: int, image: Image, title: str) -> Result:
    """Check that the last checkpoint survived a power cut, and compare the resumed run with the reference."""
    result = Result(f"{title}-{number}", "continued")
    case = setup.trial(f"{title}-{number}-{os.getpid()}")
    write_image(case.folder, image)
    saved = -1
    try:
        saved = load_checkpoint(case.run_folder / "last.safetensors").about["progress"]["step"]
    except FileNotFoundError:
        pass
    except ValueError as error:
        result.problems = [str(error)]
    if saved < step:
        result.problems.append(f"the checkpoint of step {step} was saved, there is one of {saved}")
    return resume_and_compare(setup, case, result)


def all_faults(calls: Sequence[tuple[str, str]]) -> list[tuple[Fault, str]]:
    """Return each call with each of its faults, and each policy for full disks."""
    faults = [(Fault(i, effect), "stop") for i, (kind, _) in enumerate(calls) for effect in EFFECTS[kind]]
    allocating = [i for i, (kind, _) in enumerate(calls) if kind in ALLOCATING_CALLS]
    return faults + [(Fault(i, e), policy) for e, policy in (("full", "stop"), ("pause", "wait")) for i in allocating]


def main() -> int:
    parser = new_parser(__doc__, jobs=2)
    parser.add_argument("--short", action="store_true", help="a sample of the trials")
    arguments = parser.parse_args()
    for module in IMPORTED:  # that each forked process needs
        importlib.import_module(module)
    if importlib.util.find_spec("numba"):
        importlib.import_module("tricycle_accelerators.compiled.loops")
    folder = Path(tempfile.mkdtemp(prefix="disks-", dir=arguments.folder))
    n_bad = 0
    try:
        setup = new_setup(folder)
        generator = random.Random(arguments.seed)
        for resumed in (False, True):
            title = "resumed run" if resumed else "new run"
            case, start, calls, log = record_calls(setup, resumed, record=True)
            print(f"{title}: {len(calls)} writing calls ({_table(kind for kind, _ in calls)})", flush=True)
            faults = all_faults(calls)
            images = list(power_cut_images(start, log, case.folder, arguments.seed).values())
            print(f"  power cuts: {len(log) + 1} prefixes, {len(images)} different disks")
            if arguments.short:
                faults, images = generator.sample(faults, 3), generator.sample(images, 3)
            tasks = [partial(run_fault_trial, setup, fault, resumed, policy) for fault, policy in faults]
            n_bad += _report("faults", tasks, arguments.jobs)
            tasks = [partial(run_power_cut_trial, setup, *image, f"cut-{resumed}") for image in images]
            n_bad += _report("power cuts", tasks, arguments.jobs)
    finally:
        if not n_bad:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if n_bad else 0


def _report(title: str, tasks: Sequence[Callable[[], Any]], n_jobs: int) -> int:
    """Run trials, print a summary, and return the number of failed ones."""
    begun = time.monotonic()

    def on_progress(n_done: int) -> None:
        if n_done % 100 == 0:
            print(f"  {title}: {n_done} of {len(tasks)} after {time.monotonic() - begun:.0f} s", flush=True)

    answers = run_in_processes(tasks, n_jobs, on_progress)
    results = [answer if isinstance(answer, Result) else Result("?", "?", [str(answer)]) for answer in answers]
    bad = [result for result in results if result.problems]
    ends = _table(result.end for result in results)
    n_new = sum(result.new for result in results)
    summary = f"{len(results)} trials ({ends}), {n_new} different folders, {len(bad)} failed"
    print(f"  {title}: {summary}, in {time.monotonic() - begun:.0f} s")
    for result in bad:
        print(f"    {result.name}: {'; '.join(result.problems)}")
    return len(bad)


def _table(words: Any) -> str:
    return ", ".join(f"{n} {word}" for word, n in Counter(words).most_common())


if __name__ == "__main__":
    raise SystemExit(main())
