"""Datasets: pairs of inputs and outputs, padding and bucketing of sequences, and `CausalLMDataset`.

Shapes: N items, B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from tricycle.batches import CausalLMDataset, EndlessDataset

__all__ = ["Buckets", "CausalLMDataset", "Dataset", "InfiniteBatchDataset", "pad"]


class Dataset(EndlessDataset):
    """Pairs of inputs and outputs; `iter()` returns one epoch, whose last batch may be smaller.

    Args:
        inputs, outputs: arrays or lists of N items each.
        seed: of the order of each epoch, after `shuffle`.

    Raises:
        ValueError: different numbers of inputs and outputs, or none.
    """

    def __init__(self, inputs: Sequence[Any] | np.ndarray, outputs: Sequence[Any] | np.ndarray, seed: int = 0) -> None:
        self.inputs, self.outputs = np.asarray(inputs), np.asarray(outputs)
        n_inputs, n_outputs = len(self.inputs), len(self.outputs)
        if n_inputs != n_outputs or not n_inputs:
            got = f"{n_inputs} inputs and {n_outputs} outputs"
            raise ValueError(f"{type(self).__name__}: expected as many outputs as inputs, at least one, got {got}")
        self._initialize(n_inputs, 0, seed)  # no batch size yet

    def batch(self, batch_size: int | None = None) -> Self:
        """Return batches of `batch_size` items (default: as set before, else ValueError) from now on; return self."""
        if batch_size is None and not self.batch_size:
            raise ValueError(f"{type(self).__name__}.batch: expected a batch size, got none")
        return super().batch(batch_size)

    def _items(self, indices: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, outputs) of the items at these indices, as new arrays."""
        return self.inputs[indices], self.outputs[indices]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield one epoch from the current position, which moves to the next epoch even if iteration stops early."""
        start = self.position
        self.position = stop = start + self.n_items  # the next epoch follows even if this one is left early
        for first in range(start, stop, self._step):
            yield self._item_or_batch(first, min(first + self._step, stop))


class InfiniteBatchDataset(Dataset):
    """Endless batches of inputs and outputs, by `next()`.

    Args:
        inputs, outputs: arrays or lists of N items each.
        batch_size: items per batch; a batch may span two epochs.
    """

    def __init__(
        self, inputs: Sequence[Any] | np.ndarray, outputs: Sequence[Any] | np.ndarray, batch_size: int, seed: int = 0
    ) -> None:
        super().__init__(inputs, outputs, seed)
        self.batch(batch_size)

    __iter__ = EndlessDataset.__iter__  # without end, unlike that of a Dataset


def pad(sequences: Sequence[Sequence[int]], value: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return integer sequences padded at the end with `value`, int64 (B, T), and their lengths before, int64 (B,)."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    padded = np.full((len(lengths), lengths.max(initial=0)), value, np.int64)
    for row, sequence in zip(padded, sequences):
        row[: len(sequence)] = sequence
    return padded, lengths


class Buckets:
    """Endless batches of item indices, grouped by similar length to reduce padding, by `next()`.

    Each epoch has every item once; items of equal length, and the batches, are shuffled in each epoch.

    Args:
        lengths: (N,), or (N, K) for items of K sequences.
        max_tokens: the maximum number of tokens in a batch, including padding.
        seed: of the order of each epoch.

    Raises:
        ValueError: no items, or an item longer than `max_tokens`.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, max_tokens: int, seed: int = 0) -> None:
        self.lengths = np.array(lengths, np.int64, ndmin=2).T if np.ndim(lengths) < 2 else np.asarray(lengths)
        self.max_tokens, self.seed, self.epoch, self.position = max_tokens, seed, 0, 0
        longest = self.lengths.sum(axis=1).max(initial=0)
        if not 0 < longest <= max_tokens:
            raise ValueError(f"Buckets(max_tokens={max_tokens}): expected items of 1 to {max_tokens}, got {longest}")
        self._batches = self.batches(0)

    def batches(self, epoch: int) -> list[np.ndarray]:
        """Return batches of item indices: similar lengths, up to `max_tokens` if padded, order from (seed, epoch)."""
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths))
        order = order[np.lexsort(self.lengths[order].T)]  # by the last sequence, then the one before it, ...
        batches, first, longest = [], 0, self.lengths[order[0]]
        for i, index in enumerate(order):
            longest = np.maximum(longest, self.lengths[index])
            if longest.sum() * (i + 1 - first) > self.max_tokens:
                batches.append(order[first:i])
                first, longest = i, self.lengths[index]
        batches.append(order[first:])
        return [batches[i] for i in generator.permutation(len(batches))]

    def __iter__(self) -> Self:
        """Return self: iteration goes on from the current position through all epochs, without end."""
        return self

    def __next__(self) -> np.ndarray:
        """Return the item indices of the next batch and advance; after an epoch's last batch, start the next epoch."""
        if self.position == len(self._batches):
            self.load_state({"epoch": self.epoch + 1, "position": 0})
        self.position += 1
        return self._batches[self.position - 1]

    def state(self) -> dict[str, int]:
        """Return a dict of "epoch" and "position" (batches given in it), from which `load_state` continues."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        """Restore the epoch and position that `state` returned, unchecked; lengths and seed must be the same."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._batches = self.batches(self.epoch)
