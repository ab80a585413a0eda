"""Finding files of known content, and downloading those that are not there yet.

Two environment variables say where: `TRICYCLE_DATA` names a folder with files put there by hand, which
is read first and never written; `TRICYCLE_CACHE` names the folder for everything that Tricycle keeps
(default: the user's cache folder, as the system has it).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from tricycle.system.files import atomic_write, naming

_ATTEMPTS = 3  # to get on after a dropped connection, before giving up
MOST_BYTES = 2**30  # of a file: a server that sends without end must not fill the disk


class DownloadError(OSError):
    """A file is not here and could not be downloaded; the message says where to put it by hand."""


def cache_folder() -> Path:
    """Where Tricycle keeps what it downloads and computes. It need not exist yet."""
    if folder := os.environ.get("TRICYCLE_CACHE"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local", "tricycle", "tricycle", "Cache")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tricycle"
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache", "tricycle")


def file_sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file's content, as lower-case hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: str | os.PathLike[str], sha256: str) -> None:
    """Raises ValueError where a file's content is not the expected one."""
    digest = file_sha256(path)
    if digest != sha256:
        raise ValueError(f"{path}: expected a file with SHA-256 {sha256}, got {digest}")


def fetch(name: str, url: str, sha256: str, folder: str) -> Path:
    """The path of a file, wherever it is found first.

    Looked for as `$TRICYCLE_DATA/<folder>/<name>`, then in the cache, then under its URL. A download
    that breaks off leaves `<name>.part` beside the place of the file and goes on from there the next
    time; the file itself appears only when whole, with the right hash.

    Raises:
        ValueError: the file under TRICYCLE_DATA has another hash.
        DownloadError: an OSError; there is no file, and it could not be downloaded whole.
    """
    data = os.environ.get("TRICYCLE_DATA")
    by_hand = Path(data or "$TRICYCLE_DATA", folder, name)
    if data and by_hand.is_file():
        check_hash(by_hand, sha256)
        return by_hand
    cached = cache_folder() / folder / name
    if cached.is_file() and file_sha256(cached) == sha256:
        return cached
    try:
        _download(url, cached, sha256)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DownloadError(
            f"{name} could not be downloaded from {url}; put the file at {by_hand} or at {cached} by hand "
            f"(expected SHA-256 {sha256}; {type(error).__name__}: {reason})"
        ) from error
    return cached


def _download(url: str, path: Path, sha256: str) -> None:
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    resumed = part.exists()
    try:
        _append(url, part)
        # a copy, as another process may be writing to the same .part; the hash is taken of the copy
        with atomic_write(path) as file, part.open("rb") as downloaded:
            shutil.copyfileobj(downloaded, file)
            file.flush()
            check_hash(file.name, sha256)
    except ValueError:
        part.unlink(missing_ok=True)
        if not resumed:
            raise
        _download(url, path, sha256)  # the .part was of no use
    with suppress(OSError):  # Windows does not delete a file that another process has open
        part.unlink()


def _append(url: str, path: Path) -> None:
    """Download to `path`, after what is there already; go on from there when the connection drops."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from tqdm import tqdm

    for attempt in range(1, _ATTEMPTS + 1):
        have = path.stat().st_size if path.exists() else 0
        # uncompressed, so that positions in the file and in the stream are the same
        headers = {"Accept-Encoding": "identity", "User-Agent": "tricycle"}
        request = Request(url, headers=headers | ({"Range": f"bytes={have}-"} if have else {}))
        try:
            with urlopen(request, timeout=30) as response:
                have = have if response.status == 206 else 0  # a server may send all of it nonetheless
                stated = response.headers.get("Content-Length", "")
                total = have + int(stated) if stated.isdecimal() and len(stated) < 20 else None
                bar = tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=f"Downloading {path.name}")
                with open(path, "ab" if have else "wb") as file, bar:
                    while block := response.read(2**14):
                        have += len(block)
                        if have > MOST_BYTES:
                            raise ValueError(f"expected at most {MOST_BYTES:,} bytes, got more")
                        with naming(path):  # a full disk does not say of which file it speaks
                            file.write(block)
                        bar.update(len(block))
            if total is not None and have < total:
                raise ConnectionError(f"the connection was closed after {have:,} of {total:,} bytes")
            return
        except HTTPError as error:
            if have and error.code == 416:
                return  # there is nothing after what we have; the hash will tell
            raise
        except (URLError, ConnectionError, TimeoutError, HTTPException) as error:
            if attempt == _ATTEMPTS:
                raise ConnectionError(error) from error
