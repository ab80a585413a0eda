"""Download files with known SHA-256 into a cache, or find them in a local folder.

The environment variable `TRICYCLE_DATA` names a folder of manually downloaded files, which is searched first and never
written. `TRICYCLE_CACHE` names the folder of all cached files (default: the user's cache folder of the system).
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from tricycle.system.files import add_path_to_errors
from tricycle.system.locks import FolderLock

_ATTEMPTS = 3  # to resume a download after a dropped connection
MOST_BYTES = 2**30  # the largest download, so that a server cannot fill the disk


class DownloadError(OSError):
    """A file is missing and could not be downloaded; the message says where to put it manually."""


def cache_folder() -> Path:
    """Return the folder of downloads and caches: TRICYCLE_CACHE, or the system's usual one; it may not exist yet."""
    if folder := os.environ.get("TRICYCLE_CACHE"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local", "tricycle", "tricycle", "Cache")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tricycle"
    return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache", "tricycle")


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content as lower-case hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: str | os.PathLike[str], sha256: str) -> None:
    """Raise a ValueError if the SHA-256 of a file's content is not the expected one."""
    digest = file_sha256(path)
    if digest != sha256:
        raise ValueError(f"{path}: expected a file with SHA-256 {sha256}, got {digest}")


def fetch(name: str, url: str, sha256: str, folder: str) -> Path:
    """Return a file of TRICYCLE_DATA (ValueError if damaged), an intact cached one, or a download (DownloadError).

    The file is searched in `$TRICYCLE_DATA/<folder>/<name>`, then in the cache, then downloaded from its URL. An
    interrupted download leaves `<name>.part` in the cache, and is resumed the next time. The file itself appears only
    when it is complete and has the right hash.
    """
    data = os.environ.get("TRICYCLE_DATA")
    by_hand = Path(data or "$TRICYCLE_DATA", folder, name)
    if data and by_hand.is_file():
        check_hash(by_hand, sha256)
        return by_hand
    cached = cache_folder() / folder / name
    is_intact = lambda: cached.is_file() and file_sha256(cached) == sha256
    if is_intact():
        return cached
    try:
        with FolderLock(cached.parent, wait=True):
            if not is_intact():  # another process may have downloaded it meanwhile
                _download(url, cached, sha256)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DownloadError(
            f"{name} could not be downloaded from {url}; put the file at {by_hand} or at {cached} by hand "
            f"(expected SHA-256 {sha256}; {type(error).__name__}: {reason})"
        ) from error
    return cached


def _download(url: str, path: Path, sha256: str) -> None:
    """Download to a .part file, then move it to `path`; ValueError for a wrong hash, unless it was resumed: retry."""
    part = path.with_name(f"{path.name}.part")
    resumed = part.exists()
    try:
        _append(url, part)
        check_hash(part, sha256)
    except ValueError:
        part.unlink(missing_ok=True)
        if not resumed:
            raise
        return _download(url, path, sha256)  # the .part was damaged: start again
    os.replace(part, path)


def _append(url: str, path: Path) -> None:
    """Append the rest of a download to the partial file `path`; retry dropped connections, then ConnectionError."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from tqdm import tqdm

    for attempt in range(1, _ATTEMPTS + 1):
        have = path.stat().st_size if path.exists() else 0
        # without compression, so that positions in the file and in the stream are equal
        headers = {"Accept-Encoding": "identity", "User-Agent": "tricycle"}
        request = Request(url, headers=headers | ({"Range": f"bytes={have}-"} if have else {}))
        try:
            with urlopen(request, timeout=30) as response:
                have = have if response.status == 206 else 0  # a server may ignore the range and send the whole file
                stated = response.headers.get("Content-Length", "")
                total = have + int(stated) if stated.isdecimal() and len(stated) < 20 else None
                bar = tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=f"Downloading {path.name}")
                with open(path, "ab" if have else "wb") as file, bar:
                    while block := response.read(2**14):
                        have += len(block)
                        if have > MOST_BYTES:
                            raise ValueError(f"expected at most {MOST_BYTES:,} bytes, got more")
                        with add_path_to_errors(path):  # the error of a full disk does not name the file
                            file.write(block)
                        bar.update(len(block))
            if total is not None and have < total:
                raise ConnectionError(f"the connection was closed after {have:,} of {total:,} bytes")
            return
        except HTTPError as error:
            if have and error.code == 416:
                return  # the file has no more bytes; the caller checks the hash
            raise
        except (URLError, ConnectionError, TimeoutError, HTTPException) as error:
            if attempt == _ATTEMPTS:
                raise ConnectionError(error) from error
