"""Byte-level byte-pair encoding (BPE): training, encoding and decoding.

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
PiecesAndIds = Iterable[tuple[str, list[int]]]  # computed on iteration
SINGLE_BYTES = [bytes([value]) for value in range(256)]

# Pre-tokenization: no merge crosses a piece. Explicit character classes make Python's `re` (training) and Rust's regex
# (encoding) agree in any version of Unicode; without look-around, matching is linear in Rust.
SPACE = r" \t\n\v\f\r"
LETTER = (
    "A-Za-z\u00c0-\u167f\u1681-\u1fff\u2c00-\u2dff\u2e80-\u2fff\u3041-\ud7ff\uf900-\ufdff"
    "\uff21-\uff3a\uff41-\uff5a\uff66-\uffdc\U00010000-\U0001efff\U00020000-\U0003ffff"
)
PIECE = (
    rf"[^\r\n0-9{LETTER}]?[{LETTER}]+"  # a word with one preceding character: " the", "_name", "'ll"
    r"| ?[0-9]{1,3}"
    rf"| ?[^{SPACE}0-9{LETTER}]+[{SPACE}]*"  # punctuation with the following spaces: ", ", "):\n        "
    rf"|[{SPACE}]+"
)


class ByteLevelBPE:
    """A byte-level BPE tokenizer.

    Ids: the 256 bytes, then the merges in order of training (none before `train`), then the special tokens.

    Args:
        vocab_size: the maximum number of ids. A small training text may yield fewer: `n_vocab` is the actual number.
        special_tokens: names of ids that do not encode text.
    """

    def __init__(self, vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)) -> None:
        self.vocab_size, self._special_names = vocab_size, list(special_tokens)
        self._set_tokens(SINGLE_BYTES)

    def _set_tokens(self, tokens: list[bytes]) -> None:
        """Replace the ordinary tokens, by id, and give the special tokens the ids after them."""
        self._ordinary = tokens
        self.special_tokens = {name: len(tokens) + i for i, name in enumerate(self._special_names)}
        self._tokens = tokens + [name.encode("utf-8") for name in self._special_names]

    @property
    def pattern(self) -> str:
        """The regular expression that splits text into pieces."""
        return PIECE

    @property
    def n_vocab(self) -> int:
        """The number of ids, at most `vocab_size`."""
        return len(self._tokens)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of ids: uint16 if `vocab_size` allows, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def train(self, text: Iterable[str], progress: bool = True) -> Self:
        """Learn merges from an iterable of texts, replacing earlier merges; return self; ValueError if it is empty.

        Repeatedly merges the most frequent pair of adjacent tokens, or the one with the smallest ids among equally
        frequent ones, while it occurs more than once. `progress` shows a progress bar.
        """
        self._learn(text, progress)
        return self

    def _learn(self, text: Iterable[str], progress: bool) -> PiecesAndIds:
        """Learn merges as `train` does; return the ids of each piece of the texts."""
        counts = Counter(chain.from_iterable(map(re.compile(self.pattern).findall, text)))
        if not counts:
            raise ValueError(f"{type(self).__name__}: expected UTF-8 text to train on, got 'none'")
        tokens, pieces_and_ids = learn_merges(counts, self.vocab_size - 256 - len(self._special_names), progress)
        self._set_tokens(tokens)
        return pieces_and_ids

    def encode(self, text: str) -> np.ndarray:
        """Encode a text to token ids (T,) of type `dtype`; names of special tokens are encoded as ordinary text."""
        ids, id_of = [], {token: i for i, token in enumerate(self._ordinary)}
        for piece in re.findall(self.pattern, text):
            tokens = [SINGLE_BYTES[value] for value in piece.encode("utf-8")]
            while found := [(id_of[a + b], i) for i, (a, b) in enumerate(pairwise(tokens)) if a + b in id_of]:
                _, i = min(found)  # the pair that forms the token with the lowest id is merged first
                tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]
            ids += [id_of[token] for token in tokens]
        return np.array(ids, self.dtype)

    def decode_bytes(self, ids: ArrayLike) -> bytes:
        """Decode ids of any shape, in order, to bytes; a special token gives its name in UTF-8."""
        return b"".join([self._tokens[token] for token in np.asarray(ids).ravel().tolist()])

    def decode(self, ids: ArrayLike) -> str:
        """Decode ids of any shape, in order, to text: special tokens to names, bytes that are not UTF-8 to U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def learn_merges(counts: Counter[str], n_merges: int, progress: bool) -> tuple[list[bytes], PiecesAndIds]:
    """Merge up to `n_merges` pairs, each the most frequent left (at least twice); return tokens, and the ids of pieces.

    All pieces form one linked list of symbols, in which a merge replaces the left symbol of each occurrence and unlinks
    the right one. Later merges only remove occurrences, so counts in the heap are upper bounds, updated at the top.
    """
    from tqdm import tqdm

    pieces = [piece.encode("utf-8") for piece in counts]
    symbol = np.frombuffer(b"\n".join([b"", *pieces, b""]), np.uint8).astype(np.int64)
    sizes = np.fromiter(map(len, pieces), np.int64) + 1
    weight = np.append(np.repeat([*counts.values()], sizes), 0)  # the count of the piece
    edges = np.append(0, sizes.cumsum())  # around and between pieces; larger than all ids
    symbol[edges], weight[edges] = 256 + min(n_merges, len(symbol)), 0
    base = int(symbol[0]) + 1  # a pair (a, b) is stored as a * base + b; an edge is base - 1
    before, after = np.arange(-1, len(symbol) - 1), np.arange(1, len(symbol) + 1)  # indices of the neighbors
    pair_at = np.full(len(symbol), -1)  # the pair that begins at an index
    heap: list[tuple[int, int, np.ndarray]] = []  # (-count, pair, places)
    places = np.flatnonzero((weight[:-1] > 0) & (weight[1:] > 0))
    tokens = SINGLE_BYTES.copy()
    for new in tqdm(range(256, 256 + n_merges), "Training tokeniser", unit=" merges", disable=not progress):
        pairs = symbol[places] * base + symbol[after[places]]
        pair_at[places] = pairs
        for entry in _grouped(pairs, places, weight):
            heapq.heappush(heap, entry)
        while heap:
            _, pair, known = heap[0]
            places = known[pair_at[known] == pair]
            if len(places) == len(known):
                break
            if (count := int(np.add.reduce(weight[places]))) > 1:
                heapq.heapreplace(heap, (-count, pair, places))
            else:
                heapq.heappop(heap)
        if not heap:
            break
        a, b = divmod(heapq.heappop(heap)[1], base)
        if a == b:  # in a run of the symbol, every other place merges
            begins, numbers = np.append(True, places[1:] != after[places[:-1]]), np.arange(len(places))
            places = places[(numbers - np.maximum.accumulate(np.where(begins, numbers, 0))) % 2 == 0]
        unlinked = after[places]
        right = after[unlinked]
        symbol[places], symbol[unlinked], pair_at[unlinked] = new, -1, -1
        after[places], before[right] = right, places
        # New pairs begin to the left and here, unless an edge (above `new`) or another merged pair follows.
        places = np.concatenate((before[places], places[symbol[right] < new]))
        tokens.append(tokens[a] + tokens[b])
    linked = symbol[symbol >= 0]
    ids = (linked[end + 1 : next_end].tolist() for end, next_end in pairwise(np.flatnonzero(linked == base - 1)))
    return tokens, zip(counts, ids)


def _grouped(pairs: np.ndarray, places: np.ndarray, weight: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (-count, pair, its places) for each distinct pair; count, the sum of the weights, is at least 2."""
    order = pairs.argsort(kind="stable")
    pairs, places = pairs[order], places[order]
    starts = np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)].nonzero()[0]
    counts = np.add.reduceat(weight[places], starts).tolist()
    bounds = [*starts.tolist(), len(pairs)]
    for pair, count, start, end in zip(pairs[starts].tolist(), counts, bounds, bounds[1:]):
        if count > 1:
            yield -count, pair, places[start:end]
