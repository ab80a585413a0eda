"""The next tokens of several texts as one sequence, so that matrix products read their weights once, without padding.

Only attention, and what mixes a token with the one before it, looks at one text at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tricycle.attention.cache import KeyValueCache, Segments, join
from tricycle.generate import next_logits as next_logits_of_one
from tricycle.models import GPT
from tricycle.tensor import Tensor


class RaggedCache(KeyValueCache):
    """The caches of one layer for several texts, whose new tokens follow one another in one sequence.

    Args:
        caches: of each text, for a batch of 1.
        lengths: the number of new tokens of each text.
    """

    def __init__(self, caches: Sequence[KeyValueCache], lengths: Sequence[int]) -> None:
        self.caches = caches
        self.lengths = lengths

    def texts(self, n_tokens: int) -> list[tuple[slice, KeyValueCache]]:
        stops = np.cumsum(self.lengths).tolist()
        return [(slice(stop - n, stop), cache) for stop, n, cache in zip(stops, self.lengths, self.caches)]

    def segments(self, n_tokens: int) -> Segments:
        return tuple((cache.length, n) for cache, n in zip(self.caches, self.lengths))

    def call(self, layer: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return `layer(x, cache, ...)` for x (1, T, C), in one call for each text unless `layer` takes several."""
        if getattr(layer.forward, "takes_ragged", False):
            return super().call(layer, x, *args, **options)
        return join([layer(x[:, rows], text, *args, **options) for rows, text in self.texts(x.shape[1])])


@np.errstate(all="ignore")  # broken weights are an error of sampling
def next_logits(
    model: GPT, tokens: Sequence[Sequence[int]], caches: Sequence[list[KeyValueCache]], every: bool = False
) -> np.ndarray:
    """Return the logits after some more tokens of each of N texts, (N, V) in host memory; dropout is off.

    Args:
        tokens: one or more of each text.
        caches: of each text what `model.new_caches` gave, with what was read before.
        every: return the logits after each of all R tokens, (R, V).

    Raises:
        ValueError: ids outside the vocabulary, no token, or more than the context window.
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
