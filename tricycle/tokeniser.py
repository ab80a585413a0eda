"""The protocol of tokenizers, and `BPETokeniser`, which encodes any bytes and checks the files that it reads."""

from __future__ import annotations

import codecs
import heapq
import json
import os
import re
import reprlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from tricycle.bpe import END_OF_TEXT, LETTER, PIECE, ByteLevelBPE
from tricycle.system.files import atomic_write, read_json

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SPLITS = ("tricycle", "gpt2")
MOST_BYTES = 2**26  # of a file
# After a letter and before a space every pattern here starts a new piece, so a text may be cut there.
_SAFE_CUT = re.compile(rf"(?<=[{LETTER}])(?=[ \n])")
_CHUNK = 2**18  # characters: bounds memory, and the depth that GPT-2's look-ahead may backtrack
# What Unicode calls white space; Python's \\s has four control characters more.
_ANY_SPACE = r"\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # what errors="surrogateescape" makes of such bytes
_LONGEST_KEPT, _MOST_KEPT = 64, 2**17  # characters, and number of the pieces whose ids are kept
_FORMAT = {"format": "tricycle-bpe", "version": 1}


class TextStream(Protocol):
    """Text as its tokens come, one after another.

    `"".join([*map(stream.push, ids), stream.flush()])` is what `decode` gives for all of them.
    """

    def push(self, ids: Any) -> str:
        """Take one id or several; return the characters that they complete, perhaps none."""

    def flush(self) -> str:
        """End the text: what is still incomplete shows as U+FFFD."""


class Tokeniser(Protocol):
    """What the rest of Tricycle asks of a tokeniser, whoever trained it."""

    @property
    def n_vocab(self) -> int:
        """How many ids there are: all are below it."""

    @property
    def vocab_size(self) -> int:
        """How many rows a model for it has at least."""

    @property
    def dtype(self) -> np.dtype:
        """What holds any id."""

    @property
    def start_of_text(self) -> int | None:
        """The id that stands before every text, where one does."""

    @property
    def end_of_text(self) -> int:
        """The id that separates documents."""

    @property
    def new_text(self) -> int:
        """The id after which a model begins a text of its own."""

    @property
    def chat_template(self) -> str | None:
        """How conversations are written down for the model, if it was taught with any: `chat` gives their ids then."""

    def encode(self, text: str) -> Any:
        """The ids (T,) of a text, as the model's makers read texts."""

    def encode_plain(self, text: str | bytes) -> np.ndarray:
        """The ids (T,) of nothing but this text: no name in it stands for a special token, and none is added."""

    def decode(self, ids: Any) -> str:
        """The text that ids stand for."""

    def stream(self, seen: Any = ()) -> TextStream:
        """Decodes what comes after ids that were seen before."""

    def to_dict(self) -> dict[str, Any]:
        """Everything there is to know, as JSON can hold it."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, whole or not at all."""


class BPETokeniser(ByteLevelBPE):
    """Byte-level BPE: every byte string encodes, and decodes to itself.

    Ids run through the 256 bytes, then the merges in the order learnt, then the special tokens. Before `train` there
    are no merges, and text encodes as its bytes. Bytes that are not UTF-8 become one token each.

    Args:
        vocab_size: ids in all, the 256 bytes and the special tokens included. A small text may teach fewer merges than
            asked for: `n_vocab` counts the ids there are.
        special_tokens: names of ids that stand for no text. Ordinary text that happens to contain such a name is
            ordinary text, see `encode`.
        split: what cuts a text into pieces, which no token crosses: "tricycle", or "gpt2", which other programs know.

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
        super()._set_tokens(tokens)
        # The first 256 tokens are the single bytes in some order; this inverts it.
        self._byte_ids = np.argsort([token[0] for token in tokens[:256]])
        self._encoding: Any = None  # made when it is first needed

    @property
    def pattern(self) -> str:
        """What cuts text into pieces, for Python's `re`."""
        return gpt2_piece() if self._split == "gpt2" else super().pattern

    # sizes and single tokens

    def __len__(self) -> int:
        return self.n_vocab

    @property
    def end_of_text(self) -> int:
        """The id that separates documents."""
        _expect(END_OF_TEXT in self.special_tokens, f"{END_OF_TEXT} among the special tokens", self._special_names)
        return self.special_tokens[END_OF_TEXT]

    @property
    def start_of_text(self) -> int:
        """A text begins where another one ends."""
        return self.end_of_text

    new_text = start_of_text
    chat_template: None = None

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; a special token gives its name."""
        return self.decode_bytes([token])

    # training, encoding and decoding

    def train(self, text: str | bytes | Iterable[str | bytes], progress: bool = True) -> Self:
        """Learn the merges from a text, or from many, as `ByteLevelBPE.train`; skip bytes that are not UTF-8.

        Raises:
            ValueError: no text at all.
        """
        texts = [text] if isinstance(text, (str, bytes, bytearray)) else text
        return super().train((chunk for one in texts for run in _runs(one)[::2] for chunk in _chunks(run)), progress)

    def encode(self, text: str | bytes, allowed_special: bool = False) -> np.ndarray:
        """Token ids of a text, shape (T,), of type `dtype` (unsigned: mind `ids - 1`).

        Args:
            text: a str, or any bytes. Lone surrogates in a str count as the bytes that Python's "surrogatepass" gives
                them.
            allowed_special: read the name of a special token as that token. Leave it False for text that you did not
                write yourself.
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
        """As `ByteLevelBPE.encode`, in tiktoken's core where that is installed."""
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
        special = {END_OF_TEXT: len(ranks)}  # never read, but without one tiktoken (0.14) takes twice the time
        return Encoding("tricycle", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def encode_plain(self, text: str | bytes) -> np.ndarray:
        """As `encode` does; a tokeniser of other people's may do more there."""
        return self.encode(text)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that the ids stand for.

        Raises:
            ValueError: something that is not an integer, or an id outside the vocabulary.
        """
        flat = np.asarray(ids).ravel()
        if flat.size == 0:
            return b""
        _expect(flat.dtype.kind in "iu", "integer ids", flat[:4])
        wrong = flat[(flat < 0) | (flat >= self.n_vocab)]
        _expect(not wrong.size, f"ids from 0 to {self.n_vocab - 1}", wrong[:1])
        return super().decode_bytes(flat)

    def stream(self, seen: ArrayLike = ()) -> StreamDecoder:
        """Return a decoder of ids as they are generated after those in `seen`.

        Where the latter end in the first bytes of a character, the text begins with that character.
        """
        decoder = StreamDecoder(self)
        decoder.push(np.asarray(seen, self.dtype).ravel()[-4:])  # a character has at most four bytes
        return decoder

    # saving

    def to_dict(self) -> dict[str, Any]:
        """Everything there is to know, as plain values that JSON can hold (tokens in Latin-1)."""
        return {
            **_FORMAT,
            "vocab_size": self.vocab_size,
            "split": self._split,
            "special_tokens": list(self._special_names),
            "tokens": [token.decode("latin-1") for token in self._ordinary],
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> BPETokeniser:
        """The tokeniser that `to_dict` described.

        Raises:
            ValueError: anything that `to_dict` could not have made.
        """
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
        """Write a JSON file, whole or not at all."""
        with atomic_write(path, text=True) as file:
            json.dump(self.to_dict(), file)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BPETokeniser:
        """Read what `save` wrote.

        Raises:
            ValueError: a file that `save` did not write.
        """
        try:
            return cls.from_dict(read_json(path, MOST_BYTES))
        except ValueError as error:
            raise ValueError(f"{path}: expected a saved tokeniser: {str(error).removeprefix(f'{path}: ')}") from None

    @classmethod
    def from_tokens(cls, tokens: list[bytes], split: str = "tricycle") -> BPETokeniser:
        """A tokeniser of ready tokens (the 256 bytes first, then merges in order) and the end of text.

        Args:
            split: the pattern that cuts text into pieces, "tricycle" or "gpt2".
        """
        tokeniser = cls(len(tokens) + 1, split=split)
        tokeniser._set_tokens(tokens)
        return tokeniser

    # being an object

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, BPETokeniser) else NotImplemented

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_encoding": None}  # rebuilt when next needed

    def __repr__(self) -> str:
        return f"BPETokeniser(vocab_size={self.vocab_size}, n_vocab={self.n_vocab}, split={self._split!r})"


class PieceIds(dict[str, list[int]]):
    """The ids of each piece of text, computed when it is looked up, and kept if it is short.

    Args:
        ranks: the ids of the tokens.
    """

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self.ranks = ranks

    def __missing__(self, piece: str) -> list[int]:
        raw = piece.encode("utf-8")
        ids = [self.ranks[raw]] if raw in self.ranks else self._merge(raw)
        if len(piece) <= _LONGEST_KEPT and len(self) < _MOST_KEPT:
            self[piece] = ids
        return ids

    def _merge(self, piece: bytes) -> list[int]:
        """Merge the neighbours that form the token with the lowest id, the leftmost of several, until none do.

        A heap holds the spans of neighbours. A span that was merged with something else meanwhile is passed over, so
        that n bytes take n log n steps.
        """
        n, ranks = len(piece), self.ranks
        starts, ends = [0, *range(n)], [*range(1, n + 1), 0]  # of the tokens that end, and begin, at each place
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
                starts[end], ends[start], ends[middle] = start, end, n  # no token begins in the middle any more
                spans = [(starts[start], end), (start, ends[end])]
        ids, start = [], 0
        while start < n:
            ids.append(ranks[piece[start : ends[start]]])
            start = ends[start]
        return ids


class StreamDecoder:
    """Decodes ids as they are generated, and holds a character back until all of its bytes are there."""

    def __init__(self, tokeniser: BPETokeniser) -> None:
        self.tokeniser = tokeniser
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: ArrayLike) -> str:
        """As of `TextStream`."""
        return self._decoder.decode(self.tokeniser.decode_bytes(ids))

    def flush(self) -> str:
        """As of `TextStream`."""
        return self._decoder.decode(b"", final=True)


# Cache: valid for the life of the process: depends on this Python's Unicode tables alone.
@cache
def gpt2_piece() -> str:
    """GPT-2's pattern (Radford et al. 2019) for Python's `re`, which has no word for all scripts' letters and numbers.

    tiktoken encodes by Rust's regex; where that knows a newer Unicode, the two may cut a text in another place.
    """
    letter, number = (_characters(kind) for kind in "LN")
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


def _characters(kind: str) -> str:
    """All characters whose Unicode category begins with this letter, as ranges of a class."""
    codes = [code for code in range(0x110000) if unicodedata.category(chr(code))[0] == kind]
    starts = [code for before, code in zip([-2, *codes], codes) if code != before + 1]
    ends = [code for code, after in zip(codes, [*codes[1:], -2]) if after != code + 1]
    return "".join(f"\\U{start:08x}-\\U{end:08x}" for start, end in zip(starts, ends))


def _expect(ok: bool, what: str, got: object) -> None:
    if not ok:
        got = got.tolist() if isinstance(got, np.ndarray) else got
        raise ValueError(f"BPETokeniser: expected {what}, got {reprlib.repr(got)}")


def _runs(text: str | bytes) -> list[str]:
    """Split into runs of valid UTF-8 (even places) and of bytes that are not (odd, surrogate-escaped)."""
    _expect(isinstance(text, (str, bytes, bytearray)), "text as str or bytes", text)
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
    try:
        return [raw.decode("utf-8")]
    except UnicodeDecodeError:
        return _NOT_UTF8.split(raw.decode("utf-8", "surrogateescape"))


def _chunks(text: str) -> Iterator[str]:
    """Cut a long text between pieces; where no such place is near, anywhere."""
    start = 0
    while len(text) - start > _CHUNK:
        cut = _SAFE_CUT.search(text, start + _CHUNK // 2, start + _CHUNK)
        end = cut.start() if cut else start + _CHUNK
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
