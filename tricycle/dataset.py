"""Datasets: pairs of inputs and outputs, in batches, in an order that a seed decides.

Shapes: N items, B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tricycle.layers import positive
from tricycle.loss import check_range
from tricycle.tensor import Tensor, to_tensor


class _Batches:
    """What datasets share: an order for each pass over the items, batches of them, conversion to Tensors."""

    def __init__(self, n_items: int, batch_size: int | None, seed: int) -> None:
        self.n_items = n_items
        self.batch_size = batch_size
        self.seed = seed
        self._is_batched = self._is_shuffled = self._as_tensors = False
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, int))

    def batch(self, batch_size: int | None = None) -> Any:
        """Give batches of this many items (or as many as said before) instead of single items; returns self."""
        size = self.batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError(f"{type(self).__name__}.batch: expected a batch size, got none")
        positive(type(self).__name__, batch_size=size)
        self.batch_size, self._is_batched = size, True
        return self

    def shuffle(self, seed: int | None = None) -> Any:
        """Give each pass an order of its own, which the seed decides; returns self."""
        self.seed = self.seed if seed is None else seed
        self._is_shuffled = True
        self._order = (-1, self._order[1])
        return self

    def to_tensor(self) -> Any:
        """Give Tensors instead of NumPy arrays; whole numbers stay whole; returns self."""
        self._as_tensors = True
        return self

    @property
    def _step(self) -> int:
        return self.batch_size if self._is_batched and self.batch_size else 1

    def _generator(self, epoch: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, epoch))

    def _indices(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The pass and the item behind each of the numbers start..stop-1 of an endless run."""
        pairs = []
        for number in range(start, stop):
            epoch, place = divmod(number, self.n_items)
            if self._is_shuffled and self._order[0] != epoch:
                self._order = epoch, self._generator(epoch).permutation(self.n_items)
            pairs.append((epoch, int(self._order[1][place]) if self._is_shuffled else place))
        return pairs

    def _items(self, pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _give(self, start: int, stop: int) -> tuple[Any, Any]:
        inputs, outputs = self._items(self._indices(start, stop))
        if not self._is_batched:
            inputs, outputs = inputs[0], outputs[0]
        if self._as_tensors:
            return self._tensor(inputs), self._tensor(outputs)
        return inputs, outputs

    def _tensor(self, array: np.ndarray) -> Tensor:
        dtype = int if array.dtype.kind in "iu" else None
        return to_tensor(array, dtype=dtype, requires_grad=False, is_batched=self._is_batched)


class _Pairs(_Batches):
    """Inputs and outputs that lie in two arrays of equal length."""

    def __init__(self, inputs: Sequence, outputs: Sequence, batch_size: int | None = None, seed: int = 0) -> None:
        self.inputs, self.outputs = np.asarray(inputs), np.asarray(outputs)
        if len(self.inputs) != len(self.outputs) or not len(self.inputs):
            raise ValueError(
                f"{type(self).__name__}: expected as many outputs as inputs, at least one, "
                f"got {len(self.inputs)} inputs and {len(self.outputs)} outputs"
            )
        super().__init__(len(self.inputs), batch_size, seed)

    def _items(self, pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        indices = [index for _, index in pairs]
        return self.inputs[indices], self.outputs[indices]


class Dataset(_Pairs):
    """Inputs and outputs, all of them once in each pass; the last batch of a pass may be smaller.

    Args:
        inputs, outputs: arrays or lists of N items each.
        seed: decides the orders once `shuffle` is called; each pass has another.
    """

    def __init__(self, inputs: Sequence, outputs: Sequence, seed: int = 0) -> None:
        super().__init__(inputs, outputs, None, seed)
        self._n_passes = 0

    def __len__(self) -> int:
        """How many batches (or items) a pass has."""
        return -(-self.n_items // self._step)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        start = self._n_passes * self.n_items
        self._n_passes += 1
        for first in range(start, start + self.n_items, self._step):
            yield self._give(first, min(first + self._step, start + self.n_items))


class _Endless(_Batches):
    """`next()` never ends, and the position is two numbers."""

    position: int = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> tuple[Any, Any]:
        given = self._give(self.position, self.position + self._step)
        self.position += self._step
        return given

    def state(self) -> dict[str, int]:
        """Where the dataset stands: enough to go on with exactly the batches that would have come."""
        return {"position": self.position, "seed": self.seed, "n_items": self.n_items}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: it is no state, or that of a dataset of another size: other batches would come.
        """
        if state.get("n_items") != self.n_items:
            raise ValueError(
                f"{type(self).__name__}: expected the state of a dataset with {self.n_items} items, "
                f"got one with {state.get('n_items')}"
            )
        for name in ("position", "seed"):
            if not isinstance(state.get(name), int) or state[name] < 0:
                got = repr(state.get(name))
                raise ValueError(f"{type(self).__name__}: expected {name} to be a whole number, got {got}")
        self.position, self.seed = state["position"], state["seed"]
        self._order = (-1, self._order[1])


class InfiniteBatchDataset(_Endless, _Pairs):
    """Batches of inputs and outputs without end.

    Args:
        inputs, outputs: arrays or lists of N items each.
        batch_size: items a batch; a batch may span two passes.
    """

    def __init__(self, inputs: Sequence, outputs: Sequence, batch_size: int, seed: int = 0) -> None:
        super().__init__(inputs, outputs, batch_size, seed)
        self.batch()


class CausalLMDataset(_Endless):
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
            raise ValueError(
                f"CausalLMDataset(context_window={context_window}): expected at least {context_window + 1} tokens, "
                f"got {len(self.tokens)}"
            )
        n_windows, self._spare = divmod(n_pairs, context_window)
        if n_windows > 1:  # one window fewer leaves room to start anywhere
            n_windows, self._spare = n_windows - 1, self._spare + context_window
        super().__init__(n_windows, batch_size, seed)

    def _items(self, pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        length = self.context_window
        windows = np.empty((len(pairs), length + 1), np.int64)
        for row, (epoch, index) in zip(windows, pairs):
            start = index * length + self._place(epoch)
            row[:] = self.tokens[start : start + length + 1]
        check_range("CausalLMDataset: tokens", windows, self.vocab_size)
        return windows[:, :-1], windows[:, 1:]

    def _place(self, epoch: int) -> int:
        """Where the first window of a pass starts. Its own stream, so that it does not repeat the order's draws."""
        if not self._is_shuffled:
            return 0
        return int(np.random.default_rng((self.seed, epoch, 1)).integers(self._spare + 1))
