"""Sampling of a token from logits (V,): temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one text, applied in this order.

    Args:
        temperature: divides the logits; 0 selects the largest logit (greedy decoding).
        top_k: keep only the k largest logits; 0 for all.
        top_p: keep the smallest set of tokens whose probabilities reach this sum (Holtzman et al. 2020).
        min_p: keep tokens at least this many times as probable as the most probable (Nguyen et al. 2024).
        seed: of the random generator of the text: an integer, several, or None for a random seed.
        stop_tokens: one or several token ids, kept as a tuple; each ends the text, as its last token.
        n_vocab: sample only ids below this (a tokenizer may have fewer than the model); None for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | tuple[int, ...] | None = 0
    stop_tokens: int | Sequence[int] = ()
    n_vocab: int | None = None

    def __post_init__(self) -> None:
        """Check the fields, ValueError if invalid; make `stop_tokens` a tuple of ints."""
        is_whole = isinstance(self.top_k, (int, np.integer))
        self._expect("top_k", is_whole and self.top_k >= 0, "a whole number, 0 or more")
        self._expect("temperature", 0 <= self.temperature < np.inf, "0 or more")
        self._expect("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._expect("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        self._expect("n_vocab", self.n_vocab is None or self.n_vocab >= 1, "1 or more")
        try:
            self.new_generator()
        except (TypeError, ValueError):
            self._expect("seed", False, "a whole number, 0 or more, or several")
        stops = np.atleast_1d(np.asarray(self.stop_tokens))
        self._expect("stop_tokens", not stops.size or stops.dtype.kind in "iu", "token ids")
        object.__setattr__(self, "stop_tokens", tuple(stops.tolist()))

    def _expect(self, name: str, is_valid: bool, rule: str) -> None:
        if not is_valid:
            raise ValueError(f"expected {name} to be {rule}, got {getattr(self, name)!r}") from None

    def new_generator(self) -> np.random.Generator:
        """Make the random generator of one text from the seed; without a seed, from the system's entropy."""
        return np.random.default_rng(self.seed)

    def for_text(self, i: int) -> Self:
        """Return the parameters for text i of a batch: a copy with i added to an integer seed, else self."""
        return replace(self, seed=self.seed + i) if isinstance(self.seed, (int, np.integer)) else self

    def sample(
        self, logits: np.ndarray, generator: np.random.Generator, seen: Sequence[int] = (), n_prompt: int = 0
    ) -> int:
        """Sample a token from logits (V,), finite or ValueError; `seen`: tokens so far, `n_prompt` of the prompt."""
        adjusted = self.adjusted_logits(logits, seen, n_prompt)
        return self.token_at_quantile(adjusted, generator.random() if self.temperature else 0.0)

    def adjusted_logits(self, logits: np.ndarray, seen: Sequence[int], n_prompt: int) -> np.ndarray:
        """Return logits of ids below `n_vocab` as float64, finite or ValueError; subclasses apply penalties."""
        logits = logits[: self.n_vocab].astype(np.float64)
        if not np.isfinite(logits).all():
            raise ValueError("SamplingParams: expected finite logits, got NaN or infinity: check the model's weights")
        return logits

    def token_at_quantile(self, logits: np.ndarray, number: float) -> int:
        """Return the kept token at quantile `number` in [0, 1), in order of ids; the argmax at temperature 0."""
        if self.temperature == 0:
            return int(logits.argmax())
        chosen, probabilities = self.candidates(logits)
        ends = probabilities.cumsum()
        return int(chosen[(ends / ends[-1]).searchsorted(number, side="right")])

    def candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids that temperature, top_k, top_p and min_p keep, in order, and their probabilities (sum 1)."""
        chosen = np.sort(top_indices(logits, self.top_k)) if self.top_k else slice(None)
        shifted = logits[chosen] - logits.max()  # prevents overflow at small temperatures
        weights = np.exp(np.divide(shifted, max(self.temperature, 1e-6), out=shifted), out=shifted)  # in place: quicker
        chosen, probabilities = np.arange(len(logits))[chosen], weights / weights.sum()
        if self.top_p < 1 or self.min_p:  # tokens below the first bound have less than 1 - top_p in total
            likely = probabilities >= max((1 - self.top_p) / len(logits), self.min_p * probabilities.max())
            order = np.flatnonzero(likely)[np.argsort(-logits[chosen[likely]], kind="stable")]
            kept = np.sort(order[: np.searchsorted(probabilities[order].cumsum(), self.top_p) + 1])
            chosen, probabilities = chosen[kept], probabilities[kept] / probabilities[kept].sum()
        return chosen, probabilities


def top_indices(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the n highest of scores (N,), highest first, the first of equal ones first, NaN last."""
    highest = -np.sort(-np.fmax.reduceat(scores, np.arange(0, len(scores), max(1, len(scores) // (8 * n)))))
    candidates = np.flatnonzero(~(scores < highest[:n][-1]))  # at least n are not below this maximum of a block
    return candidates[np.argsort(-scores[candidates], kind="stable")[:n]]
