"""How the tokens of a text are drawn from a model's logits, and when the text ends.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a text are drawn, and which of them end it.

    What follows happens in this order: repetition_penalty, presence_penalty, frequency_penalty and logit_bias,
    no_repeat_ngram_size, temperature, top_k, top_p and min_p.

    Args:
        temperature: divides the logits; 0 takes the largest.
        top_k: draw among the k largest only; 0 for all.
        top_p: draw among the fewest largest whose probabilities reach this sum (Holtzman et al. 2020).
        min_p: draw among those at least this many times as probable as the largest (Nguyen et al. 2024).
        repetition_penalty: logits of tokens that the text has already are divided by this, or multiplied where they are
            below 0 (Keskar et al. 2019, section 4.1); 1 leaves them.
        presence_penalty: taken off the logits of tokens that were drawn for this text already, the prompt's left out; a
            negative one is a reward.
        frequency_penalty: the same, once for each time that a token was drawn.
        logit_bias: pairs of a token and what is added to its logit.
        no_repeat_ngram_size: never write so many tokens a second time in the same order (Paulus et al. 2017); 0 lets
            them be. Small models run in circles without it.
        seed: of the text's own generator; several numbers count as one seed, and None is another each time.
        stop_tokens: one of these, or the only one, ends the text, as its last token.
        n_vocab: draw only ids below this (a tokeniser may know fewer than the model); None for all.

    Raises:
        ValueError: names the setting that is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    no_repeat_ngram_size: int = 0
    seed: int | tuple[int, ...] | None = 0
    stop_tokens: int | Sequence[int] = ()
    n_vocab: int | None = None

    def __post_init__(self) -> None:
        self._check_whole("top_k")
        self._check_whole("no_repeat_ngram_size")
        if not 0 <= self.temperature < np.inf:
            raise ValueError(f"expected temperature to be 0 or more, got {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected top_p to be above 0 and at most 1, got {self.top_p!r}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"expected min_p to be from 0 to 1, got {self.min_p!r}")
        if not 0 < self.repetition_penalty < np.inf:
            raise ValueError(f"expected repetition_penalty to be above 0, got {self.repetition_penalty!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not np.isfinite(getattr(self, name)):
                raise ValueError(f"expected {name} to be a finite number, got {getattr(self, name)!r}")
        for token, bias in self.logit_bias:
            if not isinstance(token, (int, np.integer)) or token < 0 or not np.isfinite(bias):
                raise ValueError(f"expected logit_bias to be of tokens and finite numbers, got {token!r}: {bias!r}")
        if self.n_vocab is not None and self.n_vocab < 1:
            raise ValueError(f"expected n_vocab to be 1 or more, got {self.n_vocab!r}")
        try:
            self.new_generator()
        except (TypeError, ValueError):
            raise ValueError(f"expected seed to be a whole number, 0 or more, or several, got {self.seed!r}") from None
        stops = np.atleast_1d(np.asarray(self.stop_tokens))
        if stops.size and stops.dtype.kind not in "iu":
            raise ValueError(f"expected stop_tokens to be token ids, got {self.stop_tokens!r}")
        object.__setattr__(self, "stop_tokens", tuple(stops.tolist()))

    def _check_whole(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(f"expected {name} to be a whole number, 0 or more, got {value!r}")

    def new_generator(self) -> np.random.Generator:
        """What draws the numbers of one text."""
        return np.random.default_rng(self.seed)

    def of_text(self, i: int) -> Sampling:
        """The same for the text at place i of several: a seed that is a number goes up with the place."""
        return replace(self, seed=self.seed + i) if isinstance(self.seed, (int, np.integer)) else self

    def ends_with(self, token: int) -> bool:
        """Whether this token ends the text."""
        return token in self.stop_tokens  # type: ignore[operator]

    def draw(
        self,
        logits: np.ndarray,
        generator: np.random.Generator,
        seen: Sequence[int] = (),
        never: Sequence[int] = (),
        n_prompt: int = 0,
    ) -> int:
        """A token from logits (V,).

        Args:
            seen: the text so far.
            never: tokens that are not drawn, unless there is no other.
            n_prompt: how many of those seen were not drawn.

        Raises:
            ValueError: logits that are not finite.
        """
        return _draw(self._allowed(logits, seen, never, n_prompt), generator, self)[0]

    def draw_if_sure(
        self,
        logits: np.ndarray,
        generator: np.random.Generator,
        seen: Sequence[int],
        doubt: float,
        n_prompt: int = 0,
    ) -> int | None:
        """The same; None, and nothing drawn, where logits off by that share of the largest might have given another."""
        state = generator.bit_generator.state
        logits = self._allowed(logits, seen, (), n_prompt)
        doubt *= float(np.abs(logits[np.isfinite(logits)]).max())
        doubt *= max(self.repetition_penalty, 1 / self.repetition_penalty)
        token, sure = _draw(logits, generator, self, doubt)
        if not sure:
            generator.bit_generator.state = state
        return token if sure else None

    def _allowed(
        self, logits: np.ndarray, seen: Sequence[int], never: Sequence[int] = (), n_prompt: int = 0
    ) -> np.ndarray:
        """Logits in float64, -infinity for what is not to be drawn.

        Raises:
            ValueError: logits that are not finite.
        """
        logits = logits[: self.n_vocab].astype(np.float64)
        if not np.isfinite(logits).all():
            raise ValueError("Sampling: expected finite logits, got NaN or infinity: the model's weights are broken")
        if self.repetition_penalty != 1 and len(seen):
            known = np.unique(np.asarray(seen, np.int64))
            known = known[known < len(logits)]
            larger, smaller = logits[known] * self.repetition_penalty, logits[known] / self.repetition_penalty
            logits[known] = np.where(logits[known] < 0, larger, smaller)
        self._shift(logits, seen[n_prompt:])
        hidden = {token for token in (*never, *repeats(seen, self.no_repeat_ngram_size)) if token < len(logits)}
        if 0 < len(hidden) < len(logits):
            logits[list(hidden)] = -np.inf
        return logits

    def _shift(self, logits: np.ndarray, drawn: Sequence[int]) -> None:
        """Add to logits (V,) in place what does not hang on them."""
        if len(drawn) and (self.presence_penalty or self.frequency_penalty):
            tokens, counts = np.unique(np.asarray(drawn, np.int64), return_counts=True)
            among = tokens < len(logits)
            logits[tokens[among]] -= self.presence_penalty + self.frequency_penalty * counts[among]
        for token, bias in self.logit_bias:
            if token < len(logits):
                logits[token] += bias


def _draw(
    logits: np.ndarray, generator: np.random.Generator, sampling: Sampling, doubt: float = 0.0
) -> tuple[int, bool]:
    """A token, and whether it is sure: no logits that differ from these by up to `doubt` would have given another.

    Tokens share the numbers from 0 to 1 in the order of their ids: in that of their probabilities, logits that are
    almost equal would change places with the smallest difference.
    """
    if sampling.temperature == 0:
        token = int(logits.argmax())
        return token, not doubt or np.count_nonzero(logits >= logits[token] - 2 * doubt) == 1
    order, probabilities = _likely(logits, sampling)
    by_id = np.argsort(order)
    ends = probabilities[by_id].cumsum()
    ends /= ends[-1]
    number = generator.random()
    place = int(ends.searchsorted(number, side="right"))
    token = int(order[by_id[place]])
    return token, not doubt or _is_sure(logits, token, number, sampling, doubt)


def _is_sure(logits: np.ndarray, token: int, number: float, sampling: Sampling, doubt: float) -> bool:
    """Whether a token's share of the numbers from 0 to 1 holds this one, however logits differ by up to `doubt`."""
    temperature = max(sampling.temperature, 1e-6)
    turn = min(2 * doubt / temperature, 50.0)  # the logarithm of what the ratio of two weights may be off by
    surely, perhaps = _candidates(logits, sampling, doubt, turn)
    if not surely[token]:
        return False
    weights = np.exp((logits - logits.max()) / temperature)
    most_before = weights[:token] @ perhaps[:token]
    least_from_it = weights[token:] @ surely[token:]
    least_to_it = weights[: token + 1] @ surely[: token + 1]
    most_after = weights[token + 1 :] @ perhaps[token + 1 :]
    begin = _leaned(most_before, least_from_it, turn)
    end = 1 - _leaned(most_after, least_to_it, turn)
    return bool((most_before == 0 or begin < number) and (most_after == 0 or number < end))


def _leaned(one: float, other: float, turn: float) -> float:
    """The share that one weight has of both when it weighs e^turn as much beside the other."""
    return one / (one + other * np.exp(-turn))


def _candidates(logits: np.ndarray, sampling: Sampling, doubt: float, turn: float) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are drawn among in any case, and which perhaps (V,), where logits are off by up to `doubt`."""
    top_p, min_p = sampling.top_p, sampling.min_p
    if not sampling.top_k and top_p == 1 and not min_p:
        return np.isfinite(logits), np.isfinite(logits)
    factor = np.exp(turn)
    narrow = replace(sampling, top_p=max(top_p - turn, 1e-9), min_p=min(min_p * factor, 1.0))
    broad = replace(sampling, top_p=min(top_p + turn, 1.0), min_p=min_p / factor)
    fewest, _ = _likely(logits, narrow)
    most, _ = _likely(logits, broad)
    most = most[np.isfinite(logits[most])]
    perhaps = logits >= logits[most[-1]] - 2 * doubt
    if np.count_nonzero(perhaps) == len(fewest):
        return perhaps, perhaps
    return logits > logits[fewest[-1]] + 2 * doubt, perhaps


def _likely(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The tokens to draw among, most probable first, and their probabilities. To sort all of them would take longer."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    # the shift keeps a small temperature from overflowing
    weights = np.exp((logits - logits.max()) / max(sampling.temperature, 1e-6))
    chosen = np.arange(len(logits))
    if 0 < top_k < len(logits):
        chosen = chosen[logits >= np.partition(logits, -top_k)[-top_k]]
    else:
        # all tokens below the first bound have less than 1 - top_p together
        chosen = chosen[weights >= max((1 - top_p) / len(logits) * weights.sum(), min_p)]
    order = chosen[np.argsort(-logits[chosen], kind="stable")][: top_k or None]
    probabilities = weights[order] / (weights[order] if top_k else weights).sum()
    if top_p < 1 or min_p:
        n_likely = np.count_nonzero(probabilities >= min_p * probabilities[0])
        n_kept = min(n_likely, int(np.searchsorted(probabilities.cumsum(), top_p)) + 1)
        order, probabilities = order[:n_kept], probabilities[:n_kept]
    return order, probabilities / probabilities.sum()


def repeats(tokens: Sequence[int], size: int) -> list[int]:
    """The tokens that would complete a run of this many which the text already has (Paulus et al. 2017); 0 for none."""
    tail = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1) if size else ()
    return [tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == tail]
