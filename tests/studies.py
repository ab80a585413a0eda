"""Studies of experiments/ run in this process, and what they leave."""

import contextlib
import io
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from matplotlib.image import imread

ROOT = Path(__file__).resolve().parents[1]


def run_study(main: Callable[[], int | None], *words: object) -> str:
    """Run the function of a program with words of a command line; return what it prints."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["program", *map(str, words)])
        assert not main()
    return said.getvalue()


def check_left(folder: Path, names: Collection[str], least: int = 80) -> None:
    """Check the names of the files in a folder, and that its pictures have a size and more than one colour."""
    assert {path.name for path in folder.iterdir()} == set(names)
    for path in folder.glob("*.png"):
        picture = imread(path)
        assert min(picture.shape[:2]) > least and picture.std() > 0.01, path


def readme(name: str) -> str:
    """Return the text of a study: its README.md, and its details.md with further tables."""
    folder = ROOT / "experiments" / name
    pages = [folder / "README.md", folder / "details.md"]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())
