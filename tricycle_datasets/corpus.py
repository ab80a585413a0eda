"""The base classes of corpora: tokenizer, cached token ids on disk, and held-out text."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tricycle.pretrained.tokenisers import load_tokeniser
from tricycle.system.files import add_path_to_errors, read_json
from tricycle.system.locks import FolderLock
from tricycle.tokeniser import BPETokeniser, Tokeniser
from tricycle_datasets.download import cache_folder, file_sha256

Document = tuple[bytes, bool]  # a text, and whether it is held out

DEFAULT_VOCAB_SIZE = 1024
HELD_OUT_BYTES = 4 * 10**6  # more would take longer at every final evaluation, for little more precision
SAMPLE_BYTES = 2**24  # the most training text that the tokenizer is trained on
_BLOCK = 2**16  # a larger training text is sampled evenly in blocks of this many bytes
_HASHED_AT_ONCE = 2**26  # bytes
_FORMAT = 2  # of the cache: increase it whenever the files of the same corpus change
_BUILDING = ".build-"  # the prefix of temporary folders
_FILES = ("tokeniser.json", "train.npy", "validation.npy", "validation.bin")


class Corpus:
    """Token ids of a collection of documents, ready for `CausalLMDataset`.

    `len(corpus)`, `corpus[i]`, `corpus[a:b]` and `np.asarray(corpus)` give the training tokens. Documents are separated
    by the end-of-text token. The token ids are computed once, one document at a time, and cached in `cache_folder()`. A
    cache entry is used only if it is undamaged and was made from the same texts with the same settings.

    Attributes:
        tokeniser: the given tokenizer, or one trained on the training documents.
        train: token ids, shape (n_train,), a read-only memory map.
        validation: token ids of the held-out documents, shape (n_validation,), a read-only memory map.
        validation_bytes: the concatenated held-out texts, which bits per byte are computed from.
        vocab_size: of the tokenizer.
        digest: a hash of all tokens and held-out texts.

    Args:
        name: the prefix of the cache folder's name.
        documents: a function that iterates over all documents; each call must give the same.
        vocab_size: of the tokenizer to train (default 1,024).
        tokeniser: a tokenizer to use instead.
        split: the pre-tokenization rule of the tokenizer to train, see `BPETokeniser`.
        fingerprint: identifies the documents, if hashing all of them takes too long.
        progress: show progress bars.

    Raises:
        ValueError: there is no training text or no held-out text, or vocab_size is not the tokenizer's.
    """

    def __init__(
        self,
        name: str,
        documents: Callable[[], Iterable[Document]],
        vocab_size: int | None = None,
        tokeniser: Tokeniser | None = None,
        *,
        split: str = "tricycle",
        fingerprint: str | None = None,
        progress: bool = True,
    ) -> None:
        if tokeniser is not None and vocab_size not in (None, tokeniser.vocab_size):
            raise ValueError(f"{name}: expected vocab_size {tokeniser.vocab_size}, the tokeniser's, got {vocab_size}")
        self.name, self._documents, self._progress = name, documents, progress
        self._given = tokeniser
        if vocab_size is None:
            vocab_size = tokeniser.vocab_size if tokeniser else DEFAULT_VOCAB_SIZE
        untrained = BPETokeniser(max(257, vocab_size) if tokeniser else vocab_size, split=split)
        self._n_train_bytes = 0  # 0 means unknown
        if fingerprint is None:
            fingerprint = self._survey()
        folder = self._folder(fingerprint, untrained, trained_here=True)
        # a resumed run passes the tokenizer that this corpus trained: the cached token ids are still valid
        if tokeniser and not (_intact(folder) and load_tokeniser(folder / "tokeniser.json") == tokeniser):
            folder = self._folder(fingerprint, tokeniser, trained_here=False)
        if not _intact(folder):
            with FolderLock(folder, wait=True):
                if not _intact(folder):  # another process may have built it meanwhile
                    self._build(folder, untrained)
        self.digest = _digest(folder)
        self.tokeniser = load_tokeniser(folder / "tokeniser.json")
        self.train = np.load(folder / "train.npy", mmap_mode="r", allow_pickle=False)
        self.validation = np.load(folder / "validation.npy", mmap_mode="r", allow_pickle=False)
        self._validation_file = folder / "validation.bin"

    @property
    def vocab_size(self) -> int:
        """Return the vocabulary size of the tokenizer."""
        return self.tokeniser.vocab_size

    # Cache: valid as long as the corpus, whose file is written once and checked by its hash.
    @cached_property
    def validation_bytes(self) -> bytes:
        """Return the bytes of the concatenated held-out texts."""
        return self._validation_file.read_bytes()

    def __len__(self) -> int:
        """Return the number of training tokens."""
        return len(self.train)

    def __getitem__(self, index: Any) -> Any:
        """Return training tokens at an index or a slice."""
        return self.train[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the training tokens as an array in memory."""
        return np.array(self.train, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        """Return the class name with vocabulary size and numbers of training and held-out tokens."""
        return (
            f"{type(self).__name__}(vocab_size={self.vocab_size}, {len(self.train):,} training and "
            f"{len(self.validation):,} held-out tokens)"
        )

    def _folder(self, fingerprint: str, tokeniser: Tokeniser, trained_here: bool) -> Path:
        """Return the path of the cache folder, not created, named by a hash of the texts and settings."""
        key = json.dumps([_FORMAT, fingerprint, tokeniser.to_dict(), trained_here, SAMPLE_BYTES, _BLOCK])
        return cache_folder() / "corpora" / f"{self.name}-{hashlib.sha256(key.encode('utf-8')).hexdigest()[:20]}"

    def _survey(self) -> str:
        """Read all documents once: add training bytes to `_n_train_bytes`; return a hash of the documents."""
        digest = hashlib.sha256()
        for text, held_out in self._documents():
            digest.update(f"{len(text)} {held_out} ".encode())
            for start in range(0, len(text), _HASHED_AT_ONCE):  # signals are handled between two blocks
                digest.update(text[start : start + _HASHED_AT_ONCE])
            self._n_train_bytes += 0 if held_out else len(text)
        return digest.hexdigest()

    def _build(self, folder: Path, untrained: BPETokeniser) -> None:
        """Encode the texts by the given or a newly trained tokenizer; write the cache's files, moved when complete.

        The hashes are moved last: without them the other files are ignored. The caller holds the folder's lock, so
        temporary folders of processes that were killed can be removed.
        """
        for left_over in folder.glob(f"{_BUILDING}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        with add_path_to_errors(folder), tempfile.TemporaryDirectory(dir=folder, prefix=_BUILDING) as temporary:
            self._write(Path(temporary), self._given or untrained.train(self._sample(), self._progress))
            paths = {name: Path(temporary, name) for name in _FILES}
            hashes = json.dumps({name: (path.stat().st_size, file_sha256(path)) for name, path in paths.items()})
            Path(temporary, "hashes.json").write_text(hashes, encoding="utf-8")
            try:
                for name in (*_FILES, "hashes.json"):
                    os.replace(Path(temporary, name), folder / name)
            except PermissionError:  # on Windows: another process has moved its files there, and has them open
                if not _intact(folder):
                    raise

    def _sample(self) -> Iterator[bytes]:
        """Yield training text for the tokenizer, at most SAMPLE_BYTES, sampled evenly if the total size is known."""
        everything = not self._n_train_bytes or self._n_train_bytes <= SAMPLE_BYTES
        seen = n_bytes = 0
        for text, held_out in self._documents():
            if held_out:
                continue
            size = max(1, len(text)) if everything else _BLOCK
            for start in range(0, len(text), size):
                block = text[start : start + size]
                seen += len(block)
                budget = SAMPLE_BYTES if everything else SAMPLE_BYTES * seen // self._n_train_bytes
                if n_bytes < budget:
                    yield block[: budget - n_bytes]
                    n_bytes += min(len(block), budget - n_bytes)
            if n_bytes == SAMPLE_BYTES:
                return

    def _write(self, folder: Path, tokeniser: Tokeniser) -> None:
        """Write tokenizer, training tokens, held-out tokens and bytes; raise ValueError if a part is empty."""
        from tqdm import tqdm

        tokeniser.save(folder / "tokeniser.json")
        with (
            open(folder / "train.npy", "wb") as train_file,
            open(folder / "validation.npy", "wb") as validation_file,
            open(folder / "validation.bin", "wb") as raw,
            tqdm(desc=f"Encoding {self.name}", unit="B", unit_scale=True, disable=not self._progress) as bar,
        ):
            train, validation = _TokenWriter(train_file, tokeniser), _TokenWriter(validation_file, tokeniser)
            for text, held_out in self._documents():
                if not text:
                    continue
                (validation if held_out else train).add(text)
                if held_out:
                    raw.write(text)
                bar.update(len(text))
            for writer, purpose in ((train, "to train on"), (validation, "held out for validation")):
                if writer.n_tokens == 0:
                    raise ValueError(f"{self.name}: expected some text {purpose}, got none")
                writer.finish()


class HubCorpus(Corpus):
    """A corpus that is streamed from the Hugging Face hub and tokenized to disk.

    Every 20th document is held out, up to `held_out_bytes` in all. The tokenizer is trained on the first documents.
    Requires `pip install "tricycle-gpt[datasets]"`.

    Args:
        vocab_size, tokeniser, options (`split` and `progress`): see `Corpus`.
        max_bytes: stop before the document that would exceed this many bytes of text.
        n_documents: stop after this many documents (default: no limit).
        revision: of the dataset. Name a commit to pin it: the cache does not detect changes of a branch.
        held_out_bytes: the most bytes to hold out.

    Raises:
        ImportError: Hugging Face `datasets` is not installed.
        ValueError: a limit is not a positive integer; or see `Corpus`.
    """

    hub_path: str
    hub_config: str | None = None
    text_field: str = "text"

    def __init__(
        self,
        vocab_size: int | None = None,
        tokeniser: Tokeniser | None = None,
        *,
        max_bytes: int = 10**9,
        n_documents: int | None = None,
        revision: str = "main",
        held_out_bytes: int = HELD_OUT_BYTES,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        limits = {"max_bytes": max_bytes, "n_documents": n_documents, "held_out_bytes": held_out_bytes}
        for limit, value in limits.items():
            if not (isinstance(value, int) and value > 0) and (limit, value) != ("n_documents", None):
                raise ValueError(f"{name}: expected {limit} to be a positive integer, got {value!r}")

        def documents() -> Iterator[Document]:
            try:
                from datasets import load_dataset
            except ImportError:
                message = f'{name} is streamed by Hugging Face datasets: pip install "tricycle-gpt[datasets]"'
                raise ImportError(message) from None
            rows = load_dataset(self.hub_path, name=self.hub_config, split="train", streaming=True, revision=revision)
            n_bytes = n_held_out = 0
            for i, row in enumerate(islice(rows, n_documents)):
                text = row[self.text_field].encode("utf-8", "surrogatepass")
                n_bytes += len(text)
                if n_bytes > max_bytes:
                    return
                held_out = i % 20 == 0 and n_held_out + len(text) <= held_out_bytes
                n_held_out += len(text) if held_out else 0
                yield text, held_out

        fingerprint = json.dumps([self.hub_path, self.hub_config, self.text_field, revision, limits])
        super().__init__(name.lower(), documents, vocab_size, tokeniser, fingerprint=fingerprint, **options)


def is_held_out(path: str) -> bool:
    """Return whether a file is held out: whether the SHA-256 of its relative POSIX path is 0 modulo 20."""
    return int(hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest(), 16) % 20 == 0


def hold_out_tail(text: bytes) -> Iterator[Document]:
    """Yield (text, is held out) for the training part and the tail: the last tenth, at most HELD_OUT_BYTES."""
    cut = len(text) - min(len(text) // 10, HELD_OUT_BYTES)
    yield text[:cut], False
    yield text[cut:], True


class _TokenWriter:
    """A writer of a one-dimensional .npy file whose length is known only at the end."""

    def __init__(self, file: BinaryIO, tokeniser: Tokeniser) -> None:
        self.file, self.tokeniser = file, tokeniser
        self.n_tokens = 0
        self._write_header()

    def add(self, text: bytes) -> None:
        """Append the tokens of a text to the file, after an end-of-text token unless the text is the first."""
        ids = self.tokeniser.encode_plain(text)
        if self.n_tokens:
            ids = np.concatenate([[self.tokeniser.end_of_text], ids]).astype(ids.dtype)
        self.file.write(ids.tobytes())
        self.n_tokens += len(ids)

    def finish(self) -> None:
        """Write the number of tokens into the header; do not close the file."""
        # NumPy pads its headers, so the header of a longer array has the same size
        self.file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        """Write a .npy header of the present number of tokens at the file's position."""
        header = {"descr": self.tokeniser.dtype.str, "fortran_order": False, "shape": (self.n_tokens,)}
        np.lib.format.write_array_header_1_0(self.file, header)


def _intact(folder: Path) -> bool:
    """Return whether all files of a cache folder have the sizes and hashes stored when it was built.

    Sizes are compared first, because to hash a device, or a file that a disk error has made huge, would not end.
    """
    try:
        stored = read_json(folder / "hashes.json")
        files = [(folder / name, *stored[name]) for name in _FILES]
        if not all(path.is_file() and path.stat().st_size == size for path, size, _ in files):
            return False
        return all(file_sha256(path) == sha256 for path, _, sha256 in files)
    except (OSError, ValueError, TypeError, LookupError):
        return False


def _digest(folder: Path) -> str:
    """Return a hash (20 hexadecimal digits) of the tokens and texts, from the folder's hashes.json."""
    stored = read_json(folder / "hashes.json")
    return hashlib.sha256("".join(stored[name][1] for name in _FILES).encode("ascii")).hexdigest()[:20]
