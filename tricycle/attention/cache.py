"""What attention remembers of the tokens before, for generation.

Shapes: B batch, T tokens, K heads of keys and values, D head size, C channels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from tricycle.devices import Array, array_module

LEAST_ROOM = 256  # tokens
# Tokens that a cache with a window can always go back by: more than are guessed at a time.
BACK = 64


class KeyValueCache:
    """The keys and values of the tokens that one attention layer has seen, for generation without gradients.

    Args:
        capacity: how many tokens fit. Room is taken as they come.
        dtype: of what is kept, such as float16, which takes half the memory; that of the first keys unless given.
        window: how many tokens a token of this layer sees, itself included; None for all. What no later token can see
            is not kept.
    """

    def __init__(self, capacity: int, dtype: DTypeLike | None = None, window: int | None = None) -> None:
        self.capacity = capacity
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.window = window
        self.length = 0
        self._first = 0  # of the tokens whose keys are kept
        self._held: int | None = None
        self._keys: Array | None = None
        self._values: Array | None = None
        self.latest: Array | None = None  # what `TokenShift` has seen last, (B, 1, C)
        self.latest_keys: Array | None = None  # what `KeyShift` has, (B, 1, K * D)

    def append(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add (B, T, K, D) keys and values; returns those of all tokens so far that these T may see, and maybe of some
        before them.

        Raises:
            ValueError: more tokens than the cache holds, or another batch size than before.
        """
        n_items, n_tokens = keys.shape[:2]
        if self.length + n_tokens > self.capacity:
            raise ValueError(f"KeyValueCache: {self.length} + {n_tokens} tokens exceed its capacity of {self.capacity}")
        if self._keys is not None and len(self._keys) != n_items:
            raise ValueError(f"KeyValueCache: expected a batch of {len(self._keys)}, got {n_items}")
        if self.length - self._first + n_tokens > self._most:
            self._forget_unseen()
        start = self.length - self._first
        stop = start + n_tokens
        self._keys = self._with_room(self._keys, keys, start, stop)
        self._values = self._with_room(self._values, values, start, stop)
        self._keys[:, start:stop], self._values[:, start:stop] = keys, values
        self.length += n_tokens
        seen = self._keys[:, :stop], self._values[:, :stop]
        if stop > 2 * self._most:  # a long text at once, of which the next token sees little
            self._forget_unseen()
        return seen

    @property
    def _most(self) -> int:
        """How many tokens it keeps before it forgets those that nobody sees."""
        return self.capacity if self.window is None else min(self.capacity, self.window - 1 + LEAST_ROOM)

    def _with_room(self, held: Array | None, new: Array, length: int, needed: int) -> Array:
        """Room for so many tokens with what is held: more than that, but not for a whole context window at once."""
        room = 0 if held is None else held.shape[1]
        if held is not None and needed <= room:
            return held
        grown = max(needed, min(self._most, max(2 * room, LEAST_ROOM)))
        larger = array_module(new).empty((new.shape[0], grown, *new.shape[2:]), self.dtype or new.dtype)
        if held is not None:
            larger[:, :length] = held[:, :length]
        return larger

    def _forget_unseen(self) -> None:
        """Let the keys and values go that no token sees from the last `BACK` on, nor from a place that is held."""
        place = self.length - BACK if self._held is None else min(self._held, self.length - BACK)
        first = place - (self.window or self.capacity) + 1
        if first <= self._first or self._keys is None or self._values is None:
            return
        kept = slice(first - self._first, self.length - self._first)
        self._keys = self._keys[:, kept].copy()
        self._values = self._values[:, kept].copy()
        self._first = first

    def hold(self, place: int | None) -> None:
        """Be able to go back as far as this place, until another is named or None."""
        self._held = place

    def can_crop(self, length: int) -> bool:
        """Whether all but the first so many tokens can be forgotten: attention has not mixed them with those before
        them (`mixes`), and what a token there would see is kept.
        """
        if length in (0, self.length):
            return True
        return not self.mixes and (self._first == 0 or self._first <= length - (self.window or 0) + 1)

    def crop(self, length: int) -> None:
        """Forget all tokens but the first so many.

        Raises:
            ValueError: there are not so many; or nothing can go on from there, as `can_crop` says.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"KeyValueCache: expected to keep 0 to {self.length} tokens, got {length}")
        if length == self.length:
            return
        if length and self.mixes:
            raise ValueError("KeyValueCache: expected attention without a shift, to forget some tokens")
        if not self.can_crop(length):
            raise ValueError(f"KeyValueCache: expected to keep what a token sees, but {length} is too long ago")
        if length == 0:
            self._first = 0
        self.length = length
        self.latest = self.latest_keys = None

    def select(self, rows: np.ndarray) -> KeyValueCache:
        """A cache of some items of the batch, each as often as it is named."""
        chosen = KeyValueCache(self.capacity, self.dtype, self.window)
        chosen.length = self.length
        chosen._first = self._first
        for name in ("_keys", "_values", "latest", "latest_keys"):
            held = getattr(self, name)
            setattr(chosen, name, None if held is None else held[array_module(held).asarray(rows)])
        return chosen

    @property
    def mixes(self) -> bool:
        """Whether tokens are mixed with those before them on the way here (`TokenShift`, `KeyShift`)."""
        return self.latest is not None or self.latest_keys is not None

    @property
    def keys(self) -> Array:
        """(B, T, K, D) of all tokens so far that are kept."""
        return None if self._keys is None else self._keys[:, : self.length - self._first]
