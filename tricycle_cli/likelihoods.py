"""Log-likelihoods of continuations of texts, for evaluation with multiple-choice tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.models import GPT

MAX_LOGITS = 2**26  # of a batch, 256 MB


class Pair(NamedTuple):
    """A context and its continuation, as token ids; neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    """The log-likelihood of a continuation.

    Attributes:
        logprob: the sum over the continuation's tokens, in nats.
        is_greedy: whether each token is the most probable one.
    """

    logprob: float
    is_greedy: bool


def iter_likelihoods(
    model: GPT, pairs: Sequence[Pair], batch_size: int | None = None
) -> Iterator[tuple[int, Likelihood]]:
    """Yield (index of pair, likelihood), in batches of similar lengths, longest first; ValueError if empty or too long.

    Args:
        pairs: contexts that do not fit into the context window are cut at their beginning.
        batch_size: the maximum number of pairs in a batch; None for as many as MAX_LOGITS allows.

    Raises:
        ValueError: an empty context or continuation, or a continuation that is longer than the context window.
    """
    window = model.config.context_window
    for pair in pairs:
        if not pair.context or not 0 < len(pair.continuation) <= window:
            expected = f"expected a context, and a continuation of 1 to {window} tokens"
            raise ValueError(f"{expected}, got {len(pair.context)} and {len(pair.continuation)} tokens")
    rows = [[*pair.context, *pair.continuation][-window - 1 :] for pair in pairs]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    while order:
        most = max(1, MAX_LOGITS // (len(rows[order[0]]) * model.config.vocab_size))
        batch, order = order[: min(most, batch_size or most)], order[min(most, batch_size or most) :]
        n_continued = [len(pairs[i].continuation) for i in batch]
        yield from zip(batch, _batch_likelihoods(model, [rows[i] for i in batch], n_continued))


def _batch_likelihoods(model: GPT, rows: list[list[int]], n_continued: list[int]) -> Iterator[Likelihood]:
    """Yield the likelihood of the last `n_continued` tokens of each row, of which the first is the longest."""
    ids = np.zeros((len(rows), len(rows[0]) - 1), int)  # attention is causal: padding at the end has no effect
    for padded, row in zip(ids, rows):
        padded[: len(row) - 1] = row[:-1]
    with model.evaluating():
        logits = model(model.place(ids)).numpy()
    for row, n, row_logits in zip(rows, n_continued, logits):
        logprobs = kernels.log_softmax(row_logits[len(row) - 1 - n : len(row) - 1].astype(np.float64))
        tokens = np.array(row[-n:])
        is_greedy = bool((logprobs.argmax(-1) == tokens).all())
        yield Likelihood(float(logprobs[np.arange(n), tokens].sum()), is_greedy)
