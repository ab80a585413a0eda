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
    model: GPT, pairs: Sequence[Pair], batch_size: int | None = None, window: int | None = None
) -> Iterator[tuple[int, Likelihood]]:
    """Yield (index of pair, likelihood), in batches of similar lengths, longest first; ValueError if empty or too long.

    Pairs that are equal but for the last token are processed once, such as one-token choices after a prompt.

    Args:
        pairs: contexts that do not fit into the window are cut at their beginning.
        batch_size: the maximum number of texts in a batch; None for as many as MAX_LOGITS allows.
        window: the maximum number of tokens of a text; by default the model's context window.

    Raises:
        ValueError: an empty context or continuation, or a continuation that is longer than the window.
    """
    window = window or model.config.context_window
    for pair in pairs:
        if not pair.context or not 0 < len(pair.continuation) <= window:
            expected = f"expected a context, and a continuation of 1 to {window} tokens"
            raise ValueError(f"{expected}, got {len(pair.context)} and {len(pair.continuation)} tokens")
    owners: dict[tuple[int, ...], list[int]] = {}  # pairs that differ in their last tokens alone share a row
    for i, pair in enumerate(pairs):
        owners.setdefault(tuple([*pair.context, *pair.continuation][-window - 1 : -1]), []).append(i)
    rows = sorted(owners, key=len, reverse=True)
    while rows:
        most = max(1, MAX_LOGITS // (len(rows[0]) * model.config.vocab_size))
        batch, rows = rows[: min(most, batch_size or most)], rows[min(most, batch_size or most) :]
        n_scored = [max(len(pairs[i].continuation) for i in owners[row]) for row in batch]
        for row, logits in zip(batch, _batch_logits(model, batch, n_scored)):
            for i in owners[row]:
                yield i, _likelihood(logits, np.array(pairs[i].continuation))


def _batch_logits(model: GPT, rows: Sequence[Sequence[int]], n_scored: Sequence[int]) -> list[np.ndarray]:
    """Return the last `n_scored[i]` logits (N, V) of each row i of ids; the first row is the longest."""
    ids = np.zeros((len(rows), len(rows[0])), int)  # attention is causal: padding at the end has no effect
    is_scored = np.zeros(ids.shape, bool)
    for i, (row, n) in enumerate(zip(rows, n_scored)):
        ids[i, : len(row)] = row
        is_scored[i, len(row) - n : len(row)] = True
    scored = tuple(model.place(index) for index in is_scored.nonzero())
    with model.evaluating():
        logits: np.ndarray = model(model.place(ids), output_fn=lambda hidden: model.logits(hidden[scored])).numpy()
    return np.split(logits, np.cumsum(n_scored)[:-1])


def _likelihood(logits: np.ndarray, tokens: np.ndarray) -> Likelihood:
    """Return the likelihood of `tokens` (N,) under the last N rows of logits."""
    logprobs = kernels.log_softmax(logits[-len(tokens) :].astype(np.float64))
    is_greedy = bool((logprobs.argmax(-1) == tokens).all())
    return Likelihood(float(logprobs[np.arange(len(tokens)), tokens].sum()), is_greedy)
