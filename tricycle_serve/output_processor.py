"""Conversion of generated tokens to text: streaming detokenization, stop strings and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.sampling import top_indices
from tricycle_serve.completion_requests import SequenceRequest

MIN_LOGPROB = -9999.0  # replaces -inf, which JSON cannot represent


class TokenLogprob(NamedTuple):
    """Log-probabilities at one token.

    Attributes:
        logprob: None for the first token of a prompt.
        top_logprobs: the most probable tokens with their log-probabilities, in descending order; None like `logprob`.
        text_offset: index of the token's first character in the returned text.
    """

    token: int
    logprob: float | None
    top_logprobs: list[tuple[int, float]] | None
    text_offset: int


class TextDelta(NamedTuple):
    """New text of one sequence.

    Attributes:
        sequence_index: index of the sequence in its request.
        logprobs: one entry per token of this text, if log-probabilities were requested.
        n_tokens: number of tokens generated since the previous delta, including tokens without text.
        finish_reason: "stop" or "length" at the end of the sequence, otherwise None.
    """

    sequence_index: int
    text: str
    logprobs: list[TokenLogprob]
    n_tokens: int
    finish_reason: str | None = None


class StopStringFilter:
    """Cuts streamed text before the first stop string.

    The first stop string is the one that is complete first, so the result does not depend on how the text is divided.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._max_length = max(map(len, self._stop_strings), default=0)
        self._held = ""
        self.has_stopped = False

    def push(self, new_text: str) -> str:
        """Return sendable text, cut before a stop string (sets `has_stopped`); hold back an end that may begin one."""
        text = self._held + new_text
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stop_strings if stop in text]
        if ends:
            end, negative_length = min(ends)
            self.has_stopped = True
            self._held = ""
            return text[: end + negative_length]
        starts = range(max(0, len(text) - self._max_length + 1), len(text))
        partial = (i for i in starts if any(stop.startswith(text[i:]) for stop in self._stop_strings))
        start = next(partial, len(text))
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Return and clear the text that was held back, at the end of a sequence; a second call returns ""."""
        held, self._held = self._held, ""
        return held


class OutputProcessor:
    """Converts the tokens of one sequence to text deltas.

    Args:
        tokeniser: of the model.
        sequence_index: index of the sequence in its request.
    """

    def __init__(self, request: SequenceRequest, tokeniser: Any, sequence_index: int) -> None:
        self.request = request
        self.sequence_index = sequence_index
        self._detokenizer = tokeniser.stream(request.prompt)
        self._stop_filter = StopStringFilter(request.stop_strings)
        self._stop_tokens = frozenset(request.sampling.stop_tokens)  # type: ignore[arg-type]
        self._n_decoded_characters = 0
        self._n_sent_characters = 0
        self._n_new_tokens = 0  # since the last delta
        self.n_tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs = [TokenLogprob(request.prompt[0], None, None, 0)]

    def record_logprobs(self, token: int, logits: np.ndarray) -> None:
        """Store a token's log-probability and the `n_top_logprobs` greatest; do nothing for a stop token.

        A listener for `GenerationBatch.add`.
        """
        if token not in self._stop_tokens:
            self._logprobs.append(self._token_logprob(token, logits))

    def record_prompt_logprobs(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """Store the log-probabilities of the next tokens (T,) of the prompt, whose logits are (T, V)."""
        self._prompt_logprobs += map(self._token_logprob, tokens, logits)

    def prompt_delta(self, detokenizer: Any) -> TextDelta:
        """Return a delta of the echoed prompt with log-probabilities and text offsets of its tokens, not a last one.

        Args:
            detokenizer: an incremental decoder at the start of a text. If the tokenizer adds tokens before the text,
                their offset is 0.
        """
        text = self.request.echoed_text or ""
        parts = [detokenizer.push([token]) for token in self.request.prompt]
        ends = np.cumsum(list(map(len, parts)))
        n_added = max(0, int(ends[-1]) + len(detokenizer.flush()) - len(text))
        offsets = np.clip(ends - list(map(len, parts)) - n_added, 0, len(text)).tolist()
        logprobs = [
            entry._replace(text_offset=offset) for entry, offset in zip(self._prompt_logprobs, offsets, strict=True)
        ]
        self._n_decoded_characters = self._n_sent_characters = len(text)
        return TextDelta(self.sequence_index, text, logprobs, 0)

    def _token_logprob(self, token: int, logits: np.ndarray) -> TokenLogprob:
        """Return the log-probabilities of a token and of the most probable ones, without its text offset yet."""
        logprobs = kernels.log_softmax(logits[: self.request.sampling.n_vocab].astype(np.float64))
        n = min(self.request.n_top_logprobs or 0, len(logprobs))
        finite = np.maximum(logprobs, MIN_LOGPROB)
        top_logprobs = [(int(i), float(finite[i])) for i in top_indices(logprobs, n)] if n else []
        return TokenLogprob(token, float(finite[token]), top_logprobs, -1)

    def push(self, token: int) -> TextDelta | None:
        """Add a token; return new text, with a finish reason at the end, or None if no text can be sent yet."""
        self.n_tokens += 1
        self._n_new_tokens += 1
        if token in self._stop_tokens:
            return self.finish("stop")
        if self._logprobs:
            self._logprobs[-1] = self._logprobs[-1]._replace(text_offset=self._n_decoded_characters)
        decoded = self._detokenizer.push([token])
        self._n_decoded_characters += len(decoded)
        text = self._stop_filter.push(decoded)
        if self._stop_filter.has_stopped:
            return self._new_delta(text, "stop")
        if self.n_tokens == self.request.max_tokens:
            return self.finish("length", text)
        return self._new_delta(text, None) if text else None

    def finish(self, finish_reason: str, text: str = "") -> TextDelta:
        """Return the last delta: `text`, then held-back text; `finish_reason`, or "stop" if cut at a stop string."""
        decoded = self._detokenizer.flush()
        self._n_decoded_characters += len(decoded)
        text += self._stop_filter.push(decoded)
        if self._stop_filter.has_stopped:
            return self._new_delta(text, "stop")
        return self._new_delta(text + self._stop_filter.flush(), finish_reason)

    def _new_delta(self, text: str, finish_reason: str | None) -> TextDelta:
        """Return a delta of `text` and its log-probabilities; keep those of held-back text, drop those of cut text."""
        self._n_sent_characters += len(text)
        n = len(self._logprobs)
        if finish_reason is None or self._stop_filter.has_stopped:
            n = sum(entry.text_offset < self._n_sent_characters for entry in self._logprobs)
        logprobs, self._logprobs = self._logprobs[:n], self._logprobs[n:]
        n_new_tokens, self._n_new_tokens = self._n_new_tokens, 0
        return TextDelta(self.sequence_index, text, logprobs, n_new_tokens, finish_reason)


class TokenDecoder:
    """Decodes single tokens for log-probabilities, with a cache."""

    def __init__(self, tokeniser: Any) -> None:
        self._tokeniser = tokeniser
        # Some tokenizers drop the space before the first word of a text, so tokens are decoded after another one.
        self._prefix = [int(token) for token in tokeniser.encode_plain("a")]
        self._n_prefix_characters = len(tokeniser.decode(self._prefix))
        self._cache: dict[int, tuple[str, list[int] | None]] = {}

    def __call__(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text, and its bytes as integers; None as bytes if it is an unknown part of a character."""
        if token not in self._cache:
            text = self._tokeniser.decode([*self._prefix, token])[self._n_prefix_characters :]
            token_bytes: bytes | None = None if "\ufffd" in text else text.encode("utf-8")
            if hasattr(self._tokeniser, "token_bytes"):
                token_bytes = b"" if token >= len(self._tokeniser) else self._tokeniser.token_bytes(token)
            self._cache[token] = text, None if token_bytes is None else list(token_bytes)
        return self._cache[token]
