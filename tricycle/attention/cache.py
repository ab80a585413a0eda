"""What attention remembers of the tokens before, for generation.

Shapes: B batch, T tokens, K heads of keys and values, D head size, C channels.
"""

from __future__ import annotations

import numpy as np

from tricycle.devices import Array, array_module


class KeyValueCache:
    """The keys and values of the tokens that one attention layer has seen, for generation without gradients.

    Args:
        capacity: how many tokens fit.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Array | None = None
        self._values: Array | None = None
        self.latest: Array | None = None  # what `TokenShift` has seen last, (B, 1, C)

    def append(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add (B, T, K, D) keys and values; returns those of all tokens so far.

        Raises:
            ValueError: more tokens than the cache holds, or another batch size than before.
        """
        n_items, n_tokens, n_heads, size = keys.shape
        if self.length + n_tokens > self.capacity:
            raise ValueError(f"KeyValueCache: {self.length} + {n_tokens} tokens exceed its capacity of {self.capacity}")
        if self._keys is None or self._values is None:
            shape = (n_items, self.capacity, n_heads, size)
            self._keys, self._values = (array_module(x).empty(shape, x.dtype) for x in (keys, values))
        if len(self._keys) != n_items:
            raise ValueError(f"KeyValueCache: expected a batch of {len(self._keys)}, got {n_items}")
        new = slice(self.length, self.length + n_tokens)
        self._keys[:, new], self._values[:, new] = keys, values
        self.length += n_tokens
        return self.keys, self._values[:, : self.length]

    def select(self, rows: np.ndarray) -> KeyValueCache:
        """A cache of some items of the batch, each as often as it is named."""
        chosen = KeyValueCache(self.capacity)
        chosen.length = self.length
        for name in ("_keys", "_values", "latest"):
            held = getattr(self, name)
            setattr(chosen, name, None if held is None else held[array_module(held).asarray(rows)])
        return chosen

    @property
    def keys(self) -> Array:
        """(B, T, K, D) of all tokens so far."""
        return None if self._keys is None else self._keys[:, : self.length]
