"""The KV cache: keys and values of earlier tokens, for generation (of several texts: `tricycle/decoding/ragged.py`).

Shapes: B batch, T tokens, K heads of keys and values, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from tricycle.devices import Array, array_module
from tricycle.tensor import Tensor

F = TypeVar("F", bound=Callable[..., Any])
# Where the tokens of a sequence are in their texts: for each text the position of the first and the number of tokens.
Segments = tuple[tuple[int, int], ...]

LEAST_ROOM = 256  # tokens
BACK = 64  # tokens that a cache with a window can always be cropped by: more than are drafted at a time


class KeyValueCache:
    """The keys and values of the tokens that one attention layer has seen. No gradient flows through it.

    Args:
        capacity: how many tokens fit. Memory is taken as they come.
        dtype: of what is kept; that of the first keys unless given.
        window: size of the layer's sliding window; None for all. Tokens outside of it are dropped.
    """

    def __init__(self, capacity: int, dtype: DTypeLike | None = None, window: int | None = None) -> None:
        self.capacity = capacity
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.window = window
        self.length = 0
        self._first = 0  # position of the first token that is kept
        self._held: int | None = None
        self._keys: Array | None = None
        self._values: Array | None = None
        self.last: dict[str, Array] = {}  # the last token's input of layers that mix it with the next, (B, 1, ...)

    def texts(self, n_tokens: int) -> list[tuple[slice, KeyValueCache]]:
        """Return for each text which of a sequence's tokens are its own, with its cache."""
        return [(slice(0, n_tokens), self)]

    def segments(self, n_tokens: int) -> Segments:
        """Return where the next tokens are in their texts."""
        return ((self.length, n_tokens),)

    def call(self, layer: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return `layer(x, cache, ...)`; a `RaggedCache` may call the layer with one text after the other."""
        result: Tensor = layer(x, self, *args, **options)
        return result

    def append(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add keys and values (B, T, K, D); return those of all tokens that these T may see, or of more."""
        n_items, n_tokens = keys.shape[:2]
        if self.length + n_tokens > self.capacity:
            raise ValueError(f"KeyValueCache: {self.length} + {n_tokens} tokens exceed its capacity of {self.capacity}")
        if self._keys is not None and len(self._keys) != n_items:
            raise ValueError(f"KeyValueCache: expected a batch of {len(self._keys)}, got {n_items}")
        if self.length - self._first + n_tokens > self._most:
            self._drop_unseen()
        start = self.length - self._first
        stop = start + n_tokens
        if self._keys is None or self._values is None or stop > self._keys.shape[1]:
            self._keys = self._enlarged(self._keys, keys, start, stop)
            self._values = self._enlarged(self._values, values, start, stop)
        self._keys[:, start:stop], self._values[:, start:stop] = keys, values
        self.length += n_tokens
        seen = self._keys[:, :stop], self._values[:, :stop]
        if stop > 2 * self._most:  # a long text at once, of which the next token sees little
            self._drop_unseen()
        return seen

    @property
    def _most(self) -> int:
        """The number of tokens to keep before those outside of the window are dropped."""
        return self.capacity if self.window is None else min(self.capacity, self.window - 1 + LEAST_ROOM)

    def _enlarged(self, held: Array | None, new: Array, length: int, needed: int) -> Array:
        """Return memory for `needed` tokens or more, not for a whole context window at once, with what is held."""
        room = 0 if held is None else held.shape[1]
        grown = max(needed, min(self._most, max(2 * room, LEAST_ROOM)))
        larger = array_module(new).empty((new.shape[0], grown, *new.shape[2:]), self.dtype or new.dtype)
        if held is not None:
            larger[:, :length] = held[:, :length]
        return larger

    def _drop_unseen(self) -> None:
        """Drop what no token sees from the last `BACK` on, nor from the position that is held."""
        place = self.length - BACK if self._held is None else min(self._held, self.length - BACK)
        first = place - (self.window or self.capacity) + 1
        if first <= self._first or self._keys is None or self._values is None:
            return
        kept = slice(first - self._first, self.length - self._first)
        self._keys, self._values = self._keys[:, kept].copy(), self._values[:, kept].copy()
        self._first = first

    def pin(self, place: int | None) -> None:
        """Be able to crop to this position, until another is named or None."""
        self._held = place

    def can_truncate(self, length: int) -> bool:
        """Return whether `truncate(length)` works: what the next token would see is kept, and nothing is mixed."""
        if length in (0, self.length):
            return True
        return not self.has_shift_state and (self._first == 0 or self._first <= length - (self.window or 0) + 1)

    def truncate(self, length: int) -> None:
        """Drop all tokens but the first `length`; raise a ValueError if there are fewer, or `can_truncate` is False."""
        if not 0 <= length <= self.length:
            raise ValueError(f"KeyValueCache: expected to keep 0 to {self.length} tokens, got {length}")
        if length == self.length:
            return
        if length and self.has_shift_state:
            raise ValueError("KeyValueCache: expected attention without a shift, to forget some tokens")
        if not self.can_truncate(length):
            raise ValueError(f"KeyValueCache: expected to keep what a token sees, but {length} is too long ago")
        self._first = self._first if length else 0
        self.length = length
        self.last = {}

    def select(self, rows: np.ndarray) -> KeyValueCache:
        """Return a cache of some items of the batch, each as often as it is named."""
        chosen = KeyValueCache(self.capacity, self.dtype, self.window)
        chosen.length, chosen._first = self.length, self._first
        held = {"_keys": self._keys, "_values": self._values, **self.last}
        taken = {name: None if x is None else x[array_module(x).asarray(rows)] for name, x in held.items()}
        chosen._keys, chosen._values = taken.pop("_keys"), taken.pop("_values")
        chosen.last = taken
        return chosen

    @property
    def has_shift_state(self) -> bool:
        """Whether tokens were mixed with those before them."""
        return bool(self.last)

    @property
    def keys(self) -> Array:
        """(B, T, K, D) of all tokens that are kept."""
        return None if self._keys is None else self._keys[:, : self.length - self._first]


def takes_ragged(forward: F) -> F:
    """Mark a `forward` that takes the new tokens of several texts as one sequence, with a `RaggedCache`."""
    forward.takes_ragged = True  # type: ignore[attr-defined]
    return forward


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return results (1, T, ...) of several texts as one sequence, without gradients."""
    if len(parts) == 1:
        return parts[0]
    return Tensor(parts[0].xp.concatenate([part.array for part in parts], axis=1), False)
