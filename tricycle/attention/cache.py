"""The KV cache of an attention layer, for generation (for batches of several texts: `tricycle/decoding/ragged.py`).

Shapes: B batch, T tokens, K heads of keys and values, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from tricycle.devices import Array, array_module
from tricycle.kernels import FEW_ROWS
from tricycle.tensor import Tensor

F = TypeVar("F", bound=Callable[..., Any])
# The position of the first token and the number of tokens of each text in a sequence.
Segments = tuple[tuple[int, int], ...]

MIN_CAPACITY = 256  # tokens
# By dtype, where tokens are not stored in arrays: allocate memory like keys (B, T, K, D), for a number of tokens.
ALLOCATORS: dict[Any, Callable[[Array, int], Any]] = {}
MAX_ROLLBACK = 64  # tokens by which a cache with a window can always be truncated: more than the number of draft tokens


class KeyValueCache:
    """The keys and values of the tokens that one attention layer has processed, without gradients.

    Args:
        capacity: the maximum number of tokens. Memory grows on demand.
        dtype: of the stored keys and values, by default that of the first keys; int8 quantizes them.
        window: the sliding-window size of the layer; older tokens are dropped. None to keep all.
    """

    def __init__(self, capacity: int, dtype: DTypeLike | None = None, window: int | None = None) -> None:
        self.capacity, self.window = capacity, window
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.length = 0
        self._first = 0  # position of the first stored token
        self.expected_length = 0  # for which memory is allocated at once when it grows next
        self._pinned: int | None = None
        self._keys: Array | None = None
        self._values: Array | None = None
        self.last: dict[str, Array] = {}  # the last token's inputs of token-shift layers, (B, 1, ...)

    def texts(self, n_tokens: int) -> list[tuple[slice, KeyValueCache]]:
        """Return [(slice(0, n_tokens), self)]: all new tokens belong to one text (a `RaggedCache` has several)."""
        return [(slice(0, n_tokens), self)]

    def segments(self, n_tokens: int) -> Segments:
        """Return ((length, n_tokens),): the next token's position and the number of new ones, for the only text."""
        return ((self.length, n_tokens),)

    def call(self, layer: Callable[..., Tensor], x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return `layer(x, self, *args, **options)`; a `RaggedCache` may call the layer once for each text."""
        return layer(x, self, *args, **options)

    def attend(self, op: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any, precision: str = "float32") -> Tensor:
        """Append keys, values; return attention `op` of q to all, in float32 if converting them would take longer."""
        cached, (mask, *scales) = [Tensor(x, False) for x in self.append(k.array, v.array)], options
        if mask is not None and mask.shape[-1] == self.length:  # also for tokens that have been dropped
            mask = mask[..., self.length - cached[0].shape[1] :]
        return op(Tensor(q.array, False), *cached, mask, *scales, precision if q.shape[1] > FEW_ROWS else "float32")

    def append(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Append keys, values (B, T, K, D), ValueError if full; return views of those stored, at least those in use."""
        n_tokens, (all_keys, all_values, stop) = keys.shape[1], self.make_room(keys, values)
        all_keys[:, stop - n_tokens : stop], all_values[:, stop - n_tokens : stop] = keys, values
        self.length += n_tokens
        if stop > 2 * self._most:  # after a long prefill the next token attends to few of them
            self._drop_unseen()
        return all_keys[:, :stop], all_values[:, :stop]

    def make_room(self, keys: Array, values: Array) -> tuple[Array, Array, int]:
        """Return memory (B, N, K, D) and its number of tokens with the new ones, which the caller writes and counts."""
        n_items, n_tokens = keys.shape[:2]
        if self.length + n_tokens > self.capacity:
            raise ValueError(f"KeyValueCache: {self.length} + {n_tokens} tokens exceed its capacity of {self.capacity}")
        if self._keys is not None and len(self._keys) != n_items:
            raise ValueError(f"KeyValueCache: expected a batch of {len(self._keys)}, got {n_items}")
        if self.length - self._first + n_tokens > self._most:
            self._drop_unseen()
        start, stop = self.length - self._first, self.length - self._first + n_tokens
        if self._keys is None or self._values is None or stop > self._keys.shape[1]:
            self._keys = self._enlarged(self._keys, keys, start, stop)
            self._values = self._enlarged(self._values, values, start, stop)
        return self._keys, self._values, stop

    @property
    def _most(self) -> int:
        """The number of stored tokens above which unseen ones are dropped: min(capacity, window - 1 + MIN_CAPACITY)."""
        return self.capacity if self.window is None else min(self.capacity, self.window - 1 + MIN_CAPACITY)

    def _enlarged(self, held: Array | None, new: Array, length: int, needed: int) -> Array:
        """Return an array of the cache's dtype for `needed` or more tokens, with the first `length` of `held`."""
        room = 0 if held is None else held.shape[1]
        grown = max(needed, min(self._most, max(2 * room, MIN_CAPACITY, self.expected_length + MIN_CAPACITY // 2)))
        shape, allocate = (len(new), grown, *new.shape[2:]), ALLOCATORS.get(self.dtype)
        larger = allocate(new, grown) if allocate else array_module(new).empty(shape, self.dtype or new.dtype)
        if held is not None:
            larger[:, :length] = held[:, :length]
        return larger

    def _drop_unseen(self) -> None:
        """Drop tokens outside the windows of the last `MAX_ROLLBACK` tokens and of the pinned position."""
        earliest = min(self.length - MAX_ROLLBACK, self.length if self._pinned is None else self._pinned)
        first = earliest - (self.window or self.capacity) + 1
        if first <= self._first or self._keys is None or self._values is None:
            return
        kept = slice(first - self._first, self.length - self._first)
        self._keys, self._values = self._keys[:, kept].copy(), self._values[:, kept].copy()
        self._first = first

    def pin(self, position: int | None) -> None:
        """Keep, from now on, what truncating to this position needs, until another position or None is pinned."""
        self._pinned = position

    def can_truncate(self, length: int) -> bool:
        """Return whether `truncate(length)` is possible: to 0 or all; else without token shift, window still stored."""
        return length in (0, self.length) or (self._first <= max(0, length - (self.window or 0) + 1) and not self.last)

    def truncate(self, length: int) -> None:
        """Shorten to the first `length` tokens; ValueError if there are fewer or `can_truncate(length)` is False."""
        if not 0 <= length <= self.length:
            raise ValueError(f"KeyValueCache: expected to keep 0 to {self.length} tokens, got {length}")
        if length == self.length:
            return
        if length and self.last:
            raise ValueError("KeyValueCache: expected attention without token shift to truncate, got one with it")
        if not self.can_truncate(length):
            raise ValueError(f"KeyValueCache: expected a position whose window is still stored, got {length}")
        self._first, self.length, self.last = self._first if length else 0, length, {}

    @property
    def keys(self) -> Array:
        """The stored keys, (B, T, K, D), only the latest with a window; None before the first `append`."""
        return None if self._keys is None else self._keys[:, : self.length - self._first]


def takes_ragged(forward: F) -> F:
    """Mark, and return, a `forward` that accepts the tokens of several texts as one sequence with a `RaggedCache`."""
    forward.takes_ragged = True  # type: ignore[attr-defined]
    return forward


def concatenate_texts(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate results (1, T, ...) of texts along axis 1, without gradients; return a single one unchanged."""
    return parts[0] if len(parts) == 1 else Tensor(parts[0].xp.concatenate([x.array for x in parts], axis=1), False)
