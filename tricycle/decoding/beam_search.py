"""Beam search for decoder-only models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tricycle.attention import KeyValueCache
from tricycle.decoding.ragged import next_logits, select_items
from tricycle.generate import check_prompt
from tricycle.models import GPT
from tricycle.sequences.beam_search import run_beam_search


def generate_beam_search(
    model: GPT,
    prompts: Sequence[Sequence[int] | np.ndarray],
    n_tokens: int,
    beam_size: int = 4,
    length_penalty: float = 1.0,
    stop_tokens: int | Sequence[int] = (),
    n_vocab: int | None = None,
) -> list[list[int]]:
    """Return each prompt's best new tokens, a stop token included, by beam search on log p / length^length_penalty.

    A beam size of 1 gives the same tokens as `generate` at temperature 0. All beams of all prompts are rows of the
    same matrix products.

    Args:
        n_tokens: the most tokens of a continuation; with the prompt at most the context window.
        beam_size: the number of hypotheses kept for each prompt.
        length_penalty: continuations are compared by log probability / length^penalty; 0 favors short ones
            (Wu et al. 2016, section 7, without their constant).
        stop_tokens: each of these tokens ends a continuation, which includes it.
        n_vocab: generate only ids below this.

    Raises:
        ValueError: a prompt is empty or too long, ids are outside the vocabulary, or a setting is out of range.
    """
    texts = [[int(token) for token in prompt] for prompt in prompts]
    if beam_size < 1:
        raise ValueError(f"generate_beam_search: expected beam_size above 0, got {beam_size}")
    window = model.config.context_window
    for text in texts:
        check_prompt(text, n_tokens, n_vocab, model)
        if len(text) - 1 + n_tokens > window:
            n_given = len(text) + n_tokens
            raise ValueError(
                f"generate_beam_search: expected at most {window + 1} tokens with the prompt, got {n_given}"
            )
    if not texts or not n_tokens:
        return [[] for _ in texts]
    ends = [stop for stop in np.atleast_1d(stop_tokens).tolist() if stop < (n_vocab or model.config.vocab_size)]
    first = np.array([text[-1] for text in texts])
    return run_beam_search(BeamTexts(model, texts, n_vocab), first, ends, n_tokens, beam_size, length_penalty)


class BeamTexts:
    """The KV caches of several texts, which contain all tokens but the last, for `run_beam_search`."""

    def __init__(self, model: GPT, texts: list[list[int]], n_vocab: int | None) -> None:
        self.model = model
        self.n_vocab = n_vocab
        self.caches = [model.new_caches() for _ in texts]
        for text, caches in zip(texts, self.caches):
            if len(text) > 1:
                next_logits(model, [text[:-1]], [caches])

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Process one token of each text, extending the caches; return the logits (N, n_vocab) after it."""
        return next_logits(self.model, tokens[:, None].tolist(), self.caches)[:, : self.n_vocab]

    def select(self, rows: np.ndarray) -> None:
        """Replace `caches` by those of texts `rows`, in this order; copy those that are selected repeatedly."""
        chosen: list[list[KeyValueCache]] = []
        moved: set[int] = set()
        for row in rows.tolist():
            caches = self.caches[row]
            chosen.append([select_items(cache, np.array([0])) for cache in caches] if row in moved else caches)
            moved.add(row)
        self.caches = chosen
