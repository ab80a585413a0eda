"""Text to token ids and back: byte-level byte-pair encoding, trained from scratch.

Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units" (2016), on
bytes as in Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2.
Training is ours; encoding runs in tiktoken's core, built on the merges that training found.
"""

from __future__ import annotations

import codecs
import heapq
import json
import os
import re
import reprlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tricycle.system.files import atomic_write, read_json

if TYPE_CHECKING:
    import tiktoken
    from numpy.typing import ArrayLike

END_OF_TEXT = "<|endoftext|>"
SPLITS = ("tricycle", "gpt2")

# Text is cut into pieces before anything is merged, and no merge crosses a piece. The classes are
# spelt out, with no \w, \s or \p{L}, so that Python's `re` (training) and Rust's regex (encoding)
# agree on every character whatever version of Unicode each was built with. There is no look-around
# either: matching stays linear in Rust, even on a megabyte of spaces.
_SPACE = r" \t\n\v\f\r"
_LETTER = (
    "A-Za-z\u00c0-\u167f\u1681-\u1fff\u2c00-\u2dff\u2e80-\u2fff\u3041-\ud7ff\uf900-\ufdff"
    "\uff21-\uff3a\uff41-\uff5a\uff66-\uffdc\U00010000-\U0001efff\U00020000-\U0003ffff"
)
PIECE = "|".join(
    [
        rf"[^\r\n0-9{_LETTER}]?[{_LETTER}]+",  # a word with the one sign before it: " the", "_name", "'ll"
        r" ?[0-9]{1,3}",
        rf" ?[^{_SPACE}0-9{_LETTER}]+[{_SPACE}]*",  # signs with what space follows: ", ", "):\n        "
        rf"[{_SPACE}]+",
    ]
)
# After a letter and before a space every pattern here starts a new piece, so a text may be cut there.
_SAFE_CUT = re.compile(rf"(?<=[{_LETTER}])(?=[ \n])")
# What Unicode calls white space; Python's \\s has four control characters more.
_ANY_SPACE = r"\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
MOST_BYTES = 2**26  # of a file
_CHUNK = 2**18  # characters: bounds memory, and the depth that GPT-2's look-ahead may backtrack
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # what errors="surrogateescape" makes of such bytes
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


class BPETokeniser:
    """Byte-level BPE: every byte string encodes, and decodes to itself.

    Ids run through the 256 bytes, then the merges in the order learnt, then the special tokens. Before
    `train` there are no merges, and text encodes as its bytes. Bytes that are not UTF-8 become one
    token each.

    Args:
        vocab_size: ids in all, the 256 bytes and the special tokens included. A small text may teach
            fewer merges than asked for: `n_vocab` counts the ids there are.
        special_tokens: names of ids that stand for no text. Ordinary text that happens to contain
            such a name is ordinary text, see `encode`.
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
        self.vocab_size = int(vocab_size)
        self._special_names = names
        self._set_tokens([bytes([value]) for value in range(256)], split)

    def _set_tokens(self, tokens: list[bytes], split: str) -> None:
        self._split = split  # which pattern cuts text into pieces
        self._ordinary = tokens
        self.special_tokens = {name: len(tokens) + i for i, name in enumerate(self._special_names)}
        self._tokens = tokens + [name.encode("utf-8") for name in self._special_names]
        # the first 256 tokens are the single bytes in some order; this inverts it
        self._byte_ids = np.argsort([token[0] for token in tokens[:256]])
        self._encoding: tiktoken.Encoding | None = None

    # sizes and single tokens

    @property
    def n_vocab(self) -> int:
        """How many ids there are; never more than `vocab_size`."""
        return len(self._tokens)

    def __len__(self) -> int:
        return self.n_vocab

    @property
    def dtype(self) -> np.dtype:
        """What `encode` returns: uint16 where every id below `vocab_size` fits, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @property
    def end_of_text(self) -> int:
        """The id that separates documents."""
        _expect(END_OF_TEXT in self.special_tokens, f"{END_OF_TEXT} among the special tokens", self._special_names)
        return self.special_tokens[END_OF_TEXT]

    @property
    def start_of_text(self) -> int:
        """A text begins where another one ends."""
        return self.end_of_text

    @property
    def new_text(self) -> int:
        """As `start_of_text`."""
        return self.end_of_text

    @property
    def chat_template(self) -> None:
        """There is none."""
        return None

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; a special token gives its name."""
        return self.decode_bytes([token])

    # training

    def train(self, text: str | bytes | Iterable[str | bytes], progress: bool = True) -> BPETokeniser:
        """Learn the merges from a text, or from many; what was learnt before is dropped.

        The pair of neighbouring tokens that occurs most often becomes a token, again and again. Ties
        go to the pair with the smaller ids, so equal texts give equal tokenisers. A pair that occurs
        only once is never merged.

        Returns:
            The tokeniser itself.

        Raises:
            ValueError: no text at all.
        """
        texts = [text] if isinstance(text, (str, bytes, bytearray)) else text
        find_pieces = re.compile(PIECE if self._split == "tricycle" else gpt2_piece()).findall
        counts: Counter[str] = Counter()
        for one in texts:
            for run in _runs(one)[::2]:
                for chunk in _chunks(run):
                    counts.update(find_pieces(chunk))
        _expect(bool(counts), "UTF-8 text to train on", "none")
        tokens = [bytes([value]) for value in range(256)]
        for left, right in _learn_merges(counts, self.vocab_size - 256 - len(self._special_names), progress):
            tokens.append(tokens[left] + tokens[right])
        self._set_tokens(tokens, self._split)
        return self

    # encoding and decoding

    def encode(self, text: str | bytes, allowed_special: bool = False) -> np.ndarray:
        """Token ids of a text, shape (T,), of type `dtype` (unsigned: mind `ids - 1`).

        Args:
            text: a str, or any bytes. Lone surrogates in a str count as the bytes that Python's
                "surrogatepass" gives them.
            allowed_special: read the name of a special token as that token. Leave it False for text
                that you did not write yourself.
        """
        if self._encoding is None:
            self._encoding = self._build_encoding()
        special = self.special_tokens if allowed_special else {}
        # longest first, should one name begin with another
        names = "|".join(sorted(map(re.escape, special), key=len, reverse=True))
        parts = [np.empty(0, self.dtype)]
        for i, run in enumerate(_runs(text)):
            if i % 2:
                parts.append(self._byte_ids[np.frombuffer(run.encode("utf-8", "surrogateescape"), np.uint8)])
                continue
            for piece in re.split(f"({names})", run) if special else [run]:
                if piece in special:
                    parts.append(np.array([special[piece]]))
                else:  # allowed none, the Encoding reads the names of special tokens as ordinary text
                    parts += [self._encoding.encode_to_numpy(c, disallowed_special=()) for c in _chunks(piece)]
        return np.concatenate(parts, dtype=self.dtype, casting="unsafe")

    def encode_plain(self, text: str | bytes) -> np.ndarray:
        """As `encode` does; a tokeniser of other people's may do more there."""
        return self.encode(text)

    def _build_encoding(self) -> tiktoken.Encoding:
        import tiktoken

        if self._split == "gpt2":
            from tiktoken_ext.openai_public import r50k_pat_str as pattern
        else:
            pattern = PIECE
        ranks = {token: rank for rank, token in enumerate(self._ordinary)}
        # `encode` never allows this one, but where tiktoken (0.14) knows none at all, arrays come at half the speed
        special = {END_OF_TEXT: len(ranks)}
        return tiktoken.Encoding("tricycle", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """The exact bytes that the ids stand for.

        Raises:
            ValueError: something that is not an integer, or an id outside the vocabulary.
        """
        flat = np.asarray(ids).ravel()
        if flat.size == 0:
            return b""
        _expect(flat.dtype.kind in "iu", "integer ids", flat[:4].tolist())
        wrong = flat[(flat < 0) | (flat >= self.n_vocab)]
        _expect(wrong.size == 0, f"ids from 0 to {self.n_vocab - 1}", wrong[:1].tolist())
        return b"".join([self._tokens[token] for token in flat.tolist()])

    def decode(self, ids: ArrayLike) -> str:
        """The text that the ids stand for; bytes that are not UTF-8 show as U+FFFD.

        Raises:
            ValueError: as `decode_bytes`.
        """
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

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
        tokeniser = cls(state["vocab_size"], state["special_tokens"])
        texts = state["tokens"]
        sound = isinstance(texts, list) and all(isinstance(t, str) and t and max(t) <= "\xff" for t in texts)
        _expect(sound, "tokens to be a list of Latin-1 texts, none empty", texts)
        _expect(sorted(texts[:256]) == [chr(value) for value in range(256)], "the 256 bytes as the first tokens", texts)
        _expect(len(set(texts)) == len(texts), "tokens to be distinct", texts)
        n_vocab = len(texts) + len(tokeniser.special_tokens)
        _expect(n_vocab <= tokeniser.vocab_size, f"at most vocab_size {tokeniser.vocab_size} ids", n_vocab)
        tokens = [text.encode("latin-1") for text in texts]
        tokeniser._set_tokens(tokens, state["split"])
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
        tokeniser = cls(vocab_size=len(tokens) + 1)
        tokeniser._set_tokens(tokens, split)
        return tokeniser

    # being an object

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, BPETokeniser) else NotImplemented

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_encoding": None}  # rebuilt when next needed

    def __repr__(self) -> str:
        return f"BPETokeniser(vocab_size={self.vocab_size}, n_vocab={self.n_vocab}, split={self._split!r})"


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

    It is for training alone. Encoding runs in Rust; where that knows a newer Unicode, the two may cut a text in another
    place, which costs a merge that is never used.
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


_FEW = 32  # places of a pair: for so many NumPy's calls take as long as a loop over them
_EDGE, _MERGED_AWAY = -1, -2  # no symbols: the ends of pieces, and right halves of merged pairs


def _learn_merges(counts: Counter[str], n_merges: int, progress: bool) -> list[tuple[int, int]]:
    """The pairs of ids to merge, in order; pair i makes id 256 + i."""
    from tqdm import tqdm

    line = _Line(counts, 256 + n_merges)
    merges: list[tuple[int, int]] = []
    with tqdm(total=n_merges, desc="Training tokeniser", unit=" merges", disable=not progress) as bar:
        while len(merges) < n_merges:
            pair = line.most_frequent()
            if pair is None:
                break
            line.merge(pair, 256 + len(merges))
            merges.append(divmod(pair, line.n_ids))
            bar.update()
    return merges


class _Line:
    """All different pieces of a text, one after the other in one line of symbols, with an edge around each.

    Each piece is weighted by how often it occurs. Merged symbols are linked out of the line, so a merge costs what the
    pair occurs, not what the text is long, and only counts of neighbouring pairs change. The heap may hold counts that
    have fallen since; those are put back with today's count when they surface.

    Attributes:
        n_ids: a pair (a, b) is kept as the number a * n_ids + b.
        symbol, weight: by the place in the line.
        before, after: the places of the neighbours.
        items: of symbol, weight, before and after, which are read and written faster one by one.
        count: of each pair, weighted.
        where: the places at which a pair began when it was found, in ascending order.
        heap: (-count, pair).
    """

    def __init__(self, counts: Counter[str], n_ids: int) -> None:
        self.n_ids = n_ids
        self.symbol, self.weight = _laid_out(counts)
        n_places = len(self.symbol)
        self.before = np.arange(-1, n_places - 1)
        self.after = np.arange(1, n_places + 1)
        self.items = [array.data for array in (self.symbol, self.weight, self.before, self.after)]
        self.count: dict[int, int] = {}
        self.where: dict[int, np.ndarray | list[int]] = {}
        self.heap: list[tuple[int, int]] = []
        left, right = self.symbol[:-1], self.symbol[1:]
        starts = np.flatnonzero((left != _EDGE) & (right != _EDGE))
        self._enter(left[starts] * n_ids + right[starts], starts)

    def _enter(self, pairs: np.ndarray, places: np.ndarray) -> None:
        """New pairs, and the places in the line where they begin."""
        pairs, places, starts = _grouped(pairs, places)
        times = np.add.reduceat(self.weight[places], starts).tolist() if len(starts) else []
        edges = [*starts.tolist(), len(places)]
        for pair, n_times, start, end in zip(pairs[starts].tolist(), times, edges, edges[1:]):
            self.count[pair] = n_times
            if n_times > 1:
                self.where[pair] = places[start:end]
                heapq.heappush(self.heap, (-n_times, pair))

    def most_frequent(self) -> int | None:
        """The pair that occurs most often, the first of equals; None where nothing is left that occurs twice."""
        while self.heap:
            times, pair = heapq.heappop(self.heap)
            today = self.count[pair]
            if today != -times:
                if today > 1:
                    heapq.heappush(self.heap, (-today, pair))
            elif today < 2:
                return None
            else:
                return pair
        return None

    def merge(self, pair: int, new: int) -> None:
        """Put a new symbol in the place of each occurrence of a pair."""
        places = self.where.pop(pair)
        if len(places) < _FEW:
            self._merge_one_by_one(pair, new, places if isinstance(places, list) else places.tolist())
        else:
            self._merge_at_once(pair, new, np.asarray(places))

    def _merge_one_by_one(self, pair: int, new: int, places: list[int]) -> None:
        symbol, weight, before, after = self.items
        n_ids, count = self.n_ids, self.count
        a, b = divmod(pair, n_ids)
        new_count: defaultdict[int, int] = defaultdict(int)
        new_where: defaultdict[int, list[int]] = defaultdict(list)
        for i in places:
            j = after[i]
            if symbol[i] != a or symbol[j] != b:
                continue  # an earlier merge took one of them
            left, right, times = before[i], after[j], weight[i]
            on_left, on_right = symbol[left], symbol[right]
            symbol[i], symbol[j] = new, _MERGED_AWAY
            after[i], before[right] = right, i
            if on_left != _EDGE:
                # where the left neighbour was itself just merged, (new, a) is one of the new pairs
                (new_count if on_left == new else count)[on_left * n_ids + a] -= times
                new_count[on_left * n_ids + new] += times
                new_where[on_left * n_ids + new].append(left)
            if on_right != _EDGE:
                count[b * n_ids + on_right] -= times
                new_count[new * n_ids + on_right] += times
                new_where[new * n_ids + on_right].append(i)
        for neighbours, times in new_count.items():
            count[neighbours] = times
            if times > 1:
                self.where[neighbours] = new_where[neighbours]
                heapq.heappush(self.heap, (-times, neighbours))

    def _merge_at_once(self, pair: int, new: int, i: np.ndarray) -> None:
        """The same for many places, which NumPy goes through several times as fast."""
        symbol, before, after, n_ids = self.symbol, self.before, self.after, self.n_ids
        a, b = divmod(pair, n_ids)
        j = after[i]
        intact = (symbol[i] == a) & (symbol[j] == b)  # or an earlier merge took one of them
        i, j = i[intact], j[intact]
        if a == b:
            i, j = _without_overlap(i, j)
        right = after[j]
        symbol[i], symbol[j] = new, _MERGED_AWAY
        after[i], before[right] = right, i
        left = before[i]
        on_left, on_right = symbol[left], symbol[right]
        has_left = on_left != _EDGE
        has_right = (on_right != _EDGE) & (on_right != new)  # what was just merged itself has this one on its left
        on_left, on_right = on_left[has_left], on_right[has_right]
        places = np.concatenate([left[has_left], i[has_right]])
        # two that were merged side by side, (a, b) (a, b), had (b, a) between them
        left_lost = np.where(on_left == new, b, on_left) * n_ids + a
        self._lose(np.concatenate([left_lost, b * n_ids + on_right]), places)
        self._enter(np.concatenate([on_left * n_ids + new, new * n_ids + on_right]), places)

    def _lose(self, pairs: np.ndarray, places: np.ndarray) -> None:
        """Pairs that are no more, each in a piece of which a place is given."""
        for pair, n_times in zip(pairs.tolist(), self.weight[places].tolist()):
            self.count[pair] -= n_times


def _grouped(pairs: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both in an order in which equal pairs stand together, otherwise as they came; and where each group starts."""
    order = pairs.argsort(kind="stable")
    pairs, places = pairs[order], places[order]
    is_first = np.empty(len(pairs), bool)
    is_first[:1] = True
    np.not_equal(pairs[1:], pairs[:-1], out=is_first[1:])
    return pairs, places, is_first.nonzero()[0]


def _without_overlap(i: np.ndarray, j: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the pairs (i, j) of one symbol those that merge: in a row of such symbols every other, from the left."""
    number = np.arange(len(i))
    starts_row = np.ones(len(i), bool)
    np.not_equal(i[1:], j[:-1], out=starts_row[1:])
    row_start = np.maximum.accumulate(np.where(starts_row, number, 0))
    merges = (number - row_start) % 2 == 0
    return i[merges], j[merges]


def _laid_out(counts: Counter[str]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of all pieces with an edge before, between and after them; and the weight of each byte."""
    pieces = [piece.encode("utf-8") for piece in counts]
    lengths = np.fromiter(map(len, pieces), np.int64)
    piece_of = np.repeat(np.arange(len(pieces)), lengths)
    places = np.arange(len(piece_of)) + piece_of + 1
    line = np.full(len(piece_of) + len(pieces) + 1, _EDGE, np.int64)
    line[places] = np.frombuffer(b"".join(pieces), np.uint8)
    weights = np.zeros_like(line)
    weights[places] = np.fromiter(counts.values(), np.int64)[piece_of]
    return line, weights
