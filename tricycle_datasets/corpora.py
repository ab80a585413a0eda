"""The table of corpora that `tricycle train --data` can name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class CorpusEntry(NamedTuple):
    """The class of a corpus, and its description for the command line.

    Attributes:
        module, class_name: in `tricycle_datasets`.
        description: for help texts and documentation.
        prompts: prompts for samples of a model trained on the corpus.
        takes_files: whether the first argument of the class is a list of paths.
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
    """Return a corpus of CORPORA; train a missing `tokeniser` by the rule `split`; ValueError for too many tokens.

    Args:
        name: a key of `CORPORA`.
        files: text files or folders, for the corpus "text".
        model_vocab_size: the vocabulary size of the model, and of a tokenizer that is trained.
        split: the pre-tokenization rule of a tokenizer that is trained.
    """
    row = CORPORA[name]
    new_corpus = getattr(importlib.import_module(f"tricycle_datasets.{row.module}"), row.class_name)
    # the embedding of a pretrained model may have more rows than the tokenizer has tokens
    vocab_size = model_vocab_size if tokeniser is None else tokeniser.vocab_size
    corpus = new_corpus(*([list(files)] if row.takes_files else []), vocab_size, tokeniser=tokeniser, split=split)
    if corpus.tokeniser.n_vocab > model_vocab_size:
        raise ValueError(f"expected a tokeniser of at most {model_vocab_size} tokens, got {corpus.tokeniser.n_vocab}")
    return corpus
