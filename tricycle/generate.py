"""Generate text: prefill the prompt into KV caches, then sample one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import DTypeLike

from tricycle.attention.cache import KeyValueCache
from tricycle.models import GPT
from tricycle.ops import check_range
from tricycle.sampling import SamplingParams

OVERFLOW = ("truncate", "error")


class DecodingState:
    """A model with the KV caches of `tokens`, which it has processed; `dtype` is that of keys and values if given."""

    def __init__(self, model: GPT, dtype: DTypeLike | None = None) -> None:
        self.model, self.dtype = model, dtype
        self.reset()

    def reset(self) -> None:
        """Empty the caches."""
        self.tokens: list[int] = []
        self.caches = self.model.new_caches(self.dtype)

    def truncate(self, length: int) -> None:
        """Remove all but the first tokens from the caches, or all tokens where the caches cannot be cut there."""
        if length == 0 or not all(cache.can_truncate(length) for cache in self.caches):
            return self.reset()
        for cache in self.caches:
            cache.truncate(length)
        self.tokens = self.tokens[:length]

    def uncached_tokens(self, text: list[int], n_last: int = 1) -> list[int]:
        """Truncate the caches to the tokens shared with a text; return its others, at least the last `n_last`."""
        n_shared = min(common_prefix_length(self.tokens, text), len(text) - n_last)
        if n_shared == 0 or n_shared < len(self.tokens):
            self.truncate(n_shared)
        # no tokens are known until all layers have processed the others: an interruption leaves unequal caches
        n_cached, self.tokens = len(self.tokens), []
        return text[n_cached:]

    def logits(self, text: Sequence[int]) -> np.ndarray:
        """Return the logits (V,) after a text of one token or more; only tokens that are not cached are processed."""
        text = list(text)
        logits: np.ndarray = next_logits(self.model, self.uncached_tokens(text), self.caches)[0]
        self.tokens = text
        return logits


@np.errstate(all="ignore")  # broken weights are an error of sampling
def next_logits(model: GPT, tokens: Sequence[int], caches: list[KeyValueCache], every: bool = False) -> np.ndarray:
    """Return the logits (1, V) after some more tokens (T,) of a text, or after every one (T, V); dropout is off."""
    with model.evaluating():
        logits: np.ndarray = model(model.place(np.array([tokens], int)), caches, last=not every).numpy()[0]
    return logits


class Generation:
    """A text (`tokens`) while it is generated: iteration gives its next tokens. Takes the arguments of `generate`."""

    new_state = DecodingState

    def __init__(
        self,
        model: GPT,
        prompt: Sequence[int] | np.ndarray,
        n_tokens: int,
        sampling: SamplingParams,
        state: DecodingState | None = None,
        overflow: str = "truncate",
    ) -> None:
        if overflow not in OVERFLOW:
            raise ValueError(f"generate: expected overflow to be {' or '.join(OVERFLOW)}, got {overflow!r}")
        self.tokens = [int(token) for token in prompt]
        check_prompt(self.tokens, n_tokens, sampling.n_vocab, model)
        self.state = self.new_state(model) if state is None else state
        self.sampling, self.generator = sampling, sampling.new_generator()
        self.n_prompt, self.max_length = len(self.tokens), len(self.tokens) + n_tokens
        self.done = n_tokens == 0
        self.window, self.overflow = model.config.context_window, overflow
        self.start = 0  # of the context in the text

    def __iter__(self) -> Iterator[int]:
        while not self.done:
            yield self.append(self.state.logits(self.context()))

    def context(self) -> list[int]:
        """Return the tokens that the model attends to next, at most its context window."""
        if len(self.tokens) - self.start > self.window:
            if self.overflow == "error":
                raise ValueError(f"generate: the context window of {self.window} tokens is full")
            self.start = len(self.tokens) - max(1, self.window // 2)
        return self.tokens[self.start :]

    def append(self, logits: np.ndarray) -> int:
        """Sample the next token from logits (V,), and append it to the text."""
        token = self.sample(logits)
        self.tokens.append(token)
        self.done = len(self.tokens) == self.max_length or self.sampling.is_stop_token(token)
        return token

    def sample(self, logits: np.ndarray) -> int:
        return self.sampling.sample(logits, self.generator, self.tokens, self.n_prompt)


def generate(
    model: GPT,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    temperature: float | None = None,
    state: DecodingState | None = None,
    overflow: str = "truncate",
) -> Iterator[int]:
    """Continue a prompt of token ids, at least one and at most the context window; gives each token once sampled.

    Args:
        n_tokens: how many to generate at most; a stop token ends the text earlier.
        sampling: `SamplingParams()` unless given; `temperature=0.8` is short for `SamplingParams(temperature=0.8)`.
        state: whose caches may have the beginning of the prompt already; a new one unless given.
        overflow: when the context window is full, "truncate" re-encodes its later half, "error" raises a ValueError.

    Raises:
        ValueError: an empty or too long prompt, ids outside the vocabulary, parameters out of range.
    """
    return iter(Generation(model, prompt, n_tokens, resolve_sampling(sampling, temperature), state, overflow))


def resolve_sampling(sampling: SamplingParams | None, temperature: float | None) -> SamplingParams:
    """Return `sampling`, or what the temperature is short for."""
    if not isinstance(sampling, SamplingParams | None):
        raise TypeError(f"expected a SamplingParams (or temperature=..., which is short for one), got {sampling!r}")
    if sampling is not None and temperature is not None:
        raise ValueError(
            f"expected a temperature or a SamplingParams, which has one, got both: {temperature!r}, {sampling}"
        )
    return sampling or SamplingParams(1.0 if temperature is None else temperature)


def check_prompt(tokens: list[int], n_tokens: int, n_vocab: int | None, model: GPT) -> None:
    window, size = model.config.context_window, model.config.vocab_size
    if not 1 <= len(tokens) <= window:
        raise ValueError(f"generate: expected a prompt of 1 to {window} tokens, got {len(tokens)}")
    if not isinstance(n_tokens, (int, np.integer)) or n_tokens < 0:
        raise ValueError(f"generate: expected n_tokens to be 0 or more, got {n_tokens}")
    if n_vocab is not None and not 1 <= n_vocab <= size:
        raise ValueError(f"generate: expected n_vocab from 1 to {size}, got {n_vocab}")
    check_range("generate: prompt", np.array(tokens), size)


def common_prefix_length(left: list[int], right: list[int]) -> int:
    """Return the length of the common beginning of two texts."""
    n = min(len(left), len(right))
    return n if left[:n] == right[:n] else next(i for i in range(n) if left[i] != right[i])
