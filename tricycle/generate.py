"""Text generation: prefill of the prompt into KV caches, then sampling of one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import DTypeLike

from tricycle.attention.cache import KeyValueCache
from tricycle.models import GPT
from tricycle.ops import check_range
from tricycle.sampling import SamplingParams

OVERFLOW = ("truncate", "error")
PREFILL_TOKENS = 512  # processed at once: the memory of activations grows with them, and products are hardly faster


class DecodingState:
    """A model and its KV caches, stored in `dtype`, for the tokens processed so far."""

    def __init__(self, model: GPT, dtype: DTypeLike | None = None) -> None:
        self.model, self.dtype = model, dtype
        self.reset()

    def reset(self) -> None:
        """Clear the caches and `tokens`, so that the next text is processed from its first token."""
        self.tokens: list[int] = []
        self.caches = self.model.new_caches(self.dtype)

    def truncate(self, length: int) -> None:
        """Truncate caches and `tokens` to the first `length` tokens; clear them if they cannot be truncated there."""
        if length == 0 or self._crosses(length) or not all(cache.can_truncate(length) for cache in self.caches):
            return self.reset()
        for cache in self.caches:
            cache.truncate(length)
        self.tokens = self.tokens[:length]

    def _crosses(self, length: int) -> bool:
        """Return whether a text of `length` tokens has other RoPE frequencies than the cached text."""
        limit = self.model.config.rotary_original_window
        return self.model.config.rotary_scaling == "longrope" and (length > limit) != (len(self.tokens) > limit)

    def trim_to_prefix(self, text: list[int], n_last: int = 1) -> list[int]:
        """Truncate the caches to a prefix of `text`, set `tokens` to [], return the ids after it, at least `n_last`."""
        n_shared = 0 if self._crosses(len(text)) else common_prefix_length(self.tokens, text)
        n_shared = min(n_shared, len(text) - n_last)
        if n_shared == 0 or n_shared < len(self.tokens):
            self.truncate(n_shared)
        # no tokens count as cached until all layers are done: an interruption leaves the caches inconsistent
        n_cached, self.tokens = len(self.tokens), []
        return text[n_cached:]

    def logits(self, text: Sequence[int]) -> np.ndarray:
        """Return the logits (V,) after the last token of a text; process only uncached tokens, and cache them."""
        text = list(text)
        logits: np.ndarray = next_logits(self.model, self.trim_to_prefix(text), self.caches)[0]
        self.tokens = text
        return logits


@np.errstate(all="ignore")  # sampling reports non-finite logits
def next_logits(model: GPT, tokens: Sequence[int], caches: list[KeyValueCache], every: bool = False) -> np.ndarray:
    """Append tokens (T,) of a text to `caches`; return logits after the last (1, V), or after `every` token (T, V)."""
    in_one_piece = every or model.config.rotary_scaling == "longrope"  # whose frequencies depend on the whole length
    step = max(1, len(tokens)) if in_one_piece else PREFILL_TOKENS
    for cache in caches:
        cache.expected_length = cache.length + len(tokens)
    with model.evaluating():
        for start in range(0, max(1, len(tokens)), step):
            logits = model(model.place(np.array([tokens[start : start + step]], int)), caches, last=not every)
    return np.asarray(logits.numpy()[0])


class Generation:
    """A text during generation: iteration yields its next tokens. Arguments as of `generate`."""

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
        self.window, self.overflow = model.config.context_window, overflow
        self.done, self.start = n_tokens == 0, 0  # index of the first token of the context

    def __iter__(self) -> Iterator[int]:
        """Yield each sampled token, after the logits of the current context, until `done`."""
        while not self.done:
            yield self.append(self.state.logits(self.context()))

    def context(self) -> list[int]:
        """Return the context's tokens; if they exceed the window, keep the last half window, or raise a ValueError."""
        if len(self.tokens) - self.start > self.window:
            if self.overflow == "error":
                raise ValueError(f"generate: the context window of {self.window} tokens is full")
            self.start = len(self.tokens) - max(1, self.window // 2)
        return self.tokens[self.start :]

    def append(self, logits: np.ndarray) -> int:
        """Sample the next token from logits (V,), append it to `tokens`, update `done`, and return the token."""
        token = self.sample(logits)
        self.tokens.append(token)
        self.done = len(self.tokens) == self.max_length or token in self.sampling.stop_tokens  # type: ignore[operator]
        return token

    def sample(self, logits: np.ndarray) -> int:
        """Sample a token from logits (V,) with the text's parameters and generator, without appending it."""
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
    """Return a lazy iterator of up to `n_tokens` tokens after a prompt, to a stop token; check arguments at once.

    Args:
        n_tokens: the maximum number of tokens; a stop token ends generation earlier.
        sampling: by default `SamplingParams()`; `temperature=0.8` is short for `SamplingParams(temperature=0.8)`.
        state: a decoding state whose caches may contain a prefix of the prompt; by default a new one.
        overflow: when the context window is full, "truncate" re-encodes its later half, "error" raises a ValueError.

    Raises:
        ValueError: an empty or too long prompt, ids outside the vocabulary, or parameters out of range.
    """
    return iter(Generation(model, prompt, n_tokens, resolve_sampling(sampling, temperature), state, overflow))


def resolve_sampling(sampling: SamplingParams | None, temperature: float | None) -> SamplingParams:
    """Return `sampling`, or new of the temperature (default 1); ValueError if both, TypeError for another type."""
    if not isinstance(sampling, SamplingParams | None):
        raise TypeError(f"expected a SamplingParams (or temperature=..., which is short for one), got {sampling!r}")
    if sampling is not None and temperature is not None:
        raise ValueError(f"expected a temperature or a SamplingParams, got both: {temperature!r}, {sampling}")
    return sampling or SamplingParams(1.0 if temperature is None else temperature)


def check_prompt(tokens: list[int], n_tokens: int, n_vocab: int | None, model: GPT) -> None:
    """Raise a ValueError for an empty, too long or out-of-vocabulary prompt, or a wrong `n_tokens` or `n_vocab`."""
    window, size = model.config.context_window, model.config.vocab_size
    if not 1 <= len(tokens) <= window:
        raise ValueError(f"generate: expected a prompt of 1 to {window} tokens, got {len(tokens)}")
    if not isinstance(n_tokens, (int, np.integer)) or n_tokens < 0:
        raise ValueError(f"generate: expected n_tokens to be 0 or more, got {n_tokens}")
    if n_vocab is not None and not 1 <= n_vocab <= size:
        raise ValueError(f"generate: expected n_vocab from 1 to {size}, got {n_vocab}")
    check_range("generate: prompt", np.array(tokens), size)


def common_prefix_length(left: list[int], right: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    n = min(len(left), len(right))
    return n if left[:n] == right[:n] else next(i for i in range(n) if left[i] != right[i])
