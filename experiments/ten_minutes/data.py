"""Training and validation texts, without the held-out text of the final evaluation."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.shared.texts import plays, python_files, python_root
from tricycle_datasets.corpus import Corpus, Document, is_held_out
from tricycle_datasets.python_code import PythonCode
from tricycle_datasets.shakespeare import Shakespeare
from tricycle_datasets.text import TextFiles, find_text_files

Files = Iterable[str | os.PathLike[str]]

DATA = ("python", "shakespeare", "text")
PARTS = ("validation", "held-out")


def load(data: str, part: str, vocab_size: int, files: Files = (), progress: bool = False) -> Corpus:
    """Return a Corpus whose validation half is the text to score, `part` "validation" or "held-out"; else ValueError.

    With "validation" the held-out text is in neither half: a twentieth of the other files is for validation, or of one
    text the tenth before the last. With "held-out" the corpus is the one that `train_smol_gpt.py` trains on.

    Args:
        data: in DATA.
        files: files or folders, for "text".

    Raises:
        ValueError: an unknown name, no text, or see `Corpus`.
    """
    if data not in DATA or part not in PARTS:
        raise ValueError(f"expected one of {', '.join(DATA)} and one of {', '.join(PARTS)}, got {data} and {part}")
    if part == "held-out":
        if data == "text":
            return TextFiles(files, vocab_size, progress=progress)
        return (PythonCode if data == "python" else Shakespeare)(vocab_size, progress=progress)
    if data == "shakespeare":
        texts = list(hold_out_tenth_before_last(plays()))
    else:
        texts = list(python_documents() if data == "python" else text_documents(files))
    return Corpus(f"ten_minutes_{data}", lambda: texts, vocab_size, progress=progress)


def is_for_validation(path: str) -> bool:
    """Return whether a file is for validation: its path's SHA-256 is 1 modulo 20 (`is_held_out` uses 0)."""
    return int(hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest(), 16) % 20 == 1


# -------------------------------------------------------------------- documents
def python_documents() -> Iterator[Document]:
    """Yield (bytes, is for validation) of each file of the standard library that is not held out."""
    for name in python_files():
        if not is_held_out(name):
            yield (python_root() / name).read_bytes(), is_for_validation(name)


def text_documents(paths: Files) -> Iterator[Document]:
    """Yield (bytes, is for validation) of what `TextFiles` does not hold out: whole files, or two parts of each."""
    files: dict[Path, str] = {}
    for root in map(Path, paths):
        for path, name in find_text_files(root):
            files.setdefault(path.resolve(), name)
    by_path = len({is_held_out(name) for name in files.values()}) == 2
    kept = {path: name for path, name in files.items() if not (by_path and is_held_out(name))}
    whole_files = by_path and len({is_for_validation(name) for name in kept.values()}) == 2
    for path, name in kept.items():
        if whole_files:
            yield path.read_bytes(), is_for_validation(name)
        elif by_path:  # what is held out are other files: the last tenth of these may be looked at
            text = path.read_bytes()
            cut = len(text) - len(text) // 10
            yield from ((text[:cut], False), (text[cut:], True))
        else:
            yield from hold_out_tenth_before_last(path.read_bytes())


def hold_out_tenth_before_last(text: bytes) -> Iterator[Document]:
    """Yield (first eight tenths, False) and (ninth tenth, True) of a text; the last tenth is left out."""
    tenth = len(text) // 10
    end = len(text) - tenth
    yield text[: end - tenth], False
    yield text[end - tenth : end], True
