"""Sentence embeddings with models in the format of the library `sentence-transformers`.

A folder of this format is one in Hugging Face format with additional files that describe the pooling.

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
from tricycle.pretrained.gguf import GGUFModel
from tricycle.pretrained.gguf_config import POOLING_TYPES
from tricycle.pretrained.hf_folder import read_optional_json
from tricycle.pretrained.stored_model import StoredModel, error_prefix
from tricycle.pretrained.tokenisers import PretrainedTokeniser, tokeniser_from_folder
from tricycle.sequences.text_encoder import SentencePooling, TextEncoder
from tricycle.system.files import read_json, read_json_object

MODULES = "modules.json"
POOLING = {"mean": "mean", "cls": "first"}  # names in sentence-transformers and in Tricycle
POOLING_PREFIX = "pooling_mode_"  # the prefix of flags in older files
POOLING_FLAGS = {"mean_tokens": "mean", "cls_token": "cls"}  # the rest of their names


class SentenceEncoder:
    """An encoder with its tokenizer and a pooling, which computes sentence embeddings.

    Args:
        model: computes a vector for each token.
        tokeniser: the tokenizer of the model.
        pooling: combines the vectors of a text; by default their mean.
        max_tokens: the length to which longer texts are truncated; None for the model's context window.
        lowercase: convert texts to lower case first.

    Raises:
        ValueError: `max_tokens` leaves no room besides the special tokens of every text.
    """

    def __init__(
        self,
        model: TextEncoder,
        tokeniser: PretrainedTokeniser,
        pooling: SentencePooling | None = None,
        max_tokens: int | None = None,
        lowercase: bool = False,
    ) -> None:
        window = model.config.context_window
        self.model = model
        self.tokeniser = tokeniser
        self.pooling = pooling or SentencePooling()
        self.max_tokens = min(max_tokens or window, window)
        self.lowercase = lowercase
        # A separate backend, because truncation is a setting of the backend.
        n_special = tokeniser.backend.num_special_tokens_to_add(False)
        if self.max_tokens <= n_special:
            raise ValueError(f"SentenceEncoder: expected max_tokens to be above {n_special}, got {self.max_tokens}")
        self._backend = type(tokeniser.backend).from_str(tokeniser.backend.to_str())
        self._backend.enable_truncation(self.max_tokens)

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Return float32 embeddings (N, C) of texts, stripped and truncated, in order; TypeError for one string.

        Args:
            batch_size: the number of texts in a batch; texts of similar lengths are batched together.

        Raises:
            TypeError: `texts` is a string.
            ValueError: the batch size is below 1.
        """
        if isinstance(texts, str):
            raise TypeError("SentenceEncoder: expected a list of texts, got one text")
        if batch_size < 1:
            raise ValueError(f"SentenceEncoder: expected batch_size to be at least 1, got {batch_size}")
        encodings = self._backend.encode_batch(self._clean(texts))
        order = np.argsort([len(encoding.ids) for encoding in encodings], kind="stable")
        vectors = np.empty((len(texts), self.model.config.embedding_dim), np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            vectors[rows] = self._encode_batch([encodings[row] for row in rows])
        return vectors

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text before truncation, including special tokens."""
        return [len(encoding.ids) for encoding in self.tokeniser.backend.encode_batch(self._clean(texts))]

    def _clean(self, texts: Sequence[str]) -> list[str]:
        """Return texts stripped of white space at the ends, and in lower case if the model requires it."""
        return [text.strip().lower() if self.lowercase else text.strip() for text in texts]

    def _encode_batch(self, encodings: list[Any]) -> np.ndarray:
        """Return the embeddings (N, C) of one batch of encodings, padded to the longest."""
        n_tokens = max(1, *(len(encoding.ids) for encoding in encodings))
        for encoding in encodings:
            encoding.pad(n_tokens)
        tokens, types = (np.array([getattr(each, name) for each in encodings]) for name in ("ids", "type_ids"))
        mask = np.array([encoding.attention_mask for encoding in encodings], bool)
        model = self.model
        with model.evaluating():
            known_types = model.place(types) if model.config.token_types > 1 else None
            return self.pooling(model(model.place(tokens), mask, known_types), mask).numpy()


def load_sentence_encoder(path_or_name: str | os.PathLike[str], weights: str = "float32") -> SentenceEncoder:
    """Load an encoder with its tokenizer and folder's pooling (mean without modules.json); ValueError if unsupported.

    Args:
        path_or_name: as of `pretrained.load`. Without a modules.json the pooling is the mean, not normalized.
        weights: as of `pretrained.load`.

    Raises:
        FileNotFoundError: as of `pretrained.load`.
        ValueError: as of `pretrained.load`, or the pooling is not supported.
    """
    return to_sentence_encoder(load(path_or_name, weights), path_or_name)


def to_sentence_encoder(loaded: Pretrained, path_or_name: str | os.PathLike[str]) -> SentenceEncoder:
    """Create a `SentenceEncoder` from a loaded encoder, its folder's pooling and limits; ValueError for other models.

    Raises:
        FileNotFoundError: the folder has no tokenizer.
        ValueError: the model is not an encoder, or its settings are not supported.
    """
    if loaded.source is None or not isinstance(loaded.model, TextEncoder):
        kind = type(loaded.model).__name__
        raise ValueError(f"{path_or_name}: expected an encoder, got a {kind}")
    path = loaded.source.path
    folder = path.parent if path.is_file() else path
    tokeniser = loaded.tokeniser or tokeniser_from_folder(folder)
    with error_prefix(f"{path_or_name}: "):
        limits = ConfigFields(read_optional_json(folder / "sentence_bert_config.json"))
        max_tokens = limits.optional_positive_int("max_seq_length", None)
        lowercase = limits.boolean("do_lower_case", False)
        if read_optional_json(folder / "config_sentence_transformers.json").get("default_prompt_name") is not None:
            raise ValueError("expected default_prompt_name to be null: prompts before texts are not supported")
        return SentenceEncoder(loaded.model, tokeniser, source_pooling(loaded.source), max_tokens, lowercase)


def source_pooling(source: StoredModel) -> SentencePooling:
    """Return the pooling of a loaded encoder, from its folder or its GGUF file; ValueError if it is not supported.

    A GGUF file has no normalization: programs that use it decide. 0 stands for no pooling; the mean is used as for
    folders without pooling.
    """
    path = source.path
    if not isinstance(source, GGUFModel):
        return read_pooling(path.parent if path.is_file() else path)
    modes = {0: "mean"} | {value: mode for mode, value in POOLING_TYPES.items()}
    key = f"{source.metadata.get('general.architecture')}.pooling_type"
    value = source.metadata.get(key, 0)
    if not isinstance(value, int) or value not in modes:
        raise field_error(key, " or ".join(map(str, modes)), value)
    return SentencePooling(modes[value], normalize=False)


def read_pooling(folder: Path) -> SentencePooling:
    """Return a folder's pooling (mean or first token, else ValueError) and normalization; mean without modules.json.

    Raises:
        ValueError: the folder has other modules than Transformer, Pooling and Normalize, or the pooling is not
            supported.
    """
    if not (folder / MODULES).is_file():
        return SentencePooling("mean", normalize=False)
    modules = _read_modules(folder / MODULES)
    types = [kind for kind, _ in modules]
    if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0][1] != "":
        described = ", ".join(f"{kind} in {place!r:.40}" for kind, place in modules)
        raise ValueError(f"expected modules Transformer in '', Pooling and optionally Normalize, got {described}")
    fields = read_json_object(folder / modules[1][1] / "config.json")
    if "pooling_mode" in fields:
        modes = [fields["pooling_mode"]]
    else:
        names = [name for name, value in fields.items() if name.startswith(POOLING_PREFIX) and value is True]
        modes = [POOLING_FLAGS.get(name, name) for name in (name.removeprefix(POOLING_PREFIX) for name in names)]
    if len(modes) != 1 or modes[0] not in list(POOLING):
        raise field_error("the pooling mode", f"one of {', '.join(POOLING)}", modes)
    return SentencePooling(POOLING[modes[0]], normalize="Normalize" in types)


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """Return [(class name without package, folder)] of the modules in modules.json; ValueError for an invalid one.

    Raises:
        ValueError: the file is not a list of objects, or a folder is outside that of the model.
    """
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{MODULES}: expected a list of objects")
    places = [module.get("path") for module in modules]
    for place in places:
        if not isinstance(place, str) or Path(place).name != place or "\\" in place or place == "..":
            raise ValueError(f"{MODULES}: expected path to be the name of a folder beside it, got {place!r:.80}")
    return [(str(module.get("type")).rpartition(".")[2], str(place)) for module, place in zip(modules, places)]
