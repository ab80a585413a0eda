"""The tokenizer protocols, and `BPETokeniser`, a byte-level BPE tokenizer that is saved as JSON."""

from __future__ import annotations

import codecs
import heapq
import json
import os
import re
import reprlib
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from tricycle.bpe import END_OF_TEXT, LETTER, PIECE, ByteLevelBPE, PiecesAndIds
from tricycle.system.files import atomic_write, read_json

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SPLITS = ("tricycle", "gpt2")
MAX_BYTES = 2**26  # the maximum size of a file
# All patterns here start a new piece between a letter and a space, so a text may be split there.
_SAFE_CUT = re.compile(rf"(?<=[{LETTER}])(?=[ \n])")
_CHUNK = 2**18  # characters; bounds memory and the backtracking of GPT-2's look-ahead
# The white space of Unicode; Python's \\s has four more control characters.
_ANY_SPACE = r"\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # how errors="surrogateescape" decodes such bytes
_LONGEST_KEPT, _MOST_KEPT = 64, 2**17  # the maximum length and number of cached pieces
_FORMAT = {"format": "tricycle-bpe", "version": 1}


class TextStream(Protocol):
    """The protocol of incremental decoders of token ids.

    `"".join([*map(stream.push, ids), stream.flush()])` equals `decode(ids)`.
    """

    def push(self, ids: Any) -> str:
        """Decode one or several further ids; return the completed characters, possibly none."""

    def flush(self) -> str:
        """End the text; return U+FFFD for incomplete bytes, or an empty string."""


class Tokeniser(Protocol):
    """The protocol of tokenizers."""

    @property
    def n_vocab(self) -> int:
        """The number of ids."""

    @property
    def vocab_size(self) -> int:
        """The minimum vocabulary size of a model for this tokenizer."""

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ids."""

    @property
    def start_of_text(self) -> int | None:
        """The id that begins every text, or None."""

    @property
    def end_of_text(self) -> int:
        """The id that separates documents."""

    @property
    def new_text(self) -> int:
        """The id after which a model generates text without a prompt."""

    @property
    def chat_template(self) -> str | None:
        """The chat template of the model, used by `chat`, or None."""

    def encode(self, text: str) -> Any:
        """Encode a text to ids (T,), including the special tokens that the model expects."""

    def encode_plain(self, text: str | bytes) -> np.ndarray:
        """Encode a text to ids (T,) without special tokens: none is parsed from the text, and none is added."""

    def decode(self, ids: Any) -> str:
        """Decode ids to text."""

    def stream(self, seen: Any = ()) -> TextStream:
        """Return an incremental decoder of the ids that follow those in `seen`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the complete tokenizer as a dict of JSON-serializable values."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer to a JSON file, atomically; replace an existing file."""


class BPETokeniser(ByteLevelBPE):
    """A byte-level BPE tokenizer with lossless encoding of any bytes.

    Ids: the 256 bytes, then the merges in order of training, then the special tokens. Before `train` there are no
    merges, and text is encoded as bytes. Bytes that are not UTF-8 become one token each.

    Args:
        vocab_size: the maximum number of ids, including the 256 bytes and the special tokens. A small training text may
            yield fewer: `n_vocab` is the actual number.
        special_tokens: names of ids that do not encode text. Such a name in a text is encoded as ordinary text, see
            `encode`.
        split: the pre-tokenization pattern: "tricycle", or "gpt2", which other programs support.

    Raises:
        ValueError: a vocabulary too small for the bytes and the special tokens, bad special tokens, an unknown split.
    """

    def __init__(
        self, vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,), split: str = "tricycle"
    ) -> None:
        names = [special_tokens] if isinstance(special_tokens, str) else list(special_tokens)
        sound = all(isinstance(name, str) and name and not _SURROGATE.search(name) for name in names)
        _expect(sound and len(set(names)) == len(names), "special_tokens to be distinct texts, none empty", names)
        at_least = 256 + len(names)
        sound = isinstance(vocab_size, (int, np.integer)) and not isinstance(vocab_size, bool)
        what = f"vocab_size from {at_least} (256 bytes, {len(names)} special tokens) to 2**32"
        _expect(sound and at_least <= vocab_size <= 2**32, what, vocab_size)
        _expect(split in SPLITS, f"split {' or '.join(SPLITS)}", split)
        self._split = split
        super().__init__(int(vocab_size), names)

    def _set_tokens(self, tokens: list[bytes]) -> None:
        """Replace all tokens (the first 256 are single bytes) and discard the compiled encoder."""
        super()._set_tokens(tokens)
        # The first 256 tokens are the single bytes in some order; this inverts it.
        self._byte_ids = np.argsort([token[0] for token in tokens[:256]])
        self._encoding: Any = None  # created on first use

    @property
    def pattern(self) -> str:
        """The regular expression for Python's `re` that splits text into pieces."""
        return gpt2_pattern() if self._split == "gpt2" else super().pattern

    # sizes and single tokens

    def __len__(self) -> int:
        """Return the number of ids, `n_vocab`."""
        return self.n_vocab

    @property
    def end_of_text(self) -> int:
        """The id that separates documents, of <|endoftext|>; ValueError if the tokenizer has none."""
        _expect(END_OF_TEXT in self.special_tokens, f"{END_OF_TEXT} among the special tokens", self._special_names)
        return self.special_tokens[END_OF_TEXT]

    @property
    def start_of_text(self) -> int:
        """The same id as `end_of_text`; ValueError if the tokenizer has no <|endoftext|>."""
        return self.end_of_text

    new_text = start_of_text
    chat_template: None = None

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id; a special token gives its name."""
        return self.decode_bytes([token])

    # training, encoding and decoding

    def train(self, text: str | bytes | Iterable[str | bytes], progress: bool = True) -> Self:
        """Learn merges from texts (ValueError if empty), replacing earlier ones; skip invalid UTF-8; return self."""
        texts = [text] if isinstance(text, (str, bytes, bytearray)) else text
        chunks = (chunk for one in texts for run in _runs(one)[::2] for chunk in _chunks(run))
        pieces_and_ids = self._learn(chunks, progress)
        self._encoding = self._new_encoding()
        if isinstance(self._encoding, PieceIds):  # the texts are likely to be encoded next
            self._encoding.keep(pieces_and_ids)
        return self

    def encode(self, text: str | bytes, allowed_special: bool = False) -> np.ndarray:
        """Encode a text to token ids (T,) of an unsigned dtype; names of special tokens are text unless allowed.

        Args:
            text: a str, or any bytes. Lone surrogates in a str are encoded as by Python's "surrogatepass".
            allowed_special: whether to parse names of special tokens as these tokens; use False for untrusted text.
        """
        special, runs = self.special_tokens if allowed_special else {}, _runs(text)
        if not special and len(runs) == 1 and len(runs[0]) <= _CHUNK:
            return self._encode_run(runs[0])
        # longest first, should one name begin with another
        names = "|".join(sorted(map(re.escape, special), key=len, reverse=True))
        encode, parts = self._encode_run, [np.empty(0, self.dtype)]
        for i, run in enumerate(runs):
            if i % 2:
                parts.append(self._byte_ids[np.frombuffer(run.encode("utf-8", "surrogateescape"), np.uint8)])
                continue
            for piece in re.split(f"({names})", run) if special else [run]:
                parts += [np.array([special[piece]])] if piece in special else map(encode, _chunks(piece))
        return np.concatenate(parts, dtype=self.dtype, casting="unsafe")

    def _encode_run(self, text: str) -> np.ndarray:
        """Encode text of valid UTF-8 to ids as `ByteLevelBPE.encode` does, by tiktoken's core if it is installed."""
        if self._encoding is None:
            self._encoding = self._new_encoding()
        if isinstance(self._encoding, PieceIds):
            pieces = re.findall(self.pattern, text)
            return np.fromiter(chain.from_iterable(map(self._encoding.__getitem__, pieces)), self.dtype)
        ids: np.ndarray = self._encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)
        return ids

    def _new_encoding(self) -> Any:
        """Return tiktoken's encoding of these tokens, or `PieceIds` where tiktoken is not installed."""
        ranks = {token: rank for rank, token in enumerate(self._ordinary)}
        try:
            from tiktoken import Encoding
            from tiktoken_ext.openai_public import r50k_pat_str
        except ImportError:
            return PieceIds(ranks)
        pattern = r50k_pat_str if self._split == "gpt2" else PIECE
        special = {END_OF_TEXT: len(ranks)}  # not used, but without one tiktoken (0.14) takes twice the time
        return Encoding("tricycle", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def encode_plain(self, text: str | bytes) -> np.ndarray:
        """Encode a text to ids (T,), names of special tokens as ordinary text: the same as `encode(text)`."""
        return self.encode(text)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Decode ids of any shape to bytes, special tokens to names; ValueError for unknown or non-integer ids."""
        flat = np.asarray(ids).ravel()
        if flat.size == 0:
            return b""
        _expect(flat.dtype.kind in "iu", "integer ids", flat[:4])
        wrong = flat[(flat < 0) | (flat >= self.n_vocab)]
        _expect(not wrong.size, f"ids from 0 to {self.n_vocab - 1}", wrong[:1])
        return super().decode_bytes(flat)

    def stream(self, seen: ArrayLike = ()) -> StreamDecoder:
        """Return an incremental decoder of the ids that follow those in `seen`, which may end within a character.

        If `seen` ends within a character, the decoded text begins with that character.
        """
        decoder = StreamDecoder(self)
        decoder.push(np.asarray(seen, self.dtype).ravel()[-4:])  # a character has at most four bytes
        return decoder

    # saving

    def to_dict(self) -> dict[str, Any]:
        """Return the complete tokenizer as a dict of JSON-serializable values (tokens in Latin-1)."""
        return {
            **_FORMAT,
            "vocab_size": self.vocab_size,
            "split": self._split,
            "special_tokens": list(self._special_names),
            "tokens": [token.decode("latin-1") for token in self._ordinary],
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> BPETokeniser:
        """Make a tokenizer from the dict that `to_dict` returns; raise ValueError for other values."""
        fields = {*_FORMAT, "vocab_size", "split", "special_tokens", "tokens"}
        _expect(isinstance(state, dict) and set(state) == fields, f"a dict of {', '.join(sorted(fields))}", state)
        for name, value in _FORMAT.items():
            _expect(state[name] == value, f"{name} {value}", state[name])
        _expect(state["split"] in SPLITS, f"split {' or '.join(SPLITS)}", state["split"])
        _expect(isinstance(state["special_tokens"], list), "special_tokens to be a list", state["special_tokens"])
        tokeniser = cls(state["vocab_size"], state["special_tokens"], state["split"])
        texts = state["tokens"]
        sound = isinstance(texts, list) and all(isinstance(t, str) and t and max(t) <= "\xff" for t in texts)
        _expect(sound, "tokens to be a list of Latin-1 texts, none empty", texts)
        _expect(sorted(texts[:256]) == [chr(value) for value in range(256)], "the 256 bytes as the first tokens", texts)
        _expect(len(set(texts)) == len(texts), "tokens to be distinct", texts)
        n_vocab = len(texts) + len(tokeniser.special_tokens)
        _expect(n_vocab <= tokeniser.vocab_size, f"at most vocab_size {tokeniser.vocab_size} ids", n_vocab)
        tokeniser._set_tokens([text.encode("latin-1") for text in texts])
        return tokeniser

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer to a JSON file for `load`, atomically; replace an existing file."""
        with atomic_write(path, text=True) as file:
            json.dump(self.to_dict(), file)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BPETokeniser:
        """Load a tokenizer from the JSON file of `save`; ValueError if invalid, FileNotFoundError if missing."""
        try:
            return cls.from_dict(read_json(path, MAX_BYTES))
        except ValueError as error:
            raise ValueError(f"{path}: expected a saved tokeniser: {str(error).removeprefix(f'{path}: ')}") from None

    @classmethod
    def from_tokens(cls, tokens: list[bytes], split: str = "tricycle") -> BPETokeniser:
        """Make a tokenizer of tokens, not validated (256 bytes, then merges in order), and <|endoftext|> as last id.

        Args:
            split: the pre-tokenization pattern, "tricycle" or "gpt2".
        """
        tokeniser = cls(len(tokens) + 1, split=split)
        tokeniser._set_tokens(tokens)
        return tokeniser

    # comparison, pickling, printing

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a BPETokeniser with an equal `to_dict()`; NotImplemented for other types."""
        return self.to_dict() == other.to_dict() if isinstance(other, BPETokeniser) else NotImplemented

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickling, without the compiled encoder, which is rebuilt on next use."""
        return {**self.__dict__, "_encoding": None}  # rebuilt on next use

    def __repr__(self) -> str:
        """Return "BPETokeniser(vocab_size=..., n_vocab=..., split=...)"."""
        return f"BPETokeniser(vocab_size={self.vocab_size}, n_vocab={self.n_vocab}, split={self._split!r})"


class PieceIds(dict[str, list[int]]):
    """A cache of the ids of each piece of text, computed on lookup, and stored if the piece is short.

    Args:
        ranks: the ids of the tokens.
    """

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self.ranks = ranks

    def __missing__(self, piece: str) -> list[int]:
        """Encode a piece to a list of ids, and cache it if the piece is short and the cache is not full."""
        raw = piece.encode("utf-8")
        ids = [self.ranks[raw]] if raw in self.ranks else self._merge(raw)
        self.keep([(piece, ids)])
        return ids

    def keep(self, pieces_and_ids: PiecesAndIds) -> None:
        """Cache the ids of pieces that are short, until the cache is full."""
        for piece, ids in pieces_and_ids:
            if len(piece) <= _LONGEST_KEPT and len(self) < _MOST_KEPT:
                self[piece] = ids

    def _merge(self, piece: bytes) -> list[int]:
        """Return a piece's ids: repeatedly merge the adjacent pair that forms the lowest token id, leftmost first.

        The pairs are in a heap. Pairs that no longer exist are skipped, so n bytes take O(n log n) time.
        """
        n, ranks = len(piece), self.ranks
        starts, ends = [0, *range(n)], [*range(1, n + 1), 0]  # of the tokens that end, and begin, at each index
        heap: list[tuple[int, int, int]] = []
        spans = [(start, start + 2) for start in range(n - 1)]
        while True:
            for start, end in spans:
                if piece[start:end] in ranks:
                    heapq.heappush(heap, (ranks[piece[start:end]], start, end))
            if not heap:
                break
            _, start, end = heapq.heappop(heap)
            middle, spans = ends[start], []
            if ends[middle] == end:
                starts[end], ends[start], ends[middle] = start, end, n  # no token begins in the middle now
                spans = [(starts[start], end), (start, ends[end])]
        ids, start = [], 0
        while start < n:
            ids.append(ranks[piece[start : ends[start]]])
            start = ends[start]
        return ids


class StreamDecoder:
    """An incremental decoder of token ids, which returns a character once all of its bytes are complete."""

    def __init__(self, tokeniser: BPETokeniser) -> None:
        self.tokeniser = tokeniser
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: ArrayLike) -> str:
        """Decode one or several further ids; return the completed characters, possibly none."""
        return self._decoder.decode(self.tokeniser.decode_bytes(ids))

    def flush(self) -> str:
        """End the text, so that another may follow; return U+FFFD for incomplete bytes, or an empty string."""
        return self._decoder.decode(b"", final=True)


# Cache: valid for the life of the process; depends only on Python's Unicode tables.
@cache
def gpt2_pattern() -> str:
    """Return GPT-2's pattern (Radford et al. 2019) for Python's `re`, with all characters listed for \\p{L} and \\p{N}.

    tiktoken uses Rust's regex, which may support a newer version of Unicode and so split a text differently.
    """
    # A category has a name of two letters, whose first one says the kind.
    kinds = "".join(map(unicodedata.category, map(chr, range(sys.maxunicode + 1))))[::2]
    letter, number = (
        "".join(f"\\U{run.start():08x}-\\U{run.end() - 1:08x}" for run in re.finditer(kind + "+", kinds))
        for kind in "LN"
    )
    return "|".join(
        [
            "'(?:[sdmt]|ll|ve|re)",
            rf" ?[{letter}]+",
            rf" ?[{number}]+",
            rf" ?[^{_ANY_SPACE}{letter}{number}]+",
            rf"[{_ANY_SPACE}]+(?![^{_ANY_SPACE}])",
            rf"[{_ANY_SPACE}]+",
        ]
    )


def _expect(ok: bool, what: str, got: object) -> None:
    """Raise a ValueError with what was expected and what came unless `ok`."""
    if not ok:
        got = got.tolist() if isinstance(got, np.ndarray) else got
        raise ValueError(f"BPETokeniser: expected {what}, got {reprlib.repr(got)}")


def _runs(text: str | bytes) -> list[str]:
    """Split a text into runs of valid UTF-8 (even), bytes of invalid UTF-8 or lone surrogates (odd, escaped).

    Raises:
        ValueError: the text is neither str nor bytes.
    """
    _expect(isinstance(text, (str, bytes, bytearray)), "text as str or bytes", text)
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
    try:
        return [raw.decode("utf-8")]
    except UnicodeDecodeError:
        return _NOT_UTF8.split(raw.decode("utf-8", "surrogateescape"))


def _chunks(text: str) -> Iterator[str]:
    """Yield parts of at most _CHUNK characters of a text, cut between pieces, or anywhere without a boundary nearby."""
    start = 0
    while len(text) - start > _CHUNK:
        cut = _SAFE_CUT.search(text, start + _CHUNK // 2, start + _CHUNK)
        end = cut.start() if cut else start + _CHUNK
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
