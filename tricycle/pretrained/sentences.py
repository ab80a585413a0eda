"""Texts to vectors, by models in the form of the library `sentence-transformers`.

Such a folder is one in Hugging Face's form, and beside it files that say how one vector is made of those of all tokens.

Shapes: N texts, C channels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.pretrained import Pretrained, load
from tricycle.pretrained.config_fields import ConfigFields, field_error
from tricycle.pretrained.stored_model import error_prefix
from tricycle.pretrained.tokenisers import PretrainedTokeniser, tokeniser_from_folder
from tricycle.sequences.text_encoder import SentencePooling, TextEncoder
from tricycle.system.files import read_json, read_json_object

MODULES = "modules.json"
KINDS = {"mean": "mean", "cls": "first"}  # their words for ways of pooling, and ours
FLAG = "pooling_mode_"  # what begins the names of flags in older files
FLAGS = {"mean_tokens": "mean", "cls_token": "cls"}  # what ends them


class SentenceEncoder:
    """An encoder with its tokeniser, and what makes one vector of a text.

    Args:
        model: gives a vector for each token.
        tokeniser: of the model.
        pooling: makes one of these.
        longest: longer texts are cut to so many tokens; None for the model's context window.
        lower: write texts in small letters first.

    Raises:
        ValueError: `longest` has no room for more than the tokens that stand around every text.
    """

    def __init__(
        self,
        model: TextEncoder,
        tokeniser: PretrainedTokeniser,
        pooling: SentencePooling | None = None,
        longest: int | None = None,
        lower: bool = False,
    ) -> None:
        window = model.config.context_window
        self.model = model
        self.tokeniser = tokeniser
        self.pooling = pooling or SentencePooling()
        self.longest = min(longest or window, window)
        self.lower = lower
        # one of its own, for to cut texts off is a setting
        n_around = tokeniser.backend.num_special_tokens_to_add(False)
        if self.longest <= n_around:
            raise ValueError(f"SentenceEncoder: expected longest to be above {n_around}, got {self.longest}")
        self._backend = type(tokeniser.backend).from_str(tokeniser.backend.to_str())
        self._backend.enable_truncation(self.longest)

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """A vector for each text, (N, C) in float32.

        Args:
            batch_size: texts that are computed side by side, those of like length together.

        Raises:
            TypeError: one text in place of a list of them.
            ValueError: a batch size below 1.
        """
        if isinstance(texts, str):
            raise TypeError("SentenceEncoder: expected a list of texts, got one text")
        if batch_size < 1:
            raise ValueError(f"SentenceEncoder: expected batch_size to be at least 1, got {batch_size}")
        encodings = self._backend.encode_batch(self._cleaned(texts))
        order = np.argsort([len(encoding.ids) for encoding in encodings], kind="stable")
        vectors = np.empty((len(texts), self.model.config.embedding_dim), np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            vectors[rows] = self._encode([encodings[row] for row in rows])
        return vectors

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has before it is cut, those around it included."""
        return [len(encoding.ids) for encoding in self.tokeniser.backend.encode_batch(self._cleaned(texts))]

    def _cleaned(self, texts: Sequence[str]) -> list[str]:
        return [text.strip().lower() if self.lower else text.strip() for text in texts]

    def _encode(self, encodings: list[Any]) -> np.ndarray:
        """Of one batch."""
        shape = len(encodings), max(1, *(len(encoding.ids) for encoding in encodings))
        tokens = np.zeros(shape, int)
        types = np.zeros(shape, int)
        mask = np.zeros(shape, bool)
        for row, encoding in enumerate(encodings):
            n_tokens = len(encoding.ids)
            tokens[row, :n_tokens] = encoding.ids
            types[row, :n_tokens] = encoding.type_ids
            mask[row, :n_tokens] = True
        model = self.model
        with model.evaluating():
            known_types = model.place(types) if model.config.token_types > 1 else None
            return self.pooling(model(model.place(tokens), mask, known_types), mask).numpy()


def load_sentences(path_or_name: str | os.PathLike[str], weights: str = "float32") -> SentenceEncoder:
    """A model of sentence embeddings that somebody has trained.

    Args:
        path_or_name, weights: as of `pretrained.load`. Where a folder has no modules.json, the mean of all tokens is
            taken, and its length left as it is.

    Raises:
        FileNotFoundError, ValueError: as of `pretrained.load`; or a way of pooling that is not known here.
    """
    return sentences_of(load(path_or_name, weights), path_or_name)


def sentences_of(loaded: Pretrained, path_or_name: str | os.PathLike[str]) -> SentenceEncoder:
    """The same from what `pretrained.load` gave for that path or name.

    Raises:
        FileNotFoundError, ValueError: as of `load_sentences`.
    """
    if loaded.source is None or not isinstance(loaded.model, TextEncoder):
        kind = type(loaded.model).__name__
        raise ValueError(f"{path_or_name}: expected an encoder, got a {kind}, which writes texts")
    path = loaded.source.path
    folder = path.parent if path.is_file() else path
    tokeniser = loaded.tokeniser or tokeniser_from_folder(folder)
    with error_prefix(f"{path_or_name}: "):
        limits = ConfigFields(_object(folder / "sentence_bert_config.json"))
        longest = limits.optional_positive_int("max_seq_length", None)
        lower = limits.boolean("do_lower_case", False)
        if _object(folder / "config_sentence_transformers.json").get("default_prompt_name") is not None:
            raise ValueError("expected default_prompt_name to be null: no prompt is put before texts here")
        return SentenceEncoder(loaded.model, tokeniser, read_pooling(folder), longest, lower)


def read_pooling(folder: Path) -> SentencePooling:
    """What comes after the transformer.

    Raises:
        ValueError: another module than pooling and then to bring vectors to length 1; or a way of pooling that is not
            known here.
    """
    if not (folder / MODULES).is_file():
        return SentencePooling("mean", normalize=False)
    modules = _modules(folder / MODULES)
    types = [kind for kind, _ in modules]
    if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0][1] != "":
        described = ", ".join(f"{kind} in {place!r:.40}" for kind, place in modules)
        raise ValueError(f"expected modules Transformer in '', Pooling and perhaps Normalize, got {described}")
    fields = read_json_object(folder / modules[1][1] / "config.json")
    flags = [name.removeprefix(FLAG) for name, value in fields.items() if name.startswith(FLAG) and value is True]
    kinds = [fields["pooling_mode"]] if "pooling_mode" in fields else [FLAGS.get(flag, flag) for flag in flags]
    if len(kinds) != 1 or kinds[0] not in list(KINDS):
        raise field_error("the way of pooling", f"one of {', '.join(KINDS)}", kinds)
    return SentencePooling(KINDS[kinds[0]], normalize="Normalize" in types)


def _modules(path: Path) -> list[tuple[str, str]]:
    """What a text goes through: the last word of a class's name, and the folder with its files.

    Raises:
        ValueError: no such list, or a folder that lies elsewhere.
    """
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{MODULES}: expected a list of objects")
    places = [module.get("path") for module in modules]
    for place in places:
        if not isinstance(place, str) or Path(place).name != place or "\\" in place or place == "..":
            raise ValueError(f"{MODULES}: expected the name of a folder beside it as path, got {place!r:.80}")
    return [(str(module.get("type")).rpartition(".")[2], str(place)) for module, place in zip(modules, places)]


def _object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
