"""The KV cache: keys and values of earlier tokens, for generation.

Layers see the caches of several texts as one: the new tokens of all texts are the rows of one sequence, whatever their
numbers, so that a matrix product reads its weights once for all of them and nothing is padded. Only attention, and what
mixes a token with the one before it, looks at one text at a time.

Shapes: B batch, T tokens, H heads of queries, K heads of keys and values, D head size, C channels.
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

    # ---------------------------------------------------------------- what `RaggedCache` does for several texts
    def texts(self, n_tokens: int) -> list[tuple[slice, KeyValueCache]]:
        """Return for each text which of a sequence's tokens are its own, with its cache."""
        return [(slice(0, n_tokens), self)]

    def segments(self, n_tokens: int) -> Segments:
        """Return where the next tokens are in their texts."""
        return ((self.length, n_tokens),)

    # ---------------------------------------------------------------- keys and values
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


class RaggedCache:
    """The caches of one layer for several texts, whose new tokens follow one another in one sequence.

    Args:
        caches: of each text, for a batch of 1.
        lengths: the number of new tokens of each text.
    """

    def __init__(self, caches: Sequence[KeyValueCache], lengths: Sequence[int]) -> None:
        self.caches = caches
        self.lengths = lengths

    def texts(self, n_tokens: int) -> list[tuple[slice, KeyValueCache]]:
        """Return for each text which of the sequence's tokens are its own, with its cache."""
        stops = np.cumsum(self.lengths).tolist()
        return [(slice(stop - n, stop), cache) for stop, n, cache in zip(stops, self.lengths, self.caches)]

    def segments(self, n_tokens: int) -> Segments:
        """Return where the next tokens are in their texts."""
        return tuple((cache.length, n) for cache, n in zip(self.caches, self.lengths))


Cache = KeyValueCache | RaggedCache


def takes_ragged(forward: F) -> F:
    """Mark a `forward` that takes a `RaggedCache`: others are called with one text after the other."""
    forward.takes_ragged = True  # type: ignore[attr-defined]
    return forward


def call_with_cache(layer: Any, x: Tensor, cache: Cache, *args: Any) -> Tensor:
    """Return `layer(x, cache, *args)` for x (1, T, C), in one call or, where `layer` takes no several texts, in one for
    each.
    """
    if not isinstance(cache, RaggedCache) or getattr(layer.forward, "takes_ragged", False):
        result: Tensor = layer(x, cache, *args)
        return result
    return join([layer(x[:, rows], text, *args) for rows, text in cache.texts(x.shape[1])])


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return results (1, T, ...) of several texts as one sequence, without gradients."""
    if len(parts) == 1:
        return parts[0]
    return Tensor(parts[0].xp.concatenate([part.array for part in parts], axis=1), False)


def previous_tokens(x: Array, cache: Cache | None, name: str) -> Array:
    """Return for each token of x (B, T, C) the one before it in its text, and 0 for the first of a text.

    Args:
        cache: its texts have the last token of before as the attribute `name`, and keep that of now there.
    """
    earlier = array_module(x).zeros_like(x)
    earlier[:, 1:] = x[:, :-1]
    for rows, text in () if cache is None else cache.texts(x.shape[1]):
        latest = getattr(text, name)
        earlier[:, rows.start] = 0 if latest is None else latest[:, 0]
        setattr(text, name, x[:, rows.stop - 1 : rows.stop])
    return earlier
