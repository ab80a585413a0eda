"""Logits processors for sampling: penalties, logit biases, excluded tokens and constraints of guided decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from tricycle.decoding.guided import Constraint
from tricycle.sampling import SamplingParams


@dataclass(frozen=True)
class PenalizedSamplingParams(SamplingParams):
    """SamplingParams parameters with logits processors, which are applied in this order before the temperature.

    Args:
        repetition_penalty: divides positive logits of tokens of the prompt and the text, and multiplies negative ones
            (Keskar et al. 2019, section 4.1); 1 for none.
        presence_penalty: subtracted from the logits of generated tokens (not of the prompt's); negative for a reward.
        frequency_penalty: subtracted once for each time that a token was generated.
        logit_bias: pairs of a token and the number that is added to its logit.
        no_repeat_ngram_size: never generate an n-gram of this size a second time (Paulus et al. 2017); 0 allows all.
            Small models repeat themselves without it.
        suppress_tokens: tokens that are never sampled, unless all tokens are excluded.
        constraint: of guided decoding: only tokens that it allows are sampled, and a stop token only once the text is
            complete. Each text needs its own (see `for_text`).

    Raises:
        ValueError: a parameter is out of range; the message names it.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    no_repeat_ngram_size: int = 0
    suppress_tokens: Sequence[int] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        """Check the fields; raise a ValueError for an invalid one, or a constraint without stop tokens."""
        super().__post_init__()
        self._expect("no_repeat_ngram_size", _is_count(self.no_repeat_ngram_size), "a whole number, 0 or more")
        self._expect("repetition_penalty", 0 < self.repetition_penalty < np.inf, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._expect(name, bool(np.isfinite(getattr(self, name))), "a finite number")
        for token, bias in self.logit_bias:
            if not _is_count(token) or not np.isfinite(bias):
                raise ValueError(f"expected logit_bias to be of tokens and finite numbers, got {token!r}: {bias!r}")
        self._expect("stop_tokens", self.constraint is None or bool(self.stop_tokens), "given for a constraint")

    def for_text(self, i: int) -> Self:
        """Return the parameters for text i of a batch: i is added to an integer seed; any constraint starts anew."""
        params = super().for_text(i)
        return params if self.constraint is None else replace(params, constraint=self.constraint.new_text())

    def adjusted_logits(self, logits: np.ndarray, seen: Sequence[int], n_prompt: int) -> np.ndarray:
        """Return float64 logits after penalties and biases; -inf for suppressed, repeated and disallowed tokens."""
        adjusted = self._penalized_logits(super().adjusted_logits(logits, seen, n_prompt), seen, n_prompt)
        if self.constraint is not None:
            stops: Sequence[int] = self.stop_tokens  # type: ignore[assignment]
            allowed = self.constraint.allowed_tokens(seen[n_prompt:], stops, len(adjusted))
            if not np.isfinite(adjusted[allowed]).any():  # the grammar needs a token that was excluded
                adjusted = super().adjusted_logits(logits, seen, n_prompt)
            adjusted[~allowed] = -np.inf
        return adjusted

    def _penalized_logits(self, logits: np.ndarray, seen: Sequence[int], n_prompt: int) -> np.ndarray:
        """Apply penalties, biases, and exclusions (unless of all tokens) to `logits` in place, and return them."""
        if self.repetition_penalty != 1 and len(seen):
            known = np.unique(np.asarray(seen, np.int64))
            known = known[known < len(logits)]
            larger, smaller = logits[known] * self.repetition_penalty, logits[known] / self.repetition_penalty
            logits[known] = np.where(logits[known] < 0, larger, smaller)
        if len(seen) > n_prompt and (self.presence_penalty or self.frequency_penalty):
            tokens, counts = np.unique(np.asarray(seen[n_prompt:], np.int64), return_counts=True)
            among = tokens < len(logits)
            logits[tokens[among]] -= self.presence_penalty + self.frequency_penalty * counts[among]
        for token, bias in self.logit_bias:
            if token < len(logits):
                logits[token] += bias
        repeated = ngram_completions(seen, self.no_repeat_ngram_size)
        excluded = {token for token in (*self.suppress_tokens, *repeated) if token < len(logits)}
        if 0 < len(excluded) < len(logits):
            logits[list(excluded)] = -np.inf
        return logits


def ngram_completions(tokens: Sequence[int], size: int) -> list[int]:
    """Return the tokens that would complete an n-gram of `size` that the text already contains; none for size 0."""
    tail = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1) if size else ()
    return [tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == tail]


def _is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 0."""
    return isinstance(value, (int, np.integer)) and bool(value >= 0)
