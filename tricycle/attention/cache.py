"""What attention remembers of the tokens before, for generation.

Shapes: B batch, T tokens, K heads of keys and values, D head size, C channels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from tricycle.devices import Array, array_module

LEAST_ROOM = 256  # tokens


class KeyValueCache:
    """The keys and values of the tokens that one attention layer has seen, for generation without gradients.

    Args:
        capacity: how many tokens fit. Room is taken as they come.
        dtype: of what is kept, such as float16, which takes half the memory; that of the first keys unless given.
    """

    def __init__(self, capacity: int, dtype: DTypeLike | None = None) -> None:
        self.capacity = capacity
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.length = 0
        self._keys: Array | None = None
        self._values: Array | None = None
        self.latest: Array | None = None  # what `TokenShift` has seen last, (B, 1, C)

    def append(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add (B, T, K, D) keys and values; returns those of all tokens so far.

        Raises:
            ValueError: more tokens than the cache holds, or another batch size than before.
        """
        n_items, n_tokens = keys.shape[:2]
        if self.length + n_tokens > self.capacity:
            raise ValueError(f"KeyValueCache: {self.length} + {n_tokens} tokens exceed its capacity of {self.capacity}")
        if self._keys is not None and len(self._keys) != n_items:
            raise ValueError(f"KeyValueCache: expected a batch of {len(self._keys)}, got {n_items}")
        length = self.length + n_tokens
        self._keys = self._with_room(self._keys, keys, length)
        self._values = self._with_room(self._values, values, length)
        self._keys[:, self.length : length], self._values[:, self.length : length] = keys, values
        self.length = length
        return self._keys[:, :length], self._values[:, :length]

    def _with_room(self, held: Array | None, new: Array, length: int) -> Array:
        """Room for so many tokens with what is held: more than that, but not for a whole context window at once."""
        room = 0 if held is None else held.shape[1]
        if held is not None and length <= room:
            return held
        grown = min(self.capacity, max(length, 2 * room, LEAST_ROOM))
        larger = array_module(new).empty((new.shape[0], grown, *new.shape[2:]), self.dtype or new.dtype)
        if held is not None:
            larger[:, : self.length] = held[:, : self.length]
        return larger

    def crop(self, length: int) -> None:
        """Forget all tokens but the first so many.

        Raises:
            ValueError: there are not so many; or some are to be forgotten, and attention has mixed tokens with the ones
                before them (`TokenShift`), so that nothing can go on from the middle.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"KeyValueCache: expected to keep 0 to {self.length} tokens, got {length}")
        if length == self.length:
            return
        if length and self.latest is not None:
            raise ValueError("KeyValueCache: expected attention without a token shift, to forget some tokens")
        self.length = length
        self.latest = None

    def select(self, rows: np.ndarray) -> KeyValueCache:
        """A cache of some items of the batch, each as often as it is named."""
        chosen = KeyValueCache(self.capacity, self.dtype)
        chosen.length = self.length
        for name in ("_keys", "_values", "latest"):
            held = getattr(self, name)
            setattr(chosen, name, None if held is None else held[array_module(held).asarray(rows)])
        return chosen

    @property
    def keys(self) -> Array:
        """(B, T, K, D) of all tokens so far."""
        return None if self._keys is None else self._keys[:, : self.length]
