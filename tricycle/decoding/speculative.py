"""Decoding states for speculative decoding: KV caches that process draft tokens, and can be recomputed exactly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import DTypeLike

from tricycle.decoding.ragged import next_logits, select_items
from tricycle.generate import DecodingState
from tricycle.kernels.quantized import quantized_dtype
from tricycle.models import GPT


class SpeculativeState(DecodingState):
    """A decoding state that can process draft tokens, and that can be forked for texts with a shared prefix.

    Draft tokens are processed several at once, which rounds differently from one at a time. The state records from
    which position its keys and values may differ, and can recompute them.

    Args:
        dtype: of keys and values: "float16" or "bfloat16" for half the memory, "int8" for about a quarter; the dtype
            of the computation, which is float32 on a CPU, if not given.
    """

    def __init__(self, model: GPT, dtype: DTypeLike | None = None) -> None:
        super().__init__(model, quantized_dtype("bfloat16") if dtype == "bfloat16" else dtype)

    def reset(self) -> None:
        """Replace the caches by empty ones; clear the tokens and the record of inexact tokens."""
        super().reset()
        # the numbers of tokens that decoding without drafts processes at a time, from the first inexact token on
        self._inexact: list[int] = []

    @property
    def is_inexact(self) -> bool:
        """Whether draft tokens were processed, so that logits may be rounded differently."""
        return bool(self._inexact)

    @property
    def can_truncate(self) -> bool:
        """Whether the caches can always be truncated: no LongRoPE, and no layer has a token shift."""
        return self.model.config.rotary_scaling != "longrope" and not any(cache.last for cache in self.caches)

    def truncate(self, length: int) -> None:
        """Truncate the caches and the record of inexact tokens to `length` tokens; clear them if they cannot be."""
        n_removed = len(self.tokens) - length
        super().truncate(length)
        while self._inexact and n_removed > 0:
            last = self._inexact.pop()
            if last > n_removed:
                self._inexact.append(last - n_removed)
            n_removed -= last
        if not self._inexact:
            self._pin(None)

    def _pin(self, position: int | None) -> None:
        """Pin `position` in each layer's cache, which keeps what truncating to it needs; None removes the pin."""
        for cache in self.caches:
            cache.pin(position)

    def fork(self, length: int) -> SpeculativeState:
        """Return a copy with only the first `length` tokens; empty if the caches are inexact or cannot be truncated."""
        other = SpeculativeState(self.model, self.dtype)
        length = min(length, len(self.tokens))
        is_exact = not self.is_inexact and not self._crosses(length)
        if length and is_exact and all(cache.can_truncate(length) for cache in self.caches):
            other.caches = [select_items(cache, np.array([0]), length) for cache in self.caches]
            other.tokens = self.tokens[:length]
        return other

    def logits(self, text: Sequence[int]) -> np.ndarray:
        """Return the exact logits (V,) after a text's last token; process uncached tokens, updating the state."""
        logits: np.ndarray = decode_batch([self], [text])[0][-1]
        return self.recompute_logits(text) if self.is_inexact else logits

    def all_logits(self, text: Sequence[int]) -> np.ndarray:
        """Return the logits (R, V) after each of the R uncached tokens of a text, at least the last; cache them."""
        text = list(text)
        logits = next_logits(self.model, [self.trim_to_prefix(text)], [self.caches], every=True)
        self.tokens = text
        return logits

    def recompute_logits(self, text: Sequence[int]) -> np.ndarray:
        """Truncate the caches to the exact part, process the rest as without drafts; return the last logits (V,)."""
        text = list(text)
        self.truncate(len(text))
        sizes, self._inexact, self.tokens = self._inexact, [], []
        self._pin(None)
        start = len(text) - sum(sizes)
        for cache in self.caches:
            cache.truncate(start)
        for size in sizes:
            logits = next_logits(self.model, [text[start : start + size]], [self.caches])[0]
            start += size
        self.tokens = text
        return logits


def decode_batch(
    states: Sequence[SpeculativeState], texts: Sequence[Sequence[int]], n_draft_tokens: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Run texts' uncached tokens, mark states with drafts as inexact; return (D + 1, V) logits for D draft tokens.

    Args:
        states: one for each text, all of one model.
        n_draft_tokens: the number of draft tokens at the end of each text; 0 if not given. Each text's logits are
            those before its first draft token, and after each.
    """
    n_drafts = [0] * len(texts) if n_draft_tokens is None else list(n_draft_tokens)
    whole = [list(text) for text in texts]
    pending = [state.trim_to_prefix(text, n + 1) for state, text, n in zip(states, whole, n_drafts)]
    for state, text, new, n in zip(states, whole, pending, n_drafts):
        if n and not state.is_inexact:
            state._pin(len(text) - len(new))
    every = any(n_drafts)
    rows = next_logits(states[0].model, pending, [state.caches for state in states], every)
    ends = accumulate(len(new) if every else 1 for new in pending)
    for state, text, new, n in zip(states, whole, pending, n_drafts):
        if n:
            state._inexact += [1] * len(new)
        elif state.is_inexact:
            state._inexact.append(len(new))
        state.tokens = text
    return [rows[end - 1 - n : end] for end, n in zip(ends, n_drafts)]
