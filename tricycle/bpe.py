"""Byte-level byte-pair encoding: text to token ids and back, with merges learnt from a text.

Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units" (2016), on bytes as in
Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

END_OF_TEXT = "<|endoftext|>"
SINGLE_BYTES = [bytes([value]) for value in range(256)]

# Text is cut into pieces before anything is merged, and no merge crosses a piece. The classes are spelt out, with no
# \w, \s or \p{L}, so that Python's `re` (training) and Rust's regex (encoding) agree on every character in any version
# of Unicode. There is no look-around either: matching stays linear in Rust, even on a megabyte of spaces.
SPACE = r" \t\n\v\f\r"
LETTER = (
    "A-Za-z\u00c0-\u167f\u1681-\u1fff\u2c00-\u2dff\u2e80-\u2fff\u3041-\ud7ff\uf900-\ufdff"
    "\uff21-\uff3a\uff41-\uff5a\uff66-\uffdc\U00010000-\U0001efff\U00020000-\U0003ffff"
)
PIECE = (
    rf"[^\r\n0-9{LETTER}]?[{LETTER}]+"  # a word with the one sign before it: " the", "_name", "'ll"
    r"| ?[0-9]{1,3}"
    rf"| ?[^{SPACE}0-9{LETTER}]+[{SPACE}]*"  # signs with what space follows: ", ", "):\n        "
    rf"|[{SPACE}]+"
)


class ByteLevelBPE:
    """Byte-level BPE of texts.

    Ids run through the 256 bytes, then the merges in the order learnt (none before `train`), then the special tokens.

    Args:
        vocab_size: ids in all. A small text may teach fewer merges than asked for: `n_vocab` counts the ids there are.
        special_tokens: names of ids that stand for no text.
    """

    def __init__(self, vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)) -> None:
        self.vocab_size, self._special_names = vocab_size, list(special_tokens)
        self._set_tokens(SINGLE_BYTES)

    def _set_tokens(self, tokens: list[bytes]) -> None:
        self._ordinary = tokens
        self.special_tokens = {name: len(tokens) + i for i, name in enumerate(self._special_names)}
        self._tokens = tokens + [name.encode("utf-8") for name in self._special_names]

    @property
    def pattern(self) -> str:
        """What cuts text into pieces."""
        return PIECE

    @property
    def n_vocab(self) -> int:
        """How many ids there are; never more than `vocab_size`."""
        return len(self._tokens)

    @property
    def dtype(self) -> np.dtype:
        """What `encode` returns: uint16 where every id below `vocab_size` fits, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def train(self, text: Iterable[str], progress: bool = True) -> Self:
        """Learn the merges from texts, drop what was learnt before, and return self.

        The most frequent pair of neighbouring tokens becomes a token, again and again; of equally frequent ones the
        pair with the smaller ids. A pair that occurs only once is never merged. No text at all raises ValueError.
        """
        from tqdm import tqdm

        find_pieces = re.compile(self.pattern).findall
        counts = Counter(chain.from_iterable(map(find_pieces, text)))
        if not counts:
            raise ValueError(f"{type(self).__name__}: expected UTF-8 text to train on, got 'none'")
        n_merges = self.vocab_size - 256 - len(self._special_names)
        merges = learn_merges(counts, n_merges)
        tokens = SINGLE_BYTES.copy()
        for left, right in tqdm(merges, "Training tokeniser", n_merges, unit=" merges", disable=not progress):
            tokens.append(tokens[left] + tokens[right])
        self._set_tokens(tokens)
        return self

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids (T,) of a text, of type `dtype`; names of special tokens are ordinary text.

        Of all neighbours in a piece the two that form the token with the lowest id merge first.
        """
        ids, id_of = [], {token: i for i, token in enumerate(self._ordinary)}
        for piece in re.findall(self.pattern, text):
            tokens = [SINGLE_BYTES[value] for value in piece.encode("utf-8")]
            while found := [(id_of[a + b], i) for i, (a, b) in enumerate(pairwise(tokens)) if a + b in id_of]:
                _, i = min(found)
                tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
            ids += [id_of[token] for token in tokens]
        return np.array(ids, self.dtype)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Return the exact bytes that the ids stand for; a special token gives its name."""
        return b"".join([self._tokens[token] for token in np.asarray(ids).ravel().tolist()])

    def decode(self, ids: ArrayLike) -> str:
        """Return the text that the ids stand for, with U+FFFD for bytes that are not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def learn_merges(counts: Counter[str], n_merges: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ids to merge, in order, given how often each piece occurs; pair i makes id 256 + i.

    All pieces lie in one line of symbols. A merge writes the new symbol to the left place of a pair and unlinks the
    right place, so it costs what the pair occurs, not what the text is long. All places of a pair are known when its
    younger symbol appears, and later merges only destroy some: a count in the heap is an upper bound, and is made
    exact when the pair comes to the top.
    """
    pieces = [piece.encode("utf-8") for piece in counts]
    symbol = np.frombuffer(b"\n".join([b"", *pieces, b""]), np.uint8).astype(np.int64)
    sizes = np.fromiter(map(len, pieces), np.int64) + 1
    weight = np.append(np.repeat([*counts.values()], sizes), 0)  # how often the piece occurs
    edges = np.append(0, sizes.cumsum())  # around and between pieces; above all ids that there will be
    symbol[edges], weight[edges] = 256 + min(n_merges, len(symbol)), 0
    base = int(symbol[0]) + 1  # a pair (a, b) is the number a * base + b
    before, after = np.arange(-1, len(symbol) - 1), np.arange(1, len(symbol) + 1)  # the places of the neighbours
    pair_at = np.full(len(symbol), -1)  # the pair that begins at a place
    heap: list[tuple[int, int, np.ndarray]] = []  # (-count, pair, places)
    places = np.flatnonzero((weight[:-1] > 0) & (weight[1:] > 0))
    for new in range(256, 256 + n_merges):
        pairs = symbol[places] * base + symbol[after[places]]
        pair_at[places] = pairs
        for entry in _grouped(pairs, places, weight):
            heapq.heappush(heap, entry)
        while heap:
            _, pair, known = heap[0]
            places = known[pair_at[known] == pair]
            if len(places) == len(known):
                break
            count = int(np.add.reduce(weight[places]))
            if count > 1:
                heapq.heapreplace(heap, (-count, pair, places))
            else:
                heapq.heappop(heap)
        if not heap:
            return
        heapq.heappop(heap)
        a, b = divmod(pair, base)
        if a == b:
            places = _without_overlap(places, after)
        unlinked = after[places]
        right = after[unlinked]
        symbol[places], pair_at[unlinked] = new, -1
        after[places], before[right] = right, places
        # New pairs begin on the left and here, unless what follows is an edge (above `new`) or itself was just merged.
        places = np.concatenate((before[places], places[symbol[right] < new]))
        yield a, b


def _grouped(pairs: np.ndarray, places: np.ndarray, weight: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (-count, pair, places in the order given) of each pair that occurs at least twice."""
    order = pairs.argsort(kind="stable")
    pairs, places = pairs[order], places[order]
    is_first = np.empty(len(pairs), bool)
    is_first[:1] = True
    np.not_equal(pairs[1:], pairs[:-1], out=is_first[1:])
    starts = is_first.nonzero()[0]
    counts = np.add.reduceat(weight[places], starts).tolist()
    bounds = [*starts.tolist(), len(pairs)]
    for pair, count, start, end in zip(pairs[starts].tolist(), counts, bounds, bounds[1:]):
        if count > 1:
            yield -count, pair, places[start:end]


def _without_overlap(places: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Of the places of a pair (a, a) keep those that merge: in a row of a's every other one, from the left."""
    begins = np.append(True, places[1:] != after[places[:-1]])
    numbers = np.arange(len(places))
    first = np.maximum.accumulate(np.where(begins, numbers, 0))  # of the row
    return places[(numbers - first) % 2 == 0]
