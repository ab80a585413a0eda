"""Batched generation (continuous batching): each step reads the weights once. Used by `tricycle serve`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tricycle.decoding.prompt_lookup import Listener, PromptLookupGeneration
from tricycle.decoding.speculative import SpeculativeState, decode_batch
from tricycle.generate import resolve_sampling
from tricycle.kernels import FEW_ROWS
from tricycle.models import GPT
from tricycle.sampling import SamplingParams

MANY_ROWS = 1024  # the most tokens that are processed at once: more would be no faster, and take memory


def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int] | np.ndarray],
    n_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    temperature: float | None = None,
    n_draft_tokens: int = 0,
) -> list[list[int]]:
    """Return up to `n_tokens` new tokens after each prompt, in one batch; a shared seed increases by 1 per prompt.

    The tokens are the same as from `generate`.

    Args:
        sampling: one for each prompt; or one for all.
        temperature: short for `SamplingParams(temperature=...)`.
        n_draft_tokens: see `GenerationBatch`.

    Raises:
        ValueError: see `generate`; or the number of samplings differs from the number of prompts.
    """
    if isinstance(sampling, Sequence) and temperature is None:
        if len(sampling) != len(prompts):
            raise ValueError(
                f"generate_batch: expected a SamplingParams for each of {len(prompts)} prompts, got {len(sampling)}"
            )
        samplings = [resolve_sampling(each, None) for each in sampling]
    else:
        shared = resolve_sampling(sampling, temperature)  # type: ignore[arg-type]
        samplings = [shared.for_text(i) for i in range(len(prompts))]
    batch = GenerationBatch(model, n_draft_tokens)
    for prompt, each in zip(prompts, samplings):
        batch.add(prompt, n_tokens, each)
    generated: list[list[int]] = [[] for _ in prompts]
    while len(batch):
        for number, token in batch.step():
            generated[number].append(token)
    return generated


class GenerationBatch:
    """A batch of texts that are generated together (continuous batching): each step adds one token to each text.

    Texts join and leave at any time, and each has its own sampling parameters. There is no padding: the new tokens of
    all texts are rows of the same matrix products, and attention processes each text separately. So every text equals
    the result of `generate`, up to rounding: a product of several rows may add in another order.

    Args:
        n_draft_tokens: the most draft tokens of each text (see `generate_prompt_lookup`); fewer in large batches,
            because draft tokens are rows too.
    """

    def __init__(self, model: GPT, n_draft_tokens: int = 0) -> None:
        self.model = model
        self.n_draft_tokens = n_draft_tokens
        self._texts: dict[int, PromptLookupGeneration] = {}
        self._n_added = 0
        self._n_rows = MANY_ROWS if model.precision == "float32" else FEW_ROWS  # products of few rows round less

    def __len__(self) -> int:
        """Return the number of texts that are not complete."""
        return len(self._texts)

    def add(
        self,
        prompt: Sequence[int] | np.ndarray,
        n_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        state: SpeculativeState | None = None,
        overflow: str = "truncate",
        listener: Listener | None = None,
    ) -> int:
        """Add a text to the batch without running the model; return its number, counted from 0 over all ever added.

        Args:
            prompt, n_tokens, sampling, overflow: see `generate`.
            state: the KV caches of this text; new ones if not given.
            listener: called with each new token of this text and the model's logits (V,) for it.

        Raises:
            ValueError: see `generate`.
        """
        text = PromptLookupGeneration(self.model, prompt, n_tokens, sampling or SamplingParams(), state, overflow)
        text.listener = listener
        number = self._n_added
        self._n_added += 1
        if not text.done:
            self._texts[number] = text
        return number

    def remove(self, number: int) -> None:
        """Remove a text; do nothing if it is complete or was removed before."""
        self._texts.pop(number, None)

    def step(self) -> list[tuple[int, int]]:
        """Generate a token per text, more if drafts are accepted; drop complete texts; return (text id, token) pairs.

        The pairs are sorted by number; the tokens of one text are in order.

        Raises:
            ValueError: logits are not finite, because the model's weights are broken.
        """
        generated = []
        drafts = self._drafts()
        for numbers in self._groups(drafts):
            texts = [self._texts[number] for number in numbers]
            contexts = [text.context() + drafts[number] for number, text in zip(numbers, texts)]
            n_drafts = [len(drafts[number]) for number in numbers]
            every = decode_batch([text.state for text in texts], contexts, n_drafts)
            for number, text, logits in zip(numbers, texts, every):
                generated += [(number, token) for token in text.verify(logits, drafts[number])]
        for number in [number for number, text in self._texts.items() if text.done]:
            self.remove(number)
        return sorted(generated, key=lambda pair: pair[0])

    def _drafts(self) -> dict[int, list[int]]:
        """Return {text number: draft tokens}, each cut to an equal share of the FEW_ROWS rows that texts leave."""
        drafts = {number: text.draft(self.n_draft_tokens) for number, text in self._texts.items()}
        n_drafting = sum(map(bool, drafts.values()))
        room = max(0, FEW_ROWS - len(drafts)) // max(1, n_drafting)
        return {number: draft[:room] for number, draft in drafts.items()}

    def _groups(self, drafts: dict[int, list[int]]) -> Iterator[list[int]]:
        """Yield lists of text numbers, one per forward pass: few new tokens first, at most `_n_rows` or one text each.

        The new tokens of a group fit into memory; at 16-bit precision also into products of few rows, which are more
        exact. A long prompt is processed alone.
        """
        group: list[int] = []
        n_rows = 0
        sizes = {number: text.n_pending() + len(drafts[number]) for number, text in self._texts.items()}
        for number in sorted(sizes, key=lambda number: sizes[number]):
            if group and n_rows + sizes[number] > self._n_rows:
                yield group
                group, n_rows = [], 0
            group.append(number)
            n_rows += sizes[number]
        if group:
            yield group
