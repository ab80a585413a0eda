"""Datasets: pairs of inputs and outputs, in batches, in an order that a seed decides.

Shapes: N items, B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from tricycle.ops import check_range, positive
from tricycle.tensor import Tensor, to_tensor


class Dataset:
    """Inputs and outputs, all of them once in each pass; the last batch of a pass may be smaller.

    Args:
        inputs, outputs: arrays or lists of N items each.
        seed: decides the orders once `shuffle` is called; each pass has another.

    Raises:
        ValueError: not as many outputs as inputs, or none.
    """

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[Any], seed: int = 0) -> None:
        self.inputs, self.outputs = np.asarray(inputs), np.asarray(outputs)
        n_inputs, n_outputs = len(self.inputs), len(self.outputs)
        if n_inputs != n_outputs or not n_inputs:
            got = f"{n_inputs} inputs and {n_outputs} outputs"
            raise ValueError(f"{type(self).__name__}: expected as many outputs as inputs, at least one, got {got}")
        self._begin(n_inputs, None, seed)

    def _begin(self, n_items: int, batch_size: int | None, seed: int) -> None:
        self.n_items, self.batch_size, self.seed = n_items, batch_size, seed
        self.position = 0  # items given so far, in all passes
        self._is_batched = self._is_shuffled = self._as_tensors = False
        self._latest_order: tuple[int, Sequence[int]] = (-1, ())

    def batch(self, batch_size: int | None = None) -> Self:
        """Give batches of this many items (or as many as said before) instead of single items; returns self."""
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError(f"{type(self).__name__}.batch: expected a batch size, got none")
        positive(type(self).__name__, batch_size=size)
        self.batch_size, self._is_batched = size, True
        return self

    def shuffle(self, seed: int | None = None) -> Self:
        """Give each pass an order of its own, which the seed decides; returns self."""
        self.seed = self.seed if seed is None else seed
        self._is_shuffled, self._latest_order = True, (-1, ())
        return self

    def to_tensor(self) -> Self:
        """Give Tensors instead of NumPy arrays; whole numbers stay whole; returns self."""
        self._as_tensors = True
        return self

    def __len__(self) -> int:
        """How many batches (or items) a pass has."""
        return -(-self.n_items // self._step)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        start = self.position
        self.position = stop = start + self.n_items  # the next pass is another one, even if this one is left early
        for first in range(start, stop, self._step):
            yield self._give(first, min(first + self._step, stop))

    @property
    def _step(self) -> int:
        return self.batch_size if self._is_batched and self.batch_size else 1

    def _order(self, epoch: int) -> Sequence[int]:
        if self._latest_order[0] != epoch:
            order: Any = range(self.n_items)
            if self._is_shuffled:
                order = np.random.default_rng((self.seed, epoch)).permutation(self.n_items)
            self._latest_order = epoch, order
        return self._latest_order[1]

    def _give(self, start: int, stop: int) -> tuple[Any, Any]:
        """Items number start..stop-1 of an endless run."""
        places = [divmod(number, self.n_items) for number in range(start, stop)]
        arrays = self._items([(epoch, int(self._order(epoch)[place])) for epoch, place in places])
        inputs, outputs = arrays if self._is_batched else (arrays[0][0], arrays[1][0])
        return (self._tensor(inputs), self._tensor(outputs)) if self._as_tensors else (inputs, outputs)

    def _items(self, chosen: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and outputs of some items, each named by its pass and its index."""
        indices = [index for _, index in chosen]
        return self.inputs[indices], self.outputs[indices]

    def _tensor(self, array: np.ndarray) -> Tensor:
        dtype = int if array.dtype.kind in "iu" else None
        return to_tensor(array, dtype=dtype, requires_grad=False, is_batched=self._is_batched)


class InfiniteBatchDataset(Dataset):
    """Batches of inputs and outputs without end, under `next()`; its position is a number.

    Args:
        inputs, outputs: arrays or lists of N items each.
        batch_size: items a batch; a batch may span two passes.
    """

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[Any], batch_size: int, seed: int = 0) -> None:
        super().__init__(inputs, outputs, seed)
        self.batch(batch_size)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, Any]:
        batch = self._give(self.position, self.position + self._step)
        self.position += self._step
        return batch

    def state(self) -> dict[str, int]:
        """Where the dataset stands: enough to go on with exactly the batches that would have come."""
        return {"position": self.position, "seed": self.seed, "n_items": self.n_items}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: it is no state, or that of a dataset of another size: other batches would come.
        """
        for name in self.state():
            value = state.get(name)
            if not isinstance(value, int) or value < 0 or (name == "n_items" and value != self.n_items):
                wanted = self.n_items if name == "n_items" else "a whole number"
                raise ValueError(f"{type(self).__name__}: expected {name} of the state to be {wanted}, got {value!r}")
        self.position, self.seed, self._latest_order = state["position"], state["seed"], (-1, ())


def pad(sequences: Sequence[Sequence[int]], value: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of any lengths as one array (B, T) of whole numbers, filled up with `value`, and their lengths (B,)."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    padded = np.full((len(lengths), lengths.max(initial=0)), value, np.int64)
    for row, sequence in zip(padded, sequences):
        row[: len(sequence)] = sequence
    return padded, lengths


class Buckets:
    """Batches of items of like length, so that little is padded; arrays of indices without end, under `next()`.

    Each pass has every item once. Items of one length, and the batches, come in another order in each.

    Args:
        lengths: (N,), or (N, K) where an item is K sequences.
        max_tokens: the most numbers in a batch, padding included.
        seed: decides the orders.

    Raises:
        ValueError: no items, or one that is longer than a batch may be.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, max_tokens: int, seed: int = 0) -> None:
        self.lengths = np.array(lengths, np.int64, ndmin=2).T if np.ndim(lengths) < 2 else np.asarray(lengths)
        self.max_tokens, self.seed, self.epoch, self.position = max_tokens, seed, 0, 0
        longest = self.lengths.sum(axis=1).max(initial=0)
        if not 0 < longest <= max_tokens:
            raise ValueError(f"Buckets(max_tokens={max_tokens}): expected items of 1 to {max_tokens}, got {longest}")
        self._batches = self.batches(0)

    def batches(self, epoch: int) -> list[np.ndarray]:
        """All batches of one pass, in its order."""
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
        return self

    def __next__(self) -> np.ndarray:
        if self.position == len(self._batches):
            self.load_state({"epoch": self.epoch + 1, "position": 0})
        self.position += 1
        return self._batches[self.position - 1]

    def state(self) -> dict[str, int]:
        """Where it stands: enough to go on with exactly the batches that would have come."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken, from the same lengths and seed."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._batches = self.batches(self.epoch)


class CausalLMDataset(InfiniteBatchDataset):
    """Windows of a long run of tokens; the output is the input moved on by one token. Endless under `next()`.

    A pass visits neighbouring windows that do not overlap, each once. When shuffled, every pass has another
    order and starts at another place, so that windows are cut elsewhere each time.

    Args:
        tokens: a run of token ids: an array, a memory map, or a corpus of `tricycle_datasets`.
        vocab_size: ids are below this.
        batch_size: windows a batch, once `batch` is called.
        context_window: T, tokens a window.
        seed: decides order and places once `shuffle` is called.

    Raises:
        ValueError: fewer than T + 1 tokens, or no run of whole numbers; on `next()`, an id outside the vocabulary.
    """

    def __init__(self, tokens: Any, vocab_size: int, batch_size: int, context_window: int, seed: int = 0) -> None:
        positive("CausalLMDataset", vocab_size=vocab_size, batch_size=batch_size, context_window=context_window)
        self.tokens = np.asarray(tokens) if isinstance(tokens, (list, tuple)) else tokens
        self.vocab_size, self.context_window = vocab_size, context_window
        first = np.asarray(self.tokens[:1])
        if first.ndim != 1 or (first.size and first.dtype.kind not in "iu"):
            got = f"items of type {first.dtype} and shape {first.shape[1:]}"
            raise ValueError(f"CausalLMDataset: expected a run of whole numbers, got {got}")
        n_pairs = len(self.tokens) - 1
        if n_pairs < context_window:
            title = f"CausalLMDataset(context_window={context_window})"
            raise ValueError(f"{title}: expected at least {context_window + 1} tokens, got {len(self.tokens)}")
        n_windows, self._spare = divmod(n_pairs, context_window)
        if n_windows > 1:  # one window fewer leaves room to start anywhere
            n_windows, self._spare = n_windows - 1, self._spare + context_window
        self._begin(n_windows, batch_size, seed)

    def _items(self, chosen: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        length = self.context_window
        windows = np.empty((len(chosen), length + 1), np.int64)
        for row, (epoch, index) in zip(windows, chosen):
            start = index * length + self._place(epoch)
            row[:] = self.tokens[start : start + length + 1]
        check_range("CausalLMDataset: tokens", windows, self.vocab_size)
        return windows[:, :-1], windows[:, 1:]

    def _place(self, epoch: int) -> int:
        """Where the first window of a pass starts. Its own stream, so that it does not repeat the order's draws."""
        if not self._is_shuffled:
            return 0
        return int(np.random.default_rng((self.seed, epoch, 1)).integers(self._spare + 1))
