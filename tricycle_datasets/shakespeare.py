"""The tiny Shakespeare corpus: 1.1 MB of plays in one file, from Andrej Karpathy's char-rnn."""

from __future__ import annotations

from typing import Any

from tricycle.tokeniser import Tokeniser
from tricycle_datasets.corpus import Corpus, hold_out_tail
from tricycle_datasets.download import fetch

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class Shakespeare(Corpus):
    """The tiny Shakespeare corpus; the last tenth of its bytes is held out.

    Args:
        vocab_size, tokeniser, options (`split` and `progress`): see `Corpus`.

    Raises:
        OSError: the file is missing and could not be downloaded; the message says where to put it.
        ValueError: the local file has another hash; or see `Corpus`.
    """

    def __init__(self, vocab_size: int | None = None, tokeniser: Tokeniser | None = None, **options: Any) -> None:
        text = fetch("input.txt", URL, SHA256, folder="tinyshakespeare").read_bytes()
        super().__init__("shakespeare", lambda: hold_out_tail(text), vocab_size, tokeniser, **options)
