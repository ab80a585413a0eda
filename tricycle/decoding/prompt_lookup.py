"""Prompt-lookup decoding: where a text repeats itself, draft tokens are taken from its earlier part.

Source: Saxena 2023, "Prompt lookup decoding". The model processes all draft tokens at once, and those are accepted that
decoding one by one would have generated.
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
NGRAM_SIZE = 3  # how many tokens must have occurred before in this order
# The largest error of logits where several tokens were processed at once, as a fraction of the largest logit. At most
# 2e-6 was measured, with float32; with weights of 8 or 16 bits 0 where oneDNN multiplies.
TOLERANCE = 1e-5


class PromptLookupGeneration(Generation):
    """A text that is generated with draft tokens, up to `n_draft_tokens` at a time.

    Attributes:
        listener: is called with each token and the logits (V,) that it was sampled from, as the model gave them.
    """

    new_state = SpeculativeState
    state: SpeculativeState
    n_draft_tokens = 0
    listener: Listener | None = None

    def __iter__(self) -> Iterator[int]:
        while not self.done:
            draft = self.draft(self.n_draft_tokens)
            (logits,) = decode_batch([self.state], [self.context() + draft], [len(draft)])
            yield from self.verify(logits, draft)

    def n_pending(self) -> int:
        """Return how many tokens the model processes next, without draft tokens."""
        context = self.context()
        return len(context) - min(common_prefix_length(self.state.tokens, context), len(context) - 1)

    def draft(self, n_most: int) -> list[int]:
        """Return what followed the last occurrence of the text's last tokens.

        It is empty where there is none, or where more than the last token is to be processed anyway.
        """
        room = min(n_most, self.window - len(self.context()), self.max_length - len(self.tokens) - 1, FEW_ROWS - 1)
        if room < 1 or not self.state.can_truncate or self.n_pending() > 1:
            return []
        *before, last = self.tokens[-NGRAM_SIZE:]
        n = len(before)
        for i in range(len(self.tokens) - 2, n - 1, -1):
            if self.tokens[i] == last and self.tokens[i - n : i] == before:
                since = self.tokens[i + 1 :]  # perhaps a few tokens that are repeated over and over
                return (since * -(-room // len(since)))[:room]
        return []

    def verify(self, logits: np.ndarray, draft: list[int]) -> Iterator[int]:
        """Generate the next tokens: one, and another after each draft token that is equal to the one generated.

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
        """Sample the token that decoding without drafts gives, from recomputed logits where these are not sure to."""
        token = None
        if self.state.is_inexact:
            token = sample_if_certain(self.sampling, logits, self.generator, self.tokens, TOLERANCE, self.n_prompt)
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
    overflow: str = "reread",
    n_draft_tokens: int = 8,
) -> Iterator[int]:
    """Continue a prompt as `generate` does, with the same tokens, and faster where the text repeats itself.

    It pays where much is repeated, as in code that is edited, at temperature 0.

    Args:
        n_draft_tokens: the most draft tokens at a time; 0 for none. Others as of `generate`.

    Raises:
        ValueError: as of `generate`.
    """
    text = PromptLookupGeneration(model, prompt, n_tokens, resolve_sampling(sampling, temperature), state, overflow)
    text.n_draft_tokens = n_draft_tokens
    return iter(text)
