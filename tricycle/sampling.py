"""Sample a token from logits (V,): temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a text, applied in this order.

    Args:
        temperature: divides the logits; 0 takes the largest (greedy decoding).
        top_k: sample among the k largest only; 0 for all.
        top_p: sample among the fewest largest whose probabilities reach this sum (Holtzman et al. 2020).
        min_p: sample among those at least this many times as probable as the largest (Nguyen et al. 2024).
        seed: of the text's own generator: an integer, several, or None for another seed each time.
        stop_tokens: one token or several, each of which ends the text as its last token.
        n_vocab: sample only ids below this (a tokeniser may have fewer than the model); None for all.

    Raises:
        ValueError: a parameter out of range, which is named.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | tuple[int, ...] | None = 0
    stop_tokens: int | Sequence[int] = ()
    n_vocab: int | None = None

    def __post_init__(self) -> None:
        is_count = isinstance(self.top_k, (int, np.integer)) and self.top_k >= 0
        self._expect("top_k", is_count, "a whole number, 0 or more")
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
        """Return the random generator of one text."""
        return np.random.default_rng(self.seed)

    def for_text(self, i: int) -> Self:
        """Return the parameters of text i of several: an integer seed increases with i."""
        return replace(self, seed=self.seed + i) if isinstance(self.seed, (int, np.integer)) else self

    def is_stop_token(self, token: int) -> bool:
        """Return whether this token ends the text."""
        return token in self.stop_tokens  # type: ignore[operator]

    def sample(
        self, logits: np.ndarray, generator: np.random.Generator, seen: Sequence[int] = (), n_prompt: int = 0
    ) -> int:
        """Sample a token from finite logits (V,); `seen` is the text so far, `n_prompt` the length of its prompt."""
        adjusted = self.adjusted_logits(logits, seen, n_prompt)
        return self.token_at_quantile(adjusted, generator.random() if self.temperature else 0.0)

    def adjusted_logits(self, logits: np.ndarray, seen: Sequence[int], n_prompt: int) -> np.ndarray:
        """Return logits in float64 as they are sampled from; a subclass may change them, given the text so far."""
        logits = logits[: self.n_vocab].astype(np.float64)
        if not np.isfinite(logits).all():
            raise ValueError(
                "SamplingParams: expected finite logits, got NaN or infinity: the model's weights are broken"
            )
        return logits

    def token_at_quantile(self, logits: np.ndarray, number: float) -> int:
        """Return the token at `number` in [0, 1) of the cumulative distribution; the argmax at temperature 0.

        It is cumulated in the order of ids: in that of probabilities, rounding would swap almost equal tokens.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        order, probabilities = self.candidates(logits)
        by_id = np.argsort(order)
        ends = probabilities[by_id].cumsum()
        return int(order[by_id[(ends / ends[-1]).searchsorted(number, side="right")]])

    def candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that top_k, top_p and min_p leave, most probable first, and their probabilities."""
        top_k, top_p, min_p = self.top_k, self.top_p, self.min_p
        # the shift keeps a small temperature from overflowing
        weights = np.exp((logits - logits.max()) / max(self.temperature, 1e-6))
        chosen = np.arange(len(logits))  # becomes a superset of the candidates: sorting all tokens would take longer
        if 0 < top_k < len(logits):
            chosen = chosen[logits >= np.partition(logits, -top_k)[-top_k]]
        else:  # all tokens below the first bound have less than 1 - top_p together
            chosen = chosen[weights >= max((1 - top_p) / len(logits) * weights.sum(), min_p)]
        order = chosen[np.argsort(-logits[chosen], kind="stable")][: top_k or None]
        probabilities = weights[order] / (weights[order] if top_k else weights).sum()
        if top_p < 1 or min_p:
            n_likely = np.count_nonzero(probabilities >= min_p * probabilities[0])
            n_kept = min(n_likely, int(np.searchsorted(probabilities.cumsum(), top_p)) + 1)
            order, probabilities = order[:n_kept], probabilities[:n_kept]
        return order, probabilities / probabilities.sum()
