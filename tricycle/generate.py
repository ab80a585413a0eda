"""Text from a model, token by token, with cached keys and values: by sampling, and by search for encoder-decoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tricycle.decoding import next_logits
from tricycle.models import GPT
from tricycle.ops import check_range


def sample(
    logits: np.ndarray,
    generator: np.random.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    never: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    seen: Sequence[int] = (),
) -> int:
    """Draw a token. What follows happens in this order: repetition_penalty, never, temperature, top_k, top_p and min_p.

    Args:
        logits: (V,).
        temperature: divides the logits; 0 takes the largest.
        top_k: draw among the k largest only; 0 for all.
        top_p: draw among the fewest largest whose probabilities reach this sum (Holtzman et al. 2020).
        min_p: draw among those at least this many times as probable as the largest (Nguyen et al. 2024).
        never: tokens that are not drawn, unless there is no other.
        repetition_penalty: logits of tokens that were `seen` are divided by this, or multiplied where they are below 0
            (Keskar et al. 2019, section 4.1); 1 leaves them.

    Raises:
        ValueError: settings out of range, or logits that are not finite.
    """
    check_sampling(temperature, top_k, top_p, min_p, repetition_penalty=repetition_penalty)
    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise ValueError("sample: expected finite logits, got NaN or infinity: the model's weights are broken")
    if repetition_penalty != 1 and len(seen):
        known = np.unique(np.asarray(seen, np.int64))
        known = known[known < len(logits)]
        logits[known] = np.where(
            logits[known] < 0, logits[known] * repetition_penalty, logits[known] / repetition_penalty
        )
    if 0 < len(hidden := {token for token in never if token < len(logits)}) < len(logits):
        logits[list(hidden)] = -np.inf
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    # the shift keeps a small temperature from overflowing
    probabilities = np.exp((logits[order] - logits[order[0]]) / max(temperature, 1e-6))
    probabilities /= probabilities.sum()
    if top_p < 1 or min_p:
        n_likely = np.count_nonzero(probabilities >= min_p * probabilities[0])
        n_kept = min(n_likely, int(np.searchsorted(probabilities.cumsum(), top_p)) + 1)
        order, probabilities = order[:n_kept], probabilities[:n_kept] / probabilities[:n_kept].sum()
    return int(order[generator.choice(len(probabilities), p=probabilities)])


def repeats(tokens: Sequence[int], size: int) -> list[int]:
    """The tokens that would complete a run of this many which the text already has (Paulus et al. 2017); 0 for none."""
    tail = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1) if size else ()
    return [tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == tail]


def check_sampling(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    no_repeat_ngram_size: int = 0,
    repetition_penalty: float = 1.0,
) -> None:
    """Refuse settings out of range.

    Raises:
        ValueError: names the setting.
    """
    if not 0 <= temperature < np.inf:
        raise ValueError(f"expected temperature to be 0 or more, got {temperature!r}")
    if not isinstance(top_k, (int, np.integer)) or top_k < 0:
        raise ValueError(f"expected top_k to be a whole number, 0 or more, got {top_k!r}")
    if not isinstance(no_repeat_ngram_size, (int, np.integer)) or no_repeat_ngram_size < 0:
        got = f"got {no_repeat_ngram_size!r}"
        raise ValueError(f"expected no_repeat_ngram_size to be a whole number, 0 or more, {got}")
    if not 0 < top_p <= 1:
        raise ValueError(f"expected top_p to be above 0 and at most 1, got {top_p!r}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"expected min_p to be from 0 to 1, got {min_p!r}")
    if not 0 < repetition_penalty < np.inf:
        raise ValueError(f"expected repetition_penalty to be above 0, got {repetition_penalty!r}")


class Reader:
    """A model together with the text that it has read last, whose keys and values it remembers.

    Of the next text it reads only what comes after the beginning that both have.

    Attributes:
        tokens: what has been read.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.forget()

    def forget(self) -> None:
        """Read the next text from its first token."""
        self.tokens: list[int] = []
        self._caches = self.model.new_caches()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits (V,) after a text of one token or more, in host memory; dropout is off."""
        tokens = list(tokens)
        n_known = min(_n_shared(self.tokens, tokens), len(tokens) - 1)  # the last token is read in any case
        if n_known < len(self.tokens) and any(cache.latest is not None for cache in self._caches):
            n_known = 0
        if n_known == 0:
            self.forget()
        for cache in self._caches:
            cache.crop(n_known)
        self.tokens = []  # until all blocks have read the same, should something interrupt them
        logits = next_logits(self.model, [tokens[n_known:]], [self._caches])[0]
        self.tokens = tokens
        return logits


def _n_shared(left: list[int], right: list[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    n_both = min(len(left), len(right))
    if left[:n_both] == right[:n_both]:
        return n_both
    return next(i for i in range(n_both) if left[i] != right[i])


def generate(
    model: GPT,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | np.random.Generator | None = 0,
    stop_token: int | Sequence[int] | None = None,
    n_vocab: int | None = None,
    min_p: float = 0.0,
    no_repeat_ngram_size: int = 0,
    repetition_penalty: float = 1.0,
    reader: Reader | None = None,
) -> Iterator[int]:
    """Continue a prompt; gives each token as soon as it is drawn.

    Keys and values of tokens seen are cached. When the context window is full, its later half is read anew
    and generation goes on from there.

    Args:
        prompt: token ids, at least one and at most the context window.
        n_tokens: how many to draw at most.
        temperature, top_k, top_p, min_p, repetition_penalty: as of `sample`; the prompt counts as seen.
        stop_token: end after drawing this one, or one of these.
        n_vocab: draw only ids below this (a tokeniser may know fewer than the model).
        no_repeat_ngram_size: never write so many tokens a second time in the same order; 0 lets them be. Small models
            run in circles without it.
        reader: one of this model, which may have read the beginning of the prompt already; a new one if None.

    Raises:
        ValueError: an empty or too long prompt, ids outside the vocabulary, settings out of range.
    """
    check_sampling(temperature, top_k, top_p, min_p, no_repeat_ngram_size, repetition_penalty)
    tokens = [int(token) for token in prompt]
    window = model.config.context_window
    _check_prompt(tokens, n_tokens, n_vocab, model)
    generator = np.random.default_rng(seed)
    stops = () if stop_token is None else np.atleast_1d(stop_token).tolist()
    eyes = reader or Reader(model)

    def draw() -> Iterator[int]:
        first = 0  # of the tokens that the model sees
        for _ in range(n_tokens):
            if len(tokens) - first > window:
                first = len(tokens) - max(1, window // 2)
            logits, never = eyes.logits(tokens[first:])[:n_vocab], repeats(tokens, no_repeat_ngram_size)
            token = sample(logits, generator, temperature, top_k, top_p, min_p, never, repetition_penalty, tokens)
            tokens.append(token)
            yield token
            if token in stops:
                return

    return draw()


def _check_prompt(tokens: list[int], n_tokens: int, n_vocab: int | None, model: GPT) -> None:
    """
    Raises:
        ValueError: as of `generate`.
    """
    window, size = model.config.context_window, model.config.vocab_size
    if not 1 <= len(tokens) <= window:
        raise ValueError(f"generate: expected a prompt of 1 to {window} tokens, got {len(tokens)}")
    if n_tokens < 0:
        raise ValueError(f"generate: expected n_tokens to be 0 or more, got {n_tokens}")
    if n_vocab is not None and not 1 <= n_vocab <= size:
        raise ValueError(f"generate: expected n_vocab from 1 to {size}, got {n_vocab}")
    check_range("generate: prompt", np.array(tokens), size)
