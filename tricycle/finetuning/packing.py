"""Texts of any lengths side by side in rows of one length, each token predicted from its own text alone.

What a token's label is worth is said with it: of a conversation only the answers count. Rows are filled with whole
texts, the longest first, each in the fullest row that has room (Johnson 1974, "best fit decreasing").

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tricycle.attention.attend import Attention
from tricycle.batches import EndlessDataset
from tricycle.devices import Array, array_module
from tricycle.models import GPT

IGNORED = -1  # the label of what does not count
PADDING = 0  # stands where nothing is; nobody sees it


class Example(NamedTuple):
    """A text to learn from.

    Attributes:
        ids: whole numbers (T,).
        counts: booleans (T,): whether a token is to be predicted. The first never is.
    """

    ids: np.ndarray
    counts: np.ndarray

    @property
    def n_labels(self) -> int:
        return int(self.counts[1:].sum())


class Batch(NamedTuple):
    """Rows, as `GPT.loss` takes them.

    Attributes:
        tokens, labels: whole numbers (B, T).
        documents: (B, T), which text of its row a token belongs to; None where rows have one text each.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None

    @property
    def n_labels(self) -> int:
        return int((self.labels != IGNORED).sum())


def packs(model: GPT) -> bool:
    """Return whether a mask keeps texts side by side apart: not where tokens mix with the one before, or where weights
    of attention depend on positions in the row."""
    for block in model.blocks:
        attention: Any = getattr(block, "attention", None)
        inner = getattr(attention, "attention", None)
        if not (isinstance(inner, Attention) and inner.softmax.fused) or attention.uses_shift:
            return False
    return True


def separate(model: GPT, tokens: Any, documents: Array | None) -> dict[str, Any]:
    """Return the options of `GPT.forward` with which a token sees its own text alone, and has its position in it.

    Args:
        tokens: (B, T).
        documents: whole numbers (B, T), as of `Batch`.

    Raises:
        ValueError: documents of another shape, or a model that cannot keep texts apart.
    """
    if documents is None:
        return {}
    if documents.shape != tokens.shape or documents.dtype.kind not in "iu":
        got = f"{documents.dtype} of {documents.shape}"
        raise ValueError(f"separate: expected documents as whole numbers of shape {tokens.shape}, got {got}")
    if not packs(model):
        raise ValueError("separate: expected one text a row, for in this model tokens reach across their ends")
    return {"mask": documents[:, :, None] == documents[:, None, :], "positions": positions_in(documents)}


def positions_in(documents: Array) -> Array:
    """Return the position of each token in its own text, from 0: (B, T) of documents that are contiguous."""
    xp = array_module(documents)
    places = xp.arange(documents.shape[-1]) + xp.zeros_like(documents)
    begins = xp.ones(documents.shape, bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return places - xp.maximum.accumulate(xp.where(begins, places, 0), axis=-1)


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Rows of items, by their numbers, so that no row is longer than `room`.

    Raises:
        ValueError: an item is longer than that, or has no length.
    """
    if lengths and not 0 < min(lengths) <= max(lengths) <= room:
        raise ValueError(f"packed: expected lengths from 1 to {room}, got {min(lengths)} to {max(lengths)}")
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and number of each row, the fullest first
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        place = bisect_left(free, (lengths[item], -1))
        if place == len(free):
            left, row = room, len(rows)
            rows.append([])
        else:
            left, row = free.pop(place)
        rows[row].append(item)
        if left > lengths[item]:
            insort(free, (left - lengths[item], row))
    return rows


class PackedDataset(EndlessDataset):
    """Batches of packed rows without end, under `next()`, in another order each pass; its position is a number.

    Args:
        examples: of two tokens or more, at most `window` + 1.
        batch_size: rows a batch.
        window: T.
        seed: decides the order.
        pack: whether a row holds several texts.

    Raises:
        ValueError: no examples, or one that is too long or has nothing to predict.
    """

    def __init__(
        self, examples: Sequence[Example], batch_size: int, window: int, seed: int = 0, pack: bool = True
    ) -> None:
        self.examples = list(examples)
        self.window = window
        useless = [i for i, example in enumerate(self.examples) if example.n_labels == 0]
        if useless or not self.examples:
            got = f"none in example {useless[0]}" if useless else "no examples"
            raise ValueError(f"PackedDataset: expected something to predict in each of some examples, got {got}")
        lengths = [len(example.ids) - 1 for example in self.examples]
        self.rows = packed(lengths, window) if pack else [[item] for item in range(len(lengths))]
        self._begin(len(self.rows), batch_size, seed)
        self.batch().shuffle(seed)

    @property
    def longest_row(self) -> int:
        """Tokens."""
        return max(sum(len(self.examples[item].ids) - 1 for item in row) for row in self.rows)

    @property
    def n_tokens(self) -> int:
        """That are read in a pass."""
        return sum(len(example.ids) - 1 for example in self.examples)

    @property
    def n_labels(self) -> int:
        """That count in a pass."""
        return sum(example.n_labels for example in self.examples)

    def __next__(self) -> Any:
        rows = self._indices(self.position, self.position + self._step)
        self.position += self._step
        return self.together(rows)

    def together(self, rows: Sequence[int]) -> Batch:
        """A batch of rows, by their numbers, as long as the longest of them."""
        items = [[self.examples[item] for item in self.rows[row]] for row in rows]
        length = max(sum(len(example.ids) - 1 for example in row) for row in items)
        tokens = np.full((len(items), length), PADDING, np.int64)
        labels = np.full((len(items), length), IGNORED, np.int64)
        documents = np.full((len(items), length), -1, np.int64)
        for i, row in enumerate(items):
            start = 0
            for number, (ids, counts) in enumerate(row):
                places = slice(start, start + len(ids) - 1)
                tokens[i, places] = ids[:-1]
                labels[i, places] = np.where(counts[1:], ids[1:], IGNORED)
                documents[i, places] = number
                start = places.stop
        # what fills a row up stands at its end, where nobody sees it
        return Batch(tokens, labels, documents if max(map(len, items)) > 1 else None)
