"""Sequence packing: several texts in one training row, separated by the attention mask.

A loss mask says which tokens of a text are predicted, such as those of the answers in a conversation. Rows contain
complete texts: the longest first, each in the fullest row with enough space (Johnson 1974, "best fit decreasing").
`tricycle finetune` trains on these batches.

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

IGNORED = -1  # the label of tokens that are not predicted
PADDING = 0  # the token id at the end of short rows; the causal mask hides it from the texts


class Example(NamedTuple):
    """One training text.

    Attributes:
        ids: token ids (T,).
        loss_mask: booleans (T,): whether a token is predicted. The first one is ignored.
    """

    ids: np.ndarray
    loss_mask: np.ndarray

    @property
    def n_labels(self) -> int:
        """The number of predicted tokens that count for the loss; the first id is never predicted."""
        return int(self.loss_mask[1:].sum())


class Batch(NamedTuple):
    """A batch of rows for `GPT.loss`.

    Attributes:
        tokens, labels: token ids (B, T); labels may be `IGNORED`.
        documents: (B, T), the number of a token's text within its row, -1 for padding; None if each row has one text.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray | None

    @property
    def n_labels(self) -> int:
        """The number of predicted tokens: the labels that are not IGNORED."""
        return int((self.labels != IGNORED).sum())


def supports_packing(model: GPT, row_length: int | None = None) -> bool:
    """Return whether a mask can separate the texts of a row: not with token or key shift or a non-fused softmax.

    It cannot with token or key shift, nor with a softmax whose weights depend on the positions in the row, nor with
    LongRoPE, whose frequencies depend on the length of the row, if this may exceed the original window.

    Args:
        row_length: the most tokens of a row; by default the context window.
    """
    config = model.config
    if config.rotary_scaling == "longrope" and (row_length or config.context_window) > config.rotary_original_window:
        return False
    for block in model.blocks:
        attention: Any = getattr(block, "attention", None)
        inner = getattr(attention, "attention", None)
        if not (isinstance(inner, Attention) and inner.softmax.fused) or attention.uses_shift:
            return False
    return True


def packed_forward_kwargs(model: GPT, tokens: Any, documents: Array | None) -> dict[str, Any]:
    """Return `mask`, `positions` that separate texts in rows; {} without `documents`; ValueError if unsupported.

    Args:
        tokens: (B, T).
        documents: integers (B, T), as of `Batch`.

    Raises:
        ValueError: documents of another shape or dtype, or a model without support for packing.
    """
    if documents is None:
        return {}
    if documents.shape != tokens.shape or documents.dtype.kind not in "iu":
        got = f"{documents.dtype} of {documents.shape}"
        raise ValueError(f"packed_forward_kwargs: expected integer documents of shape {tokens.shape}, got {got}")
    if not supports_packing(model, tokens.shape[-1]):
        raise ValueError("packed_forward_kwargs: expected one text per row; a mask cannot separate texts in this model")
    return {"mask": documents[:, :, None] == documents[:, None, :], "positions": document_positions(documents)}


def document_positions(documents: Array) -> Array:
    """Return each token's position within its text, from 0, (B, T), from contiguous text numbers (B, T)."""
    xp = array_module(documents)
    positions = xp.arange(documents.shape[-1]) + xp.zeros_like(documents)
    is_first = xp.ones(documents.shape, bool)
    is_first[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return positions - xp.maximum.accumulate(xp.where(is_first, positions, 0), axis=-1)


def pack_lengths(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack items by best-fit decreasing; return each row's item indices; ValueError unless 1 <= length <= row_length.

    Raises:
        ValueError: a length is below 1 or above `row_length`.
    """
    if lengths and not 0 < min(lengths) <= max(lengths) <= row_length:
        raise ValueError(f"pack_lengths: expected lengths from 1 to {row_length}, got {min(lengths)} to {max(lengths)}")
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # free space and index of each row, the fullest row first
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        index = bisect_left(free, (lengths[item], -1))
        if index == len(free):
            space, row = row_length, len(rows)
            rows.append([])
        else:
            space, row = free.pop(index)
        rows[row].append(item)
        if space > lengths[item]:
            insort(free, (space - lengths[item], row))
    return rows


class PackedDataset(EndlessDataset):
    """An endless dataset of packed rows: `next()` returns a `Batch`; each epoch has another order.

    Args:
        examples: of 2 to `window` + 1 tokens.
        batch_size: rows per batch.
        window: the length of a row in tokens.
        seed: of the order.
        pack: put several texts in a row.

    Raises:
        ValueError: no examples, or one that is too long or has no predicted token.
    """

    def __init__(
        self, examples: Sequence[Example], batch_size: int, window: int, seed: int = 0, pack: bool = True
    ) -> None:
        self.examples = list(examples)
        self.window = window
        without_labels = [i for i, example in enumerate(self.examples) if example.n_labels == 0]
        if without_labels or not self.examples:
            got = f"none in example {without_labels[0]}" if without_labels else "no examples"
            raise ValueError(f"PackedDataset: expected examples with at least one predicted token, got {got}")
        lengths = [len(example.ids) - 1 for example in self.examples]
        self.rows = pack_lengths(lengths, window) if pack else [[item] for item in range(len(lengths))]
        self._initialize(len(self.rows), batch_size, seed)
        self.batch().shuffle(seed)

    @property
    def max_row_length(self) -> int:
        """The length of the longest row in input tokens, one fewer per example than its ids."""
        return max(sum(len(self.examples[item].ids) - 1 for item in row) for row in self.rows)

    @property
    def n_tokens(self) -> int:
        """The number of input tokens per epoch without padding, one fewer per example than its ids."""
        return sum(len(example.ids) - 1 for example in self.examples)

    @property
    def n_labels(self) -> int:
        """The number of predicted tokens per epoch."""
        return sum(example.n_labels for example in self.examples)

    def __next__(self) -> Any:
        """Return the next Batch, of `batch_size` rows in the shuffled order, and advance."""
        rows = self._indices(self.position, self.position + self._step)
        self.position += self._step
        return self.collate(rows)

    def collate(self, rows: Sequence[int]) -> Batch:
        """Return a padded Batch: ids, next ids as labels (IGNORED outside the loss mask), and text numbers or None."""
        items = [[self.examples[item] for item in self.rows[row]] for row in rows]
        length = max(sum(len(example.ids) - 1 for example in row) for row in items)
        tokens = np.full((len(items), length), PADDING, np.int64)
        labels = np.full((len(items), length), IGNORED, np.int64)
        documents = np.full((len(items), length), -1, np.int64)
        for i, row in enumerate(items):
            start = 0
            for number, (ids, loss_mask) in enumerate(row):
                columns = slice(start, start + len(ids) - 1)
                tokens[i, columns] = ids[:-1]
                labels[i, columns] = np.where(loss_mask[1:], ids[1:], IGNORED)
                documents[i, columns] = number
                start = columns.stop
        # Padding is at the end of a row, where the causal mask hides it: rows of one text need no documents.
        return Batch(tokens, labels, documents if max(map(len, items)) > 1 else None)
