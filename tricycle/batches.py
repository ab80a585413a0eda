"""Endless datasets of training batches in a seeded order; `CausalLMDataset` of windows of a token sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from tricycle.ops import check_positive, check_range
from tricycle.tensor import Tensor, to_tensor


class EndlessDataset:
    """The base of datasets whose `next()` returns batches endlessly, epoch after epoch, from a saved position."""

    _items: Callable[[list[int]], tuple[np.ndarray, np.ndarray]]  # defined by subclasses: inputs and outputs of indices

    def _initialize(self, n_items: int, batch_size: int, seed: int) -> None:
        """Set sizes, seed and position 0; items come singly, in order and as arrays until methods change this."""
        self.n_items, self.batch_size, self.seed = n_items, batch_size, seed
        self.position = 0  # number of items returned so far, in all epochs
        self._step, self._is_batched, self._is_shuffled, self._as_tensors = 1, False, False, False
        self._latest_order: tuple[int, Sequence[int]] = (-1, ())

    def batch(self, batch_size: int | None = None) -> Self:
        """Return batches of `batch_size` items (default: as set before; ValueError if < 1) from now on; return self."""
        size = self.batch_size if batch_size is None else batch_size
        check_positive(type(self).__name__, batch_size=size)
        self.batch_size, self._step, self._is_batched = size, size, True
        return self

    def shuffle(self, seed: int | None = None) -> Self:
        """Order each epoch by a permutation drawn from (seed, epoch), by default the seed set before; return self."""
        self.seed = self.seed if seed is None else seed
        self._is_shuffled, self._latest_order = True, (-1, ())
        return self

    def to_tensor(self) -> Self:
        """Return Tensors instead of arrays from now on, int64 for integers, float32 for floats; return self."""
        self._as_tensors = True
        return self

    def __len__(self) -> int:
        """Return the number of batches (or items) in an epoch."""
        return -(-self.n_items // self._step)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Return self: iteration goes on from the current position through all epochs, without end."""
        return self

    def __next__(self) -> tuple[Any, Any]:
        """Return (inputs, outputs) of the next batch, or item, of the endless epochs, and advance the position."""
        batch = self._item_or_batch(self.position, self.position + self._step)
        self.position += self._step
        return batch

    def _item_or_batch(self, start: int, stop: int) -> tuple[Any, Any]:
        """Return (inputs, outputs) at positions start .. stop-1 as arrays or Tensors, a single item unless batched."""
        arrays = self._items(self._indices(start, stop))
        x, y = arrays if self._is_batched else (arrays[0][0], arrays[1][0])
        return (self._tensor(x), self._tensor(y)) if self._as_tensors else (x, y)

    def _tensor(self, array: np.ndarray) -> Tensor:
        """Return an array as a constant Tensor, int64 or float32, batched if `batch` was called."""
        dtype = int if array.dtype.kind in "iu" else None
        return to_tensor(array, dtype=dtype, requires_grad=False, is_batched=self._is_batched)

    def _indices(self, start: int, stop: int) -> list[int]:
        """Return the item indices at positions start .. stop-1 of the endless sequence of epochs."""
        return [int(self._cached_order(number // self.n_items)[number % self.n_items]) for number in range(start, stop)]

    def _cached_order(self, epoch: int) -> Sequence[int]:
        if self._latest_order[0] != epoch:
            self._latest_order = epoch, self._new_order(epoch)
        return self._latest_order[1]

    def _new_order(self, epoch: int) -> Any:
        """Return the order of an epoch's items: a permutation by (seed, epoch) if shuffled, else 0 .. n_items-1."""
        key, n_items = (self.seed, epoch), self.n_items
        return np.random.default_rng(key).permutation(n_items) if self._is_shuffled else range(n_items)

    def state(self) -> dict[str, int]:
        """Return a dict of "position" (items so far), "seed" and "n_items", from which `load_state` continues."""
        return {"position": self.position, "seed": self.seed, "n_items": self.n_items}

    def load_state(self, state: dict[str, int]) -> None:
        """Set position and seed from a dict of `state`; ValueError if not integers >= 0, or if `n_items` differs."""
        for name in self.state():
            value = state.get(name)
            if not isinstance(value, int) or value < 0 or (name == "n_items" and value != self.n_items):
                rule = self.n_items if name == "n_items" else "a whole number"
                raise ValueError(f"{type(self).__name__}: expected {name} of the state to be {rule}, got {value!r}")
        self.position, self.seed, self._latest_order = state["position"], state["seed"], (-1, ())


class CausalLMDataset(EndlessDataset):
    """Windows of a token sequence for next-token prediction: the outputs are the inputs shifted by one token.

    An epoch visits consecutive windows without overlap; with `shuffle`, in another order and with a random offset.

    Args:
        tokens: token ids below `vocab_size`: an array, a memory map, or a corpus of `tricycle_datasets`.
        batch_size: windows of `context_window` tokens per batch, after `batch`. seed: of order and offset.

    Raises:
        ValueError: fewer than T + 1 tokens, or not integers; on `next()`, an id outside the vocabulary.
    """

    def __init__(self, tokens: Any, vocab_size: int, batch_size: int, context_window: int, seed: int = 0) -> None:
        check_positive("CausalLMDataset", vocab_size=vocab_size, batch_size=batch_size, context_window=context_window)
        self.tokens = np.asarray(tokens) if isinstance(tokens, (list, tuple)) else tokens
        self.vocab_size, self.context_window = vocab_size, context_window
        first = np.asarray(self.tokens[:1])
        if first.ndim != 1 or (first.size and first.dtype.kind not in "iu"):
            got = f"items of type {first.dtype} and shape {first.shape[1:]}"
            raise ValueError(f"CausalLMDataset: expected a sequence of whole numbers, got {got}")
        n_pairs = len(self.tokens) - 1
        if n_pairs < context_window:
            title = f"CausalLMDataset(context_window={context_window})"
            raise ValueError(f"{title}: expected at least {context_window + 1} tokens, got {len(self.tokens)}")
        n_windows, self._spare = divmod(n_pairs, context_window)
        if n_windows > 1:  # one window fewer, so that any offset fits
            n_windows, self._spare = n_windows - 1, self._spare + context_window
        self._initialize(n_windows, batch_size, seed)

    def _new_order(self, epoch: int) -> Any:
        """Return each window's start in an epoch's order; if shuffled, random, with a random offset of all starts."""
        length = self.context_window
        if not self._is_shuffled:
            return range(0, self.n_items * length, length)
        start = np.random.default_rng((self.seed, epoch, 1)).integers(self._spare + 1)  # independent of the order
        return super()._new_order(epoch) * length + start

    def _items(self, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return int64 inputs and outputs (B, T) of windows that begin at `starts`; ValueError for invalid ids."""
        windows = np.empty((len(starts), self.context_window + 1), np.int64)
        for window, start in zip(windows, starts):
            window[:] = self.tokens[start : start + self.context_window + 1]
        check_range("CausalLMDataset: tokens", windows, self.vocab_size)
        return windows[:, :-1], windows[:, 1:]
