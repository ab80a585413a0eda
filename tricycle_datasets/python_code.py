"""A corpus of Python code: the standard library of the running interpreter, which needs no download."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tricycle.system.files import add_path_to_errors
from tricycle.tokeniser import Tokeniser
from tricycle_datasets.corpus import Corpus, Document, is_held_out

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages"}


class PythonCode(Corpus):
    """The corpus of Python's standard library: each .py file is a document, about one in twenty is held out.

    The documents are in the order of their paths; `is_held_out` selects the held-out files.

    Args:
        vocab_size, tokeniser, options (`split` and `progress`): see `Corpus`.

    Raises:
        ValueError: this Python has no source files (as some embedded ones); or see `Corpus`.
    """

    def __init__(self, vocab_size: int | None = None, tokeniser: Tokeniser | None = None, **options: Any) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        names = source_files(root)
        if not names:
            raise ValueError(f"PythonCode: expected the standard library's .py files under {root}, got none")

        def documents() -> Iterator[Document]:
            for name in names:
                with add_path_to_errors(root / name):
                    text = (root / name).read_bytes()
                yield text, is_held_out(name)

        super().__init__("python_code", documents, vocab_size, tokeniser, **options)


def source_files(root: Path) -> list[str]:
    """Return the sorted paths, relative to `root`, of the .py files outside SKIPPED_FOLDERS."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]  # `os.walk` skips them too
        paths = [Path(folder, name) for name in files if name.endswith(".py")]
        # Debian's sitecustomize.py is a link to /etc, which some containers delete.
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)
