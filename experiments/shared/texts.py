"""Texts shared by several studies: held-out tokens, Python's standard library, and Shakespeare's plays."""

import codecs
import sysconfig
from pathlib import Path

import numpy as np

from tricycle.evaluation import HeldOut
from tricycle_datasets.corpus import Corpus
from tricycle_datasets.download import fetch
from tricycle_datasets.python_code import source_files
from tricycle_datasets.shakespeare import SHA256, URL


def held_out(corpus: Corpus) -> HeldOut:
    """Return the corpus's validation half as HeldOut int64 tokens, after an end-of-text token."""
    tokens = np.concatenate([[corpus.tokeniser.end_of_text], corpus.validation]).astype(np.int64)
    return HeldOut(tokens, len(corpus.validation_bytes))


def python_root() -> Path:
    """Return the folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def python_files() -> list[str]:
    """Return the sorted paths, relative to `python_root`, of all files of `PythonCode`, held-out ones too."""
    return source_files(python_root())


def zen() -> str:
    """Return "The Zen of Python", read from the source of its module, which prints it when it is imported."""
    source = (python_root() / "this.py").read_text(encoding="utf-8")
    return codecs.decode(source.split('"""')[1], "rot13")


def plays() -> bytes:
    """Return the bytes of Tiny Shakespeare (1.1 million); download if necessary; OSError, ValueError as of `fetch`."""
    return fetch("input.txt", URL, SHA256, folder="tinyshakespeare").read_bytes()
