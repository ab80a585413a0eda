"""Ragged batches: the new tokens of several texts form one sequence without padding, so weights are read once.

Only attention, and layers that mix each token with the previous one, process one text at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle.attention.cache import KeyValueCache, Segments, concatenate_texts
from tricycle.devices import array_module
from tricycle.functions import Softmax
from tricycle.generate import next_logits as next_logits_of_one
from tricycle.kernels.ragged_attention import ragged_attention
from tricycle.models import GPT
from tricycle.tensor import Tensor


def select_items(cache: KeyValueCache, rows: np.ndarray, length: int | None = None) -> KeyValueCache:
    """Return a copy of a cache with only the batch items `rows`, which may repeat, in this order.

    Args:
        length: number of first tokens to keep, for which `cache.can_truncate` must be True; by default all.
    """
    chosen = KeyValueCache(cache.capacity, cache.dtype, cache.window)
    chosen.length, chosen._first = cache.length if length is None else length, cache._first
    arrays: dict[str, Any] = {"_keys": cache._keys, "_values": cache._values, **cache.last}
    if length is not None and cache._keys is not None and cache._values is not None:
        stored = slice(length - cache._first)
        arrays |= {"_keys": cache._keys[:, stored], "_values": cache._values[:, stored]}
    taken = {name: None if x is None else x[array_module(x).asarray(rows)] for name, x in arrays.items()}
    chosen._keys, chosen._values = taken.pop("_keys"), taken.pop("_values")
    chosen.last = taken
    return chosen


class RaggedCache(KeyValueCache):
    """The KV caches of one layer for several texts, whose new tokens are concatenated into one sequence.

    Args:
        caches: one for each text, with a batch size of 1.
        lengths: the number of new tokens of each text.
    """

    def __init__(self, caches: Sequence[KeyValueCache], lengths: Sequence[int]) -> None:
        self.caches = caches
        self.lengths = lengths

    def texts(self, n_tokens: int) -> list[tuple[slice, KeyValueCache]]:
        """Return (slice of its new tokens, cache) for each text; `n_tokens` is not used."""
        stops = np.cumsum(self.lengths).tolist()
        return [(slice(stop - n, stop), cache) for stop, n, cache in zip(stops, self.lengths, self.caches)]

    def segments(self, n_tokens: int) -> Segments:
        """Return (number of cached tokens, number of new tokens) for each text; `n_tokens` is not used."""
        return tuple((cache.length, n) for cache, n in zip(self.caches, self.lengths))

    def call(self, layer: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return `layer(x, cache, ...)` for x (1, T, C); one call for each text unless the layer supports several."""
        if getattr(layer.forward, "takes_ragged", False):
            return super().call(layer, x, *args, **options)
        return concatenate_texts([layer(x[:, rows], text, *args, **options) for rows, text in self.texts(x.shape[1])])

    def attend(self, op: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any, precision: str = "float32") -> Tensor:
        """Append keys and values of all texts; return attention `op` of each text's queries to its cached keys.

        The first texts with one new token each are processed together, if no mask and only plain softmax is used.
        """
        n_together = next((i for i, n in enumerate(self.lengths) if n > 1), len(self.lengths))
        if options[0] is not None or type(op.softmax).attend is not Softmax.attend:
            n_together = 0
        results = []
        if n_together:
            new = [(k.array[:, i : i + 1], v.array[:, i : i + 1]) for i in range(n_together)]
            keys, values = zip(*(cache.append(*pair) for cache, pair in zip(self.caches, new)))
            score_options = op.score_options(q.array, keys[0])
            together = ragged_attention(q.array[0, :n_together], keys, values, score_options, op.softmax.off_by_one)
            results.append(Tensor(together[None], False))
        for rows, cache in self.texts(q.shape[1])[n_together:]:
            parts = (Tensor(x.array[:, rows], False) for x in (q, k, v))
            results.append(cache.attend(op, *parts, *options, precision=precision))
        return concatenate_texts(results)


@np.errstate(all="ignore")  # sampling raises an error for logits that are not finite
def next_logits(
    model: GPT, tokens: Sequence[Sequence[int]], caches: Sequence[list[KeyValueCache]], every: bool = False
) -> np.ndarray:
    """Run the model on N texts' new tokens, extending the caches; return logits (N, V), of the last or (R, V) of every.

    Args:
        tokens: the new tokens of each text, at least one.
        caches: for each text the KV caches of its layers (from `model.new_caches`).
        every: whether to return the logits after each of all R new tokens.

    Raises:
        ValueError: ids outside the vocabulary, no token, or more tokens than the context window.
    """
    if len(tokens) == 1 or not getattr(model.forward, "takes_ragged", False):
        parts = [next_logits_of_one(model, new, own, every) for new, own in zip(tokens, caches, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    lengths = [len(new) for new, _ in zip(tokens, caches, strict=True)]
    together = [RaggedCache(of_block, lengths) for of_block in zip(*caches)]
    ids = np.array([[token for new in tokens for token in new]], int)
    with model.evaluating():
        logits: np.ndarray = model(model.place(ids), together, last=not every).numpy()[0]
    return logits
