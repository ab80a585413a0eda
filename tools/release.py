"""Prepare a release: update the version and the changelog, build the wheel and the source archive, and check them.

    python -m tools.release 0.2.0 --dry-run dist     in a copy of this checkout; writes the archives to dist/
    python -m tools.release 0.2.0                    in this checkout; CONTRIBUTING.md describes the next steps
    python -m tools.release --check dist             only check existing archives

The command does not commit, tag or publish anything.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
# The files that contain the version, each with the pattern of its line.
VERSION_PATTERNS = {
    "tricycle/__init__.py": r'^__version__ = "(.*)"$',
    "CITATION.cff": r"^version: (.*)$",
    "conda.recipe/recipe.yaml": r'^  version: "(.*)"$',
}
DATE_PATTERN = r"^date-released: (.*)$"  # of CITATION.cff
EXTRA_SOURCE_FILES = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"}


def main() -> None:
    """Run the command line: prepare a release, or by flag a dry run or a check; SystemExit with a message on errors."""
    arguments = _arguments()
    try:
        if arguments.check is not None:
            check(ROOT, arguments.check)
            return
        new = resolve_version(arguments.version, read_version(ROOT))
        if arguments.dry_run is None:
            prepare(ROOT, new)
            print(f"{ROOT / 'dist'}: check the changes, commit them, and tag v{new}")
        else:
            dry_run(arguments.dry_run.absolute(), new)
    except (ValueError, OSError) as error:
        raise SystemExit(f"release: {error}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"release: {' '.join(error.cmd[1:])} ended with status {error.returncode}") from None


def _arguments() -> argparse.Namespace:
    """Parse sys.argv: a version ("next" by default), and the folders --dry-run and --check (None by default)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", nargs="?", default="next", help="such as 0.2.0; default: the next minor version")
    parser.add_argument("--dry-run", type=Path, metavar="FOLDER", help="work in a copy, and write the archives here")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="only check the archives in this folder")
    return parser.parse_args()


def dry_run(folder: Path, version: str) -> None:
    """Build a release in a temporary copy of this checkout, copy its archives to `folder`, and print their sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for archive in prepare(copy_checkout(ROOT, Path(temporary) / "copy"), version):
            shutil.copy(archive, folder)
            print(f"{folder / archive.name}: {archive.stat().st_size / 1e6:.2f} MB", flush=True)


def read_version(root: Path) -> str:
    """Return the version that tricycle/__init__.py states; ValueError if it states none."""
    return _match(root / "tricycle" / "__init__.py", VERSION_PATTERNS["tricycle/__init__.py"])[1]


def resolve_version(new: str, old: str) -> str:
    """Return `new`, for "next" the next minor version; raise ValueError unless it is valid and later than `old`.

    Raises:
        ValueError: the version is not valid in both semver and PEP 440, or is not greater than the current one.
    """
    if new == "next":
        current = Version(old)
        return f"{current.major}.{current.minor + 1}.0"
    match = re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", new)
    try:
        is_later = match is not None and Version(new) > Version(old)
    except InvalidVersion:
        is_later = False
    if not is_later:
        raise ValueError(f"expected a version after {old}, as in 0.2.0 or 0.2.0rc1, got {new!r}")
    return new


def copy_checkout(root: Path, folder: Path) -> Path:
    """Copy all files that git tracks, and untracked files that it does not ignore, to a folder; return the folder."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    for name in filter(None, done.stdout.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    return folder


def prepare(root: Path, version: str) -> list[Path]:
    """Write version and changelog (ValueError without fragments), rebuild dist/, check; return [wheel, source archive].

    Raises:
        ValueError: no changelog fragments, a file without its version, or an archive with missing or extra files.
        subprocess.CalledProcessError: a tool failed, and has printed the reason.
    """
    if not changelog_fragments(root):
        raise ValueError("expected changelog fragments in changelog.d/, got none")
    today = datetime.date.today().isoformat()
    for name, pattern in VERSION_PATTERNS.items():
        _replace(root / name, pattern, version)
    _replace(root / "CITATION.cff", DATE_PATTERN, today)
    _run(root, "towncrier", "build", "--yes", "--version", version, "--date", today)
    shutil.rmtree(root / "dist", ignore_errors=True)
    _run(root, "build", "--outdir", "dist")
    return check(root, root / "dist")


def check(root: Path, folder: Path) -> list[Path]:
    """Check and return a folder's [wheel, source archive]; ValueError for bad files, CalledProcessError if tools fail.

    Raises:
        ValueError: an archive does not exist, or has missing or extra files.
        subprocess.CalledProcessError: a tool reported an error, and has printed the reason.
    """
    archives = sorted(folder.absolute().glob("tricycle_gpt-*"))
    if [path.suffix for path in archives] != [".whl", ".gz"]:
        raise ValueError(f"expected one wheel and one source archive in {folder}, got {len(archives)} files")
    _run(root, "twine", "check", "--strict", *(str(path) for path in archives))
    _run(root, "check_wheel_contents", str(archives[0]))
    check_archives(root, *archives)
    return archives


def changelog_fragments(root: Path) -> list[Path]:
    """Return the sorted paths of the next version's changelog fragments; [] if there are none."""
    return sorted(path for path in (root / "changelog.d").glob("*.md") if path.name != "README.md")


def check_archives(root: Path, wheel: Path, source: Path) -> None:
    """Raise ValueError unless both archives hold just the packages' files, the source also EXTRA_SOURCE_FILES.

    Raises:
        ValueError: an archive has missing or extra files.
    """
    expected = package_files(root)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    _check_names(wheel, names, expected)
    with tarfile.open(source) as tar:
        names = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    _check_names(source, names - {"PKG-INFO"}, expected | EXTRA_SOURCE_FILES)  # the build backend writes PKG-INFO


def package_files(root: Path) -> set[str]:
    """Return the files of all packages tricycle*, without __pycache__, as POSIX paths relative to the root."""
    return {
        path.relative_to(root).as_posix()
        for package in root.glob("tricycle*")
        if (package / "__init__.py").is_file()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _check_names(archive: Path, names: set[str], expected: set[str]) -> None:
    """Raise ValueError with the missing and the extra names unless both sets are equal."""
    missing, extra = sorted(expected - names), sorted(names - expected)
    if missing or extra:
        raise ValueError(f"{archive.name}: missing files {missing or 'none'}, extra files {extra or 'none'}")


def _match(path: Path, pattern: str) -> re.Match[str]:
    """Return the first match of a pattern in a file; raise ValueError if there is none."""
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ValueError(f"expected a line like {pattern} in {path}, got none")
    return match


def _replace(path: Path, pattern: str, value: str) -> None:
    """Replace group 1 of a pattern's first match in a file by `value`; raise ValueError without a match."""
    match = _match(path, pattern)
    text = match.string[: match.start(1)] + value + match.string[match.end(1) :]
    path.write_text(text, encoding="utf-8", newline="\n")


def _run(root: Path, module: str, *args: str) -> None:
    """Run a Python module in the folder `root`; raise CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", module, *args], cwd=root, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
