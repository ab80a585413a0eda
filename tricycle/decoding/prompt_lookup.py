"""Prompt-lookup (speculative) decoding: draft tokens are copied from an earlier occurrence of the last tokens.

The model processes all draft tokens at once; a draft token is accepted if it equals the sampled token.

Source: Saxena 2023, "Prompt lookup decoding".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tricycle.decoding.exactness import sample_if_certain
from tricycle.decoding.speculative import SpeculativeState, decode_batch
from tricycle.generate import Generation, common_prefix_length, resolve_sampling
from tricycle.kernels import FEW_ROWS
from tricycle.models import GPT
from tricycle.sampling import SamplingParams

Listener = Callable[[int, np.ndarray], None]
NGRAM_SIZE = 3  # the number of last tokens that must have occurred before in this order
# The largest error of logits if several tokens were processed at once, as a fraction of the largest logit. Measured: at
# most 2e-6 with float32; 0 with weights of 8 or 16 bits and oneDNN.
TOLERANCE = 1e-5
# A KV cache of fewer bits rounds some of these keys and values to another number. Measured with SmolLM2: at most 3e-4
# with float16, 1.4e-2 with int8.
CACHE_TOLERANCES = {"float16": 1e-3, "bfloat16": 8e-3, "int8": 3e-2}


class PromptLookupGeneration(Generation):
    """The generation of one text with draft tokens, up to `n_draft_tokens` at a time.

    Attributes:
        listener: called with each token and the model's logits (V,) for it.
    """

    new_state = SpeculativeState
    state: SpeculativeState
    n_draft_tokens = 0
    listener: Listener | None = None

    def __iter__(self) -> Iterator[int]:
        """Yield the text's further tokens, decoding with draft tokens, until it is done."""
        while not self.done:
            draft = self.draft(self.n_draft_tokens)
            (logits,) = decode_batch([self.state], [self.context() + draft], [len(draft)])
            yield from self.verify(logits, draft)

    def n_pending(self) -> int:
        """Return the number of tokens that the model processes next, without draft tokens."""
        context = self.context()
        return len(context) - min(common_prefix_length(self.state.tokens, context), len(context) - 1)

    def draft(self, n_most: int) -> list[int]:
        """Return draft tokens that fit: those after the previous occurrence of the last 3 (repeated if few), or [].

        The list is empty if there is no such occurrence, or if the model must process more than the last token anyway.
        """
        room = min(n_most, self.window - len(self.context()), self.max_length - len(self.tokens) - 1, FEW_ROWS - 1)
        if room < 1 or not self.state.can_truncate or self.n_pending() > 1:
            return []
        *before, last = self.tokens[-NGRAM_SIZE:]
        n = len(before)
        for i in range(len(self.tokens) - 2, n - 1, -1):
            if self.tokens[i] == last and self.tokens[i - n : i] == before:
                following = self.tokens[i + 1 :]  # repeated if it is shorter than the draft
                return (following * -(-room // len(following)))[:room]
        return []

    def verify(self, logits: np.ndarray, draft: list[int]) -> Iterator[int]:
        """Sample, append and yield a token from each row of logits, up to the first that differs from its draft token.

        Args:
            logits: (D + 1, V) for D draft tokens.
        """
        for row, drafted in zip(logits, [*draft, None]):
            token = self.append(row)
            has_next = len(self.state.tokens) > len(self.tokens) - 1 - self.start  # not if logits were recomputed
            yield token
            if self.done or token != drafted or not has_next:
                return

    def sample(self, logits: np.ndarray) -> int:
        """Sample the token that decoding without drafts gives, recomputing logits if needed; call the listener."""
        token = None
        if self.state.is_inexact:
            tolerance = CACHE_TOLERANCES.get(np.dtype(self.state.dtype or np.float32).name, TOLERANCE)
            token = sample_if_certain(self.sampling, logits, self.generator, self.tokens, tolerance, self.n_prompt)
            if token is None:
                logits = self.state.recompute_logits(self.context())
        if token is None:
            token = super().sample(logits)
        if self.listener is not None:
            self.listener(token, logits)
        return token


def generate_prompt_lookup(
    model: GPT,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    temperature: float | None = None,
    state: SpeculativeState | None = None,
    overflow: str = "truncate",
    n_draft_tokens: int = 8,
) -> Iterator[int]:
    """Return an iterator over the new tokens, those of `generate`, faster for repetitive text by prompt lookup.

    It helps most if the text repeats long passages, such as edited code, at temperature 0.

    Args:
        n_draft_tokens: the most draft tokens at a time; 0 for none. For the other arguments see `generate`.

    Raises:
        ValueError: see `generate`.
    """
    text = PromptLookupGeneration(model, prompt, n_tokens, resolve_sampling(sampling, temperature), state, overflow)
    text.n_draft_tokens = n_draft_tokens
    return iter(text)
