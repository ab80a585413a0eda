"""Disks that fail: every call of a training that writes is failed, and every moment of it has a power cut.

python -m tests.chaos.disks --seed 0      all of it, in about a quarter of an hour on two cores
python -m tests.chaos.disks --short       a sample of it

1. Faults. A run is made whose calls that write (opening, writing, syncing, renaming, ...) are counted. Then it is made
   again and again, and each time another call fails in another way. Each must end in an ordinary way (status 0, or 1
   and one line), leave whole files, and go on to the end that a run left alone has.
2. Power cuts. The calls are recorded with their data, and what a disk may hold after the first of them, the first two
   and so on is laid out in new folders: what was not synced may be there, or not, or in parts, and names may come in
   another order (Pillai et al. 2014, "All File Systems Are Not Created Equal", section 3). From each of them a run must
   go on to the same end, and no checkpoint that was saved may be gone.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import hashlib
import importlib
import importlib.util
import io
import json
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
from functools import partialmethod
from itertools import count
from pathlib import Path
from typing import Any

from tricycle.checkpoint import load_checkpoint
from tricycle.system.files import atomic_write

from .runs import Bench, Case, Outcome, differences

# The ways in which each kind of call fails.
ERRORS = ("ENOSPC", "EIO", "EROFS")
WAYS = {
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
NEED_ROOM = ("create", "write", "mkdir")
N_PAUSED = 3  # calls that find no room before there is some again
IMPORTED = (
    "matplotlib.backends.backend_agg matplotlib.figure tqdm tyro tricycle_cli.train tricycle_datasets.text".split()
)
# A small checkpoint is written in few calls.
SMALL = "--embedding-dim 8 --n-layers 1 --n-heads 1 --vocab-size 272 --context-window 16 --eval-batches 2".split()
MAX_BUFFERED_LINES = 3  # of metrics, so that they are written in the middle of a short run too


@dataclass(frozen=True)
class Fault:
    """What befalls one call, counted from 0.

    Attributes:
        way: the name of an error; "short": half is written, then there is no room; "half": half is written, and all
            is well; "full": from here on there is no room; "pause": for some calls there is none.
    """

    call: int
    way: str


# -------------------------------------------------------------------- the wrapper
class Disk:
    """Counts, records and fails the calls of this process that write below a folder.

    Attributes:
        calls: (kind, path) of each, the path from the folder.
        log: what each did, with its data, for `FileSystem`.
        unseen: what Python itself says was opened, renamed or removed there past this wrapper.
    """

    def __init__(self, folder: Path, fault: Fault | None = None, record: bool = False) -> None:
        self.folder, self.fault, self.record = os.path.realpath(folder), fault, record
        self.calls: list[tuple[str, str]] = []
        self.log: list[tuple[Any, ...]] = []
        self.unseen: list[str] = []
        self._inside = False
        self._cut: set[int] = set()  # files whose next write finds no room
        self._inodes: dict[str, int] = {}
        self._files: dict[int, int] = {}  # file descriptors and their inodes
        self._next = 0

    def install(self) -> None:
        """For the rest of this process."""
        self._usual = {name: getattr(os, name) for name in OS_CALLS}
        self._open = io.open
        for place in sorted(Path(self.folder).rglob("*")):
            if place.is_file():
                self._new_inode(str(place))
        builtins.open = io.open = self._opened  # type: ignore[assignment]
        for name in OS_CALLS:
            setattr(os, name, getattr(self, f"_os_{name}"))
        sys.addaudithook(self._audit)

    def mark(self, *what: Any) -> None:
        """Put something into the log that is no call."""
        self.log.append(what)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._inside or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        reads = event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if not reads and isinstance(args[0], (str, os.PathLike)) and self._watches(args[0]):
            self.unseen.append(f"{event} {args[0]}\n{''.join(traceback.format_stack()[-6:])}")

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

    def call(self, kind: str, path: str, act: Callable[[], Any], *event: Any) -> Any:
        """Do it, unless it is to fail."""
        number = len(self.calls)
        self.calls.append((kind, os.path.relpath(path, self.folder)))
        self._fail(kind, number, path)
        before, self._inside = self._inside, True
        try:
            result = act()
        finally:
            self._inside = before
        if self.record and event:
            self.log.append(event)
        return result

    def _fail(self, kind: str, number: int, path: str) -> None:
        fault = self.fault
        if fault is None or number < fault.call:
            return
        lasting = fault.way == "full" or (fault.way == "pause" and number < fault.call + N_PAUSED)
        if lasting and kind in NEED_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([path] if kind != "write" else []))
        if number == fault.call and hasattr(errno, fault.way) and kind != "close":
            value = getattr(errno, fault.way)
            raise OSError(value, os.strerror(value), *([path] if kind not in ("write", "sync", "sync folder") else []))

    # ---------------------------------------------------------------- files
    def _opened(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **how: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or not self._watches(file):
            return self._open(file, mode, buffering, *args, **how)
        raw = _Raw(self, self._path(file), mode)
        if buffering == 0:
            return raw
        buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)  # type: ignore[arg-type]
        return buffer if "b" in mode else io.TextIOWrapper(buffer, *args, **how)

    def opening(self, path: str, mode: str, act: Callable[[], Any]) -> int:
        """Open a file with `act`; returns its inode."""
        if not os.path.exists(path):
            self.call("create", path, act, "create", path, self._next)
            return self._new_inode(path)
        inode = self._inodes[path]
        self.call("open", path, act, *(("truncate", inode, 0) if "w" in mode else ()))
        return inode

    def writing(self, path: str, inode: int, offset: int, data: bytes, act: Callable[[bytes], int]) -> int:
        """Write with `act`; returns how many bytes were."""
        fault, number = self.fault, len(self.calls)
        if inode in self._cut:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault is not None and fault.call == number and fault.way in ("short", "half") and len(data) > 1:
            data = data[: len(data) // 2]
            if fault.way == "short":
                self._cut.add(inode)
        return int(self.call("write", path, lambda: act(data), "write", inode, offset, data))

    def closing(self, path: str, act: Callable[[], Any]) -> None:
        """Close a file with `act`; it is closed even where that fails."""
        number = len(self.calls)
        self.call("close", path, act)
        fault = self.fault
        if fault is not None and number == fault.call and hasattr(errno, fault.way):
            value = getattr(errno, fault.way)
            raise OSError(value, os.strerror(value))

    # ---------------------------------------------------------------- calls of the system
    def _open_fd(self, path: str, flags: int, act: Callable[[], int]) -> int:
        kept: list[int] = []
        mode = "w" if flags & os.O_TRUNC else "a"
        inode = self.opening(path, mode, lambda: kept.append(act()))
        self._files[kept[0]] = inode
        return kept[0]

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def act() -> int:
            return int(self._usual["open"](path, flags, mode, dir_fd=dir_fd))

        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not writes or not self._watches(path, dir_fd):
            return act()
        return self._open_fd(self._path(path, dir_fd), flags, act)

    def _os_write(self, handle: int, data: bytes) -> int:
        usual = self._usual["write"]
        if handle not in self._files:
            return int(usual(handle, data))
        offset = os.lseek(handle, 0, os.SEEK_CUR)
        path = os.readlink(f"/proc/self/fd/{handle}")
        return self.writing(path, self._files[handle], offset, bytes(data), lambda part: usual(handle, part))

    def _os_ftruncate(self, handle: int, size: int) -> None:
        usual = self._usual["ftruncate"]
        if handle not in self._files:
            return usual(handle, size)
        path = os.readlink(f"/proc/self/fd/{handle}")
        return self.call("truncate", path, lambda: usual(handle, size), "truncate", self._files[handle], size)

    def _os_close(self, handle: int) -> None:
        usual = self._usual["close"]
        if handle not in self._files:
            return usual(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        del self._files[handle]
        return self.closing(path, lambda: usual(handle))

    def _os_fsync(self, handle: int) -> None:
        usual = self._usual["fsync"]
        path = os.readlink(f"/proc/self/fd/{handle}")
        if not (path + os.sep).startswith(self.folder + os.sep):
            return usual(handle)
        if os.path.isdir(path):  # nothing is synced in truth: that would take time and say nothing
            return self.call("sync folder", path, lambda: None, "sync folder", path)
        return self.call("sync", path, lambda: None, "sync", self._inodes[path])

    def _os_truncate(self, path: Any, size: int) -> None:
        usual = self._usual["truncate"]
        if not self._watches(path):
            return usual(path, size)
        place = self._path(path)
        return self.call("truncate", place, lambda: usual(path, size), "truncate", self._inodes[place], size)

    def _rename_with(self, name: str, src: Any, dst: Any) -> None:
        usual = self._usual[name]
        if not self._watches(dst):
            return usual(src, dst)
        a, b = self._path(src), self._path(dst)
        self.call("rename", b, lambda: usual(src, dst), "rename", a, b)
        self._inodes[b] = self._inodes.pop(a)
        return None

    _os_replace = partialmethod(_rename_with, "replace")
    _os_rename = partialmethod(_rename_with, "rename")

    def _remove_with(self, name: str, kind: str, path: Any, *, dir_fd: int | None = None) -> None:
        usual = self._usual[name]
        if not self._watches(path, dir_fd):
            return usual(path, dir_fd=dir_fd)
        place = self._path(path, dir_fd)
        there = os.path.lexists(place)  # what is not there fails by itself
        event = (kind, place) if there else ()
        self.call(kind, place, lambda: usual(path, dir_fd=dir_fd), *event)
        self._inodes.pop(place, None)
        return None

    _os_unlink = partialmethod(_remove_with, "unlink", "unlink")
    _os_remove = partialmethod(_remove_with, "remove", "unlink")
    _os_rmdir = partialmethod(_remove_with, "rmdir", "rmdir")

    def _os_mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        usual = self._usual["mkdir"]
        if not self._watches(path, dir_fd):
            return usual(path, mode, dir_fd=dir_fd)
        if os.path.isdir(self._path(path, dir_fd)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        place = self._path(path, dir_fd)
        return self.call("mkdir", place, lambda: usual(path, mode, dir_fd=dir_fd), "mkdir", place)


OS_CALLS = "open write ftruncate close fsync truncate replace rename unlink remove rmdir mkdir".split()


class _Raw(io.FileIO):
    """An open file below the watched folder."""

    def __init__(self, disk: Disk, path: str, mode: str) -> None:
        self.disk, self.path = disk, path
        self.appends = "a" in mode
        bare = mode.replace("b", "").replace("t", "")
        self.inode = disk.opening(path, bare, lambda: super(_Raw, self).__init__(path, bare))

    def write(self, data: Any) -> int:  # type: ignore[override]
        offset = os.fstat(self.fileno()).st_size if self.appends else self.tell()
        return self.disk.writing(self.path, self.inode, offset, bytes(data), super().write)

    def truncate(self, size: int | None = None) -> int:
        end = self.tell() if size is None else size
        usual = super().truncate
        return int(self.disk.call("truncate", self.path, lambda: usual(end), "truncate", self.inode, end))

    def close(self) -> None:
        if not self.closed:
            self.disk.closing(self.path, super().close)


# -------------------------------------------------------------------- what a disk may hold after a power cut
Image = dict[str, bytes | None]  # by path from the folder: a file's content, or None for a folder


class FileSystem:
    """What a log did, and what of it is durable.

    Attributes:
        names, durable: paths of files and folders with their inodes, as a program sees them and as a disk holds them at
            least; folders have the inode -1.
        pending: changes of names that no sync of their folder has made durable.
        data, synced: the files' contents, likewise.
        writes: for each file, what was done to it since its last sync.
        step: of the latest checkpoint that was saved.
    """

    def __init__(self, start: Image) -> None:
        self.names: dict[str, int] = {}
        self.data: dict[int, bytes] = {}
        files = sorted(path for path, content in start.items() if content is not None)
        self.names = {path: -1 for path, content in start.items() if content is None}
        for inode, path in enumerate(sorted(files, key=Path)):
            self.names[path] = inode
            self.data[inode] = start[path] or b""
        self.durable, self.synced = dict(self.names), dict(self.data)
        self.pending: list[tuple[Any, ...]] = []
        self.writes: dict[int, list[tuple[Any, ...]]] = {}
        self.step = -1

    def apply(self, kind: str, *args: Any) -> None:
        """One entry of the log, paths counted from the folder."""
        if kind in ("write", "truncate"):
            inode = args[0]
            self.data[inode] = _written(self.data[inode], kind, *args[1:])
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
        """What the disk may hold if the power goes now."""
        halves = {inode: _parts(self.synced[inode], writes, generator, torn=True) for inode, writes in self._open()}
        holes = {inode: _parts(self.synced[inode], writes, generator, torn=False) for inode, writes in self._open()}
        zeros = {inode: self.synced[inode].ljust(len(self.data[inode]), b"\0") for inode, _ in self._open()}
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

    def _open(self) -> list[tuple[int, list[tuple[Any, ...]]]]:
        return sorted(self.writes.items())


def _written(content: bytes, kind: str, *args: Any) -> bytes:
    if kind == "truncate":
        return content[: args[0]].ljust(args[0], b"\0")
    offset, data = args
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


def _parts(content: bytes, writes: Sequence[tuple[Any, ...]], generator: random.Random, torn: bool) -> bytes:
    """A file where some writes got to the disk, or the last of them in part."""
    if not torn:
        writes = [write for write in writes if generator.random() < 0.5]
    else:
        writes = writes[: generator.randint(1, len(writes))]
        *whole, (kind, *args) = writes
        if kind == "write":
            args[1] = args[1][: generator.randrange(len(args[1]) + 1)]
        writes = [*whole, (kind, *args)]
    for write in writes:
        content = _written(content, *write)
    return content


def _folders_of(change: tuple[Any, ...]) -> set[str]:
    """The folders whose names a change is about."""
    return {os.path.dirname(path) for path in change[1:] if isinstance(path, str)}


def _rename(names: dict[str, int], change: tuple[Any, ...]) -> None:
    kind, path, *rest = change
    if kind == "create":
        names[path] = rest[0]
    elif kind == "mkdir":
        names[path] = -1
    elif kind == "rename":
        names.pop(path, None)
        names[rest[0]] = rest[1]
    else:
        names.pop(path, None)


def _image(names: dict[str, int], data: dict[int, bytes]) -> Image:
    image: Image = {}
    for path in sorted(names, key=len):
        parent = os.path.dirname(path)
        if parent and image.get(parent, b"") is not None:
            continue  # the folder itself did not get to the disk
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
    """An entry of a log with its paths counted from the folder, which is ""."""
    return tuple(
        "" if part == folder else part.removeprefix(folder + os.sep) if i and isinstance(part, str) else part
        for i, part in enumerate(event)
    )


def cuts(start: Image, log: Sequence[tuple[Any, ...]], folder: Path, seed: int) -> dict[bytes, tuple[int, int, Image]]:
    """All that a disk may hold, each once: the number of calls made, the step that was saved, and the image."""
    generator = random.Random(seed)
    system = FileSystem(start)
    hashes: dict[int, bytes] = {}
    kept: list[bytes] = []  # so that no id comes twice

    def hash_of(content: bytes) -> bytes:
        if id(content) not in hashes:
            kept.append(content)
            hashes[id(content)] = hashlib.sha256(content).digest()
        return hashes[id(content)]

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


# -------------------------------------------------------------------- programs, in processes of their own
def in_child(act: Callable[[], Any]) -> tuple[int, int]:
    """Begin something in a forked process; its process id, and where its answer can be read."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    try:
        answer = act()
    except BaseException:
        answer = traceback.format_exc()
    with os.fdopen(writing, "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)


def answer_of(child: tuple[int, int]) -> Any:
    with os.fdopen(child[1], "rb") as file:
        content = file.read()
    os.waitpid(child[0], 0)
    return pickle.loads(content) if content else "it ended without an answer"


def in_children(tasks: Sequence[Callable[[], Any]], n_jobs: int, say: Callable[[int], None]) -> list[Any]:
    """The answers of all tasks, so many of which run at once."""
    answers: list[Any] = []
    running: list[tuple[int, int]] = []
    for task in tasks:
        if len(running) == n_jobs:
            answers.append(answer_of(running.pop(0)))
            say(len(answers))
        running.append(in_child(task))
    return answers + [answer_of(child) for child in running]


def program(case: Case, words: Sequence[str], disk: Disk | None = None, keep: Path | None = None) -> Outcome:
    """Train in a forked process, as a user would with these flags.

    Args:
        keep: where to leave the disk's calls, log and what it did not see.
    """
    case.folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp())

    def act() -> None:
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
            keep.write_bytes(pickle.dumps((disk.calls, disk.log, disk.unseen)))
        os._exit(0)

    answer_of(in_child(act))
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in place.iterdir()}
    shutil.rmtree(place)
    return Outcome(int(texts["status"]) if "status" in texts else None, texts["out"], texts["err"])


def _run(case: Case, words: Sequence[str], disk: Disk | None) -> int:
    from tricycle.training_state import TrainingState
    from tricycle_cli import full_disk, run
    from tricycle_cli.flags import run_main
    from tricycle_cli.train import main

    os.environ.update(case.environment(), TRICYCLE_TUNE_HOST="0")
    sys.argv = ["train_smol_gpt.py", *words]
    run.MAX_BUFFERED_LINES, full_disk.MAX_RETRY_SECONDS = MAX_BUFFERED_LINES, 0.01
    make_quick_and_repeatable()
    if disk is not None:
        usual = TrainingState.save

        def save(state: TrainingState, path: Path, tokeniser: Any, *memory: Any) -> None:
            usual(state, path, tokeniser, *memory)
            if path.name == "last.safetensors":
                disk.mark("saved", state.step)

        TrainingState.save = save  # type: ignore[method-assign]
        disk.install()
    try:
        run_main(lambda: main(list(words)))
    except SystemExit as leaving:
        return int(leaving.code or 0)


def make_quick_and_repeatable() -> None:
    """For the rest of this process: no true disk, no picture, a clock that counts how often it was asked."""
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


def go_on(case: Case) -> Outcome:
    """Go on with a run as a user would: begin again where the program says so."""
    done = program(case, case.resuming)
    if done.status and "start again without --resume" in done.err:
        return program(case, case.words)
    return done


# -------------------------------------------------------------------- trials
@dataclass(frozen=True)
class Bed:
    """What the trials need.

    Attributes:
        whole: a run that was left alone.
        begun: what the folder of a run holds that was killed in the middle.
    """

    bench: Bench
    whole: Case
    begun: Image

    def trial(self, name: str) -> Case:
        return self.bench.case(name, *SMALL)


def make_bed(folder: Path) -> Bed:
    """
    Raises:
        RuntimeError: a run that is left alone fails.
    """
    bench = Bench(folder)
    whole = bench.case("whole", *SMALL)
    done = program(whole, whole.words)
    if done.status != 0:
        raise RuntimeError(f"a run that was left alone failed: {done.err}")
    killed = bench.case("killed", *SMALL)
    process = killed.start(prelude=KILLED)
    process.communicate()
    begun = read_image(killed.folder)
    killed.forget()
    return Bed(bench, whole, begun)


# After a sample, with lines of metrics that are to be forgotten.
KILLED = """
import signal
from tricycle_cli import run, updates
run.MAX_BUFFERED_LINES = 1
usual = updates.RunSession.batches
def batches(session, source):
    if session.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(session, source)
updates.RunSession.batches = batches
"""


def calls_of(bed: Bed, resumed: bool, record: bool = False) -> tuple[Case, Image, list[Any], list[Any]]:
    """A run that is watched: its folder, what that held before, the calls, and the log.

    Raises:
        RuntimeError: it fails, or writes in a way that is not seen.
    """
    case = bed.trial(f"watched-{resumed}")
    case.forget()
    start = bed.begun if resumed else {}
    write_image(case.folder, start)
    keep = bed.bench.folder / "watched.pkl"
    disk = Disk(case.folder, record=record)
    done = program(case, case.resuming if resumed else case.words, disk, keep)
    calls, log, unseen = pickle.loads(keep.read_bytes())
    problems = [*unseen, *differences(case.run, bed.whole.run)] if done.status == 0 else [done.err]
    case.forget()
    if problems:
        raise RuntimeError(f"a run that was watched: {problems}")
    return case, start, calls, log


@dataclass
class Result:
    """How a trial ended.

    Attributes:
        end: in a word.
        problems: what is wrong; nothing where all is well.
        new: no trial before had left the same folder.
    """

    name: str
    end: str
    problems: list[str] = field(default_factory=list)
    new: bool = True


def try_fault(bed: Bed, fault: Fault, resumed: bool, policy: str) -> Result:
    """One call fails; the program must end well, and the run go on to the same end."""
    name = f"{'resumed' if resumed else 'begun'}-{policy}-{fault.call}-{fault.way}"
    case = bed.trial(name)
    write_image(case.folder, bed.begun if resumed else {})
    words = [*(case.resuming if resumed else case.words), "--on-full-disk", policy]
    done = program(case, words, Disk(case.folder, fault))
    result = Result(name, {0: "went on", 1: "ended"}.get(done.status or 0, str(done.status)))
    if done.status not in (0, 1) or "Traceback" in done.err or len(done.error_lines) != done.status:
        result.problems.append(f"ended with status {done.status}: {done.err[-2000:]}")
    if done.status == 1 and str(case.folder) not in done.err:
        result.problems.append(f"names no file: {done.err}")
    result.problems += unsound(case.run)
    with contextlib.suppress(OSError):
        (case.run / ".lock").unlink()  # that of a process which is no more, and could not remove it
    if done.status == 0 and (case.run / "loss.png").exists() and differences(case.run, bed.whole.run):
        result.problems += [f"at once: {difference}" for difference in differences(case.run, bed.whole.run)]
    return end_of(bed, case, result)


def end_of(bed: Bed, case: Case, result: Result) -> Result:
    """Go on with a run to its end and compare; once for all folders that hold the same.

    Of files that nobody reads, for they are only removed, it counts whether there is something in them.
    """
    digest = hashlib.sha256()
    for path, content in read_image(case.folder).items():
        unread = path.endswith(".part") or ".build-" in path
        digest.update(re.sub(r"\d+-\d+\.part$|(?<=\.build-)\w+", "", path).encode())
        digest.update(b"/" if content is None else b":" + hashlib.sha256(content[:1] if unread else content).digest())
    try:
        (bed.bench.folder / f"seen-{digest.hexdigest()}").touch(exist_ok=False)
    except FileExistsError:
        result.new = False
    else:
        done = go_on(case)
        if done.status != 0:
            result.problems.append(f"could not go on: {done.err[-2000:]}")
        else:
            result.problems += differences(case.run, bed.whole.run)
    if not result.problems:
        case.forget()
    return result


def unsound(run: Path) -> list[str]:
    """What is wrong in a run folder: a checkpoint or a JSON file that is not whole, half a line."""
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


def try_cut(bed: Bed, number: int, step: int, image: Image, title: str) -> Result:
    """The power went; the run must go on to the same end, and from no earlier than the last checkpoint."""
    result = Result(f"{title}-{number}", "went on")
    case = bed.trial(f"{title}-{number}-{os.getpid()}")
    write_image(case.folder, image)
    last = case.run / "last.safetensors"
    if last.exists():
        try:
            saved = load_checkpoint(last).about["progress"]["step"]
        except ValueError as error:
            saved, result.problems = -1, [str(error)]
    else:
        saved = -1
    if saved < step:
        result.problems.append(f"the checkpoint of step {step} was saved, there is one of {saved}")
    return end_of(bed, case, result)


def all_faults(calls: Sequence[tuple[str, str]]) -> list[tuple[Fault, str]]:
    """Every call in every way, and each policy for full disks."""
    faults = [(Fault(i, way), "stop") for i, (kind, _) in enumerate(calls) for way in WAYS[kind]]
    full = [(Fault(i, "full"), "stop") for i, (kind, _) in enumerate(calls) if kind in NEED_ROOM]
    pause = [(Fault(i, "pause"), "wait") for i, (kind, _) in enumerate(calls) if kind in NEED_ROOM]
    return faults + full + pause


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="a sample of the trials")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--only", choices=["faults", "cuts"])
    arguments = parser.parse_args()
    import_once()
    folder = Path(tempfile.mkdtemp(prefix="disks-"))
    n_bad = 0
    try:
        bed = make_bed(folder)
        generator = random.Random(arguments.seed)
        for resumed in (False, True):
            title = "a run that goes on" if resumed else "a run"
            case, start, calls, log = calls_of(bed, resumed, record=True)
            print(f"{title}: {len(calls)} calls that write ({_table(kind for kind, _ in calls)})", flush=True)
            if arguments.only != "cuts":
                faults = all_faults(calls)
                if arguments.short:
                    faults = generator.sample(faults, 3)
                tasks = [_task(try_fault, bed, fault, resumed, policy) for fault, policy in faults]
                n_bad += _report("faults", tasks, arguments.jobs)
            if arguments.only != "faults":
                images = list(cuts(start, log, case.folder, arguments.seed).values())
                print(f"  power cuts: {len(log) + 1} prefixes, {len(images)} different disks")
                if arguments.short:
                    images = generator.sample(images, 3)
                tasks = [_task(try_cut, bed, *image, f"cut-{resumed}") for image in images]
                n_bad += _report("power cuts", tasks, arguments.jobs)
    finally:
        if not n_bad:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if n_bad else 0


def import_once() -> None:
    """What each process would import by itself, and Numba's loops, which are compiled then, where Numba is."""
    for module in IMPORTED:
        importlib.import_module(module)
    if importlib.util.find_spec("numba"):
        importlib.import_module("tricycle_accelerators.compiled.loops")


def _task(trial: Callable[..., Result], *args: Any) -> Callable[[], Result]:
    return lambda: trial(*args)


def _report(title: str, tasks: Sequence[Callable[[], Any]], n_jobs: int) -> int:
    """Run trials and print what came of them; returns how many went wrong."""
    begun = time.monotonic()

    def say(n_done: int) -> None:
        if n_done % 100 == 0:
            print(f"  {title}: {n_done} of {len(tasks)} after {time.monotonic() - begun:.0f} s", flush=True)

    answers = in_children(tasks, n_jobs, say)
    results = [answer if isinstance(answer, Result) else Result("?", "?", [str(answer)]) for answer in answers]
    bad = [result for result in results if result.problems]
    ends = _table(result.end for result in results)
    n_new = sum(result.new for result in results)
    seconds = time.monotonic() - begun
    print(f"  {title}: {len(results)} tried ({ends}), {n_new} different folders, {len(bad)} lost, in {seconds:.0f} s")
    for result in bad:
        print(f"    {result.name}: {'; '.join(result.problems)}")
    return len(bad)


def _table(words: Any) -> str:
    return ", ".join(f"{n} {word}" for word, n in Counter(words).most_common())


if __name__ == "__main__":
    raise SystemExit(main())
