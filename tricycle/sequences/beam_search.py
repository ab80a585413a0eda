"""The likeliest target of an encoder-decoder, by a search in some width."""

from __future__ import annotations

from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.attention import KeyValueCache
from tricycle.sequences.seq2seq import EncoderDecoder
from tricycle.tensor import Operand, Tensor


def beam_search(
    model: EncoderDecoder,
    source: Operand,
    lengths: Any = None,
    *,
    begin: int,
    end: int,
    max_length: int = 100,
    beam_size: int = 1,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """The likeliest target that a search in some width finds for each source; greedy with a beam of 1.

    Args:
        source, lengths: as of `EncoderDecoder.start`.
        begin: the token that stands before every target. end: the one after it.
        max_length: the most tokens of a target.
        beam_size: how many beginnings are kept for each source.
        length_penalty: finished targets are compared by log probability / length^penalty; 0 favours short ones
            (Wu et al. 2016, section 7, without their constant).

    Returns:
        for each source the target's tokens, without begin and end.

    Raises:
        ValueError: a beam or a length below 1.
    """
    if beam_size < 1 or max_length < 1:
        raise ValueError(f"beam_search: expected beam_size and max_length above 0, got {beam_size} and {max_length}")
    with model.evaluating():
        source = model.place(source)
        state, n_items = model.start(source, lengths, capacity=max_length), len(source)
        first = np.arange(n_items)[:, None] * beam_size  # the row of each item's first beam
        state = select(state, np.repeat(np.arange(n_items), beam_size))
        scores = np.tile([0.0] + [-np.inf] * (beam_size - 1), (n_items, 1))  # all beams begin alike: one counts
        written = np.full((n_items * beam_size, max_length + 1), end)
        written[:, 0] = begin
        lasting = np.zeros((n_items, beam_size))  # lengths of those that are finished, 0 of others
        for t in range(max_length):
            logits = model.decode(model.place(written[:, t : t + 1]), state).numpy()[:, -1].astype(np.float64)
            steps = kernels.log_softmax(logits).reshape(n_items, beam_size, -1)
            steps[lasting > 0] = -np.inf
            steps[lasting > 0, end] = 0  # a finished one stays as it is
            totals = (scores[:, :, None] + steps).reshape(n_items, -1)
            best = np.argsort(-totals, axis=1, kind="stable")[:, :beam_size]
            scores = np.take_along_axis(totals, best, axis=1)
            beams, tokens = np.divmod(best, steps.shape[-1])
            rows = (first + beams).reshape(-1)
            written, lasting = written[rows], np.take_along_axis(lasting, beams, axis=1)
            written[:, t + 1] = tokens.reshape(-1)
            lasting[(lasting == 0) & (tokens == end)] = t + 1
            if (lasting > 0).all():
                break
            if beam_size > 1:
                state = select(state, rows)
        ranks = scores / np.where(lasting > 0, lasting, max_length) ** length_penalty
        chosen = written[(first[:, 0] + ranks.argmax(axis=1)), 1:].tolist()
    return [row[: row.index(end)] if end in row else row for row in chosen]


def select(state: Any, rows: np.ndarray) -> Any:
    """The state of a decoder for some rows of its batch, each as often as it is named."""
    if isinstance(state, Tensor):
        return Tensor(state.array[state.xp.asarray(rows)], False)
    if isinstance(state, np.ndarray):
        return state[rows]
    if isinstance(state, KeyValueCache):
        return state.select(rows)
    if isinstance(state, dict):
        return {name: select(value, rows) for name, value in state.items()}
    return type(state)(select(value, rows) for value in state) if isinstance(state, (list, tuple)) else state
