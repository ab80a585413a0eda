"""The tokenizer of Marian models: the pieces of source.spm, with the ids of vocab.json."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tricycle.pretrained import tokenizer_json
from tricycle.pretrained.hf_folder import read_optional_json
from tricycle.pretrained.sentencepiece_model import unigram_document
from tricycle.pretrained.stored_model import error_prefix
from tricycle.pretrained.tokenisers import JSON_LIMITS, MAX_FILE_BYTES, PretrainedTokeniser, load_backend
from tricycle.system.files import read_file, read_json_object

SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class MarianTokeniser(PretrainedTokeniser):
    """A tokenizer whose source texts are split by a SentencePiece model, and whose ids are those of a vocabulary.

    Source and target share the vocabulary. A text may begin with the code of the target language, such as >>fr<<.

    Args:
        source: a tokenizer.json of the pieces of source texts.
        vocab: ids by piece; it contains "</s>" and "<unk>".

    Raises:
        ValueError: a token is missing, or an id is not a whole number.
    """

    def __init__(self, source: str, vocab: dict[str, int]) -> None:
        if not all(type(token) is int and 0 <= token < 2**31 for token in vocab.values()):
            raise ValueError("expected an id for each token of vocab.json")
        missing = [text for text in ("</s>", "<unk>") if text not in vocab]
        if missing:
            raise ValueError(f"expected {missing[0]} in vocab.json, got none")
        self._source, self._vocab = source, vocab
        added = [tokenizer_json.added_token(vocab[text], text) for text in SPECIAL.values() if text in vocab]
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
        document = tokenizer_json.new_document(model, added, decoder=tokenizer_json.metaspace())
        super().__init__(json.dumps(document), SPECIAL)

    # Cache: always valid, because the pieces never change.
    @cached_property
    def _splitters(self) -> dict[bool, Any]:
        """The backends that split texts into pieces, by `allowed_special`; cached."""
        backends = {allowed: load_backend(self._source) for allowed in (False, True)}
        backends[True].add_special_tokens([text for text in SPECIAL.values() if text in self._vocab])
        return backends

    def encode(self, text: str, add_special_tokens: bool = True, allowed_special: bool = True) -> list[int]:
        """Encode text to ids; a first ">>...<<" is one token; by default parse special names, and add "</s>".

        Args:
            add_special_tokens, allowed_special: see `PretrainedTokeniser.encode`.
        """
        end = text.find("<<") + 2 if text.startswith(">>") and "<<" in text else 0
        pieces = [text[:end]] if end else []
        pieces += self._splitters[allowed_special].encode(text[end:], add_special_tokens=False).tokens
        ids = [self._vocab.get(piece, self._vocab["<unk>"]) for piece in pieces]
        return [*ids, self._vocab["</s>"]] if add_special_tokens else ids

    def to_dict(self) -> dict[str, Any]:
        """Raise a ValueError, because a saved tokenizer has one vocabulary."""
        raise ValueError("expected a tokenizer with one vocabulary to save or export, got a Marian model's")

    def to_tokenizer_json(self) -> str:
        """Raise a ValueError as `to_dict`, because a tokenizer.json has one vocabulary."""
        return str(self.to_dict())

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a MarianTokeniser of the same documents."""
        return isinstance(other, MarianTokeniser) and self.__reduce__() == other.__reduce__()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return (class, arguments) for pickling: the source document and the vocabulary."""
        return MarianTokeniser, (self._source, self._vocab)


def has_marian_tokeniser(folder: Path) -> bool:
    """Return whether a folder has source.spm and vocab.json, and no tokenizer.json."""
    return [(folder / name).is_file() for name in ("source.spm", "vocab.json", "tokenizer.json")] == [True, True, False]


def marian_tokeniser_from_folder(folder: Path) -> MarianTokeniser:
    """Load source.spm, vocab.json and the optional tokenizer_config.json of a folder; ValueError if unsupported."""
    if read_optional_json(folder / "tokenizer_config.json", *JSON_LIMITS).get("separate_vocabs"):
        raise ValueError(f"{folder}: expected one vocabulary for source and target, got separate_vocabs")
    vocab = read_json_object(folder / "vocab.json", *JSON_LIMITS)
    path = folder / "source.spm"
    with error_prefix(f"{path}: "):
        document = json.dumps(unigram_document(read_file(path, MAX_FILE_BYTES)))
    with error_prefix(f"{folder / 'vocab.json'}: "):
        return MarianTokeniser(document, vocab)
