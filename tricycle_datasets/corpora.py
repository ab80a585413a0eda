"""The texts that `tricycle train` learns from, one row each."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class CorpusEntry(NamedTuple):
    """A corpus: the class that prepares it, and what programs need to know of it.

    Attributes:
        module, class_name: in `tricycle_datasets`.
        description: for help texts and documentation.
        prompts: beginnings that suit samples of it.
        takes_files: whether the class takes paths first.
    """

    module: str
    class_name: str
    description: str
    prompts: tuple[str, ...] = ("",)
    takes_files: bool = False


CODE = ("", "def ", "class ")
CORPORA = {
    "python": CorpusEntry("python_code", "PythonCode", "Python's standard library", CODE),
    "shakespeare": CorpusEntry("shakespeare", "Shakespeare", "tiny Shakespeare"),
    "text": CorpusEntry("text", "TextFiles", "your own --files", takes_files=True),
    "codeparrot": CorpusEntry("codeparrot", "CodeParrot", "Python code of GitHub, streamed", CODE),
    "fineweb": CorpusEntry("fineweb", "FineWeb", "English web pages, streamed"),
}


def load_corpus(
    name: str, files: Sequence[Path], model_vocab_size: int, tokeniser: Any = None, split: str = "tricycle"
) -> Any:
    """Return a prepared corpus.

    Args:
        name: of `CORPORA`.
        files: text files or folders, where the corpus takes them.
        model_vocab_size: tokens that the model knows; without a tokeniser, the corpus learns one of that many tokens.
        split: the rule that cuts text before a tokeniser is learnt.

    Raises:
        ValueError: a tokeniser of more tokens than the model knows.
    """
    row = CORPORA[name]
    new_corpus = getattr(importlib.import_module(f"tricycle_datasets.{row.module}"), row.class_name)
    # pretrained models may have more rows than tokens
    vocab_size = model_vocab_size if tokeniser is None else tokeniser.vocab_size
    corpus = new_corpus(*([list(files)] if row.takes_files else []), vocab_size, tokeniser=tokeniser, split=split)
    if corpus.tokeniser.n_vocab > model_vocab_size:
        raise ValueError(f"expected a tokeniser of at most {model_vocab_size} tokens, got {corpus.tokeniser.n_vocab}")
    return corpus
