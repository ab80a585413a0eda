"""Helpers that run the studies of experiments/ in this process and check their output files."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
from matplotlib.image import imread

ROOT = Path(__file__).resolve().parents[1]


def run_study(main: Callable[[], int | None], *arguments: object) -> str:
    """Run the main function of a study with command-line arguments, and return its standard output."""
    stdout = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout):
        patch.setattr(sys, "argv", ["program", *map(str, arguments)])
        assert not main()
    return stdout.getvalue()


def check_files(folder: Path, names: Collection[str], min_pixels: int = 80) -> None:
    """Check the names of the files in a folder, and that its PNG images are not small and not uniform."""
    assert {path.name for path in folder.iterdir()} == set(names)
    for path in folder.glob("*.png"):
        image = imread(path)
        assert min(image.shape[:2]) > min_pixels and image.std() > 0.01, path


def check_tables(tables: Mapping[str, str], output: str) -> None:
    """Check that the output of a study contains its tables under their titles."""
    for title, table in tables.items():
        assert f"{title}\n\n{table}" in output


def needs_data(folder: str, names: Collection[str]) -> pytest.MarkDecorator:
    """Return a mark that skips a test unless these files are in a folder under TRICYCLE_DATA."""
    paths = [Path(os.environ.get("TRICYCLE_DATA", "-"), folder, name) for name in names]
    return pytest.mark.skipif(not all(map(Path.is_file, paths)), reason=f"{folder} is not under TRICYCLE_DATA")


def readme(name: str) -> str:
    """Return the text of a study: its README.md, and its details.md with further tables."""
    folder = ROOT / "experiments" / name
    pages = [folder / "README.md", folder / "details.md"]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())
