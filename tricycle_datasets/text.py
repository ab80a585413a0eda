"""A corpus of the user's text files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tricycle.system.files import add_path_to_errors
from tricycle.tokeniser import Tokeniser
from tricycle_datasets.corpus import HELD_OUT_BYTES, Corpus, Document, hold_out_tail, is_held_out


class TextFiles(Corpus):
    """The corpus of the user's text files: each file is a document.

    `is_held_out` selects the held-out files by their path in the folder, or by their name. If it selects none or all of
    them, the last tenth of each file is held out.

    Args:
        paths: a file or a folder, or several. In folders, binary files and names that begin with a dot are skipped.
        vocab_size, tokeniser, options (`split` and `progress`): see `Corpus`.

    Raises:
        ValueError: a path does not exist, a file given by path is binary, there is no text; or see `Corpus`.
        OSError: a file cannot be read.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        vocab_size: int | None = None,
        tokeniser: Tokeniser | None = None,
        **options: Any,
    ) -> None:
        roots = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
        # a file that is reached by several paths is read once, with the name of the first
        files: dict[Path, str] = {}
        for root in roots:
            for path, name in find_text_files(root):
                files.setdefault(path.resolve(), name)
        if not files:
            raise ValueError(f"TextFiles: expected text files, found none in {[str(root) for root in roots]}")
        by_path = len({is_held_out(name) for name in files.values()}) == 2

        def documents() -> Iterator[Document]:
            left = HELD_OUT_BYTES
            for path, name in files.items():
                with add_path_to_errors(path):
                    text = path.read_bytes()
                if not by_path:
                    yield from hold_out_tail(text)
                else:
                    # the first one is held out whatever its size, so that there is some held-out text
                    held_out = is_held_out(name) and (left == HELD_OUT_BYTES or len(text) <= left)
                    left -= len(text) if held_out else 0
                    yield text, held_out

        super().__init__("text", documents, vocab_size, tokeniser, **options)


def find_text_files(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, name) of a text file, or ValueError; of a folder, all sorted ones not hidden, empty or binary."""
    if root.is_file():
        if _is_binary(root):
            raise ValueError(f"TextFiles: expected a text file, got one with NUL bytes (binary, or UTF-16): {root}")
        if not root.stat().st_size:
            raise ValueError(f"TextFiles: expected a text file, got an empty one: {root}")
        yield root, root.name
    elif root.is_dir():
        names = {path: path.relative_to(root) for path in root.rglob("*") if path.is_file()}
        for path, name in sorted(names.items(), key=lambda item: item[1].as_posix()):
            if not any(part.startswith(".") for part in name.parts) and path.stat().st_size and not _is_binary(path):
                yield path, name.as_posix()
    else:
        raise ValueError(f"TextFiles: expected a file or a folder, but there is none at {root}")


def _is_binary(path: Path) -> bool:
    """Return whether the first 8 KiB of a file contain a NUL byte."""
    with open(path, "rb") as file:
        return b"\0" in file.read(2**13)
