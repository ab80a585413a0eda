"""Beam search for encoder-decoders, and the search itself, which `tricycle.decoding.beam_search` shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tricycle import kernels
from tricycle.attention import KeyValueCache
from tricycle.decoding.ragged import select_items
from tricycle.sampling import top_indices
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
    """Return the best target of each source, token ids without begin and end, by beam search; greedy if beam_size=1.

    Args:
        source, lengths: see `EncoderDecoder.start_decoding`.
        begin: the token before every target.
        end: the token after every target.
        max_length: the most tokens of a target.
        beam_size: the number of hypotheses kept for each source.
        length_penalty: finished targets are compared by log probability / length^penalty; 0 favors short ones
            (Wu et al. 2016, section 7, without their constant).

    Raises:
        ValueError: beam_size or max_length is below 1.
    """
    if beam_size < 1 or max_length < 1:
        raise ValueError(f"beam_search: expected beam_size and max_length above 0, got {beam_size} and {max_length}")
    with model.evaluating():
        source = model.place(source)
        rows = _Targets(model, model.start_decoding(source, lengths, capacity=max_length))
        targets = run_beam_search(rows, np.full(len(source), begin), [end], max_length, beam_size, length_penalty)
    return [target[:-1] if target[-1] == end else target for target in targets]


class Beams(Protocol):
    """The interface of the decoder that `run_beam_search` extends: a batch of hypotheses."""

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Append one token to each of R hypotheses, and return the logits (R, V) for the next."""

    def select(self, rows: np.ndarray) -> None:
        """Keep the hypotheses with these row numbers, in this order; they may repeat."""


class _Targets:
    def __init__(self, model: EncoderDecoder, state: Any) -> None:
        self.model = model
        self.state = state

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits (N, V) after one more token (N,) of each target, and advance the state."""
        logits: np.ndarray = self.model.decode(self.model.place(tokens[:, None]), self.state).numpy()[:, -1]
        return logits

    def select(self, rows: np.ndarray) -> None:
        """Replace the state by copies of its batch rows `rows`, which may repeat."""
        self.state = select_rows(self.state, rows)


def run_beam_search(
    texts: Beams, first: np.ndarray, ends: Sequence[int], max_length: int, beam_size: int, length_penalty: float
) -> list[list[int]]:
    """Return the best continuation of each of N texts by beam search: 1 to max_length tokens, with an end token if any.

    Args:
        texts: a decoder with N hypotheses.
        first: (N,), the first token of each text, which is not returned.
        ends: tokens that end a text.
        others: see `beam_search`.
    """
    n_items = len(first)
    top = np.arange(n_items)[:, None] * beam_size  # the row of each item's first beam
    if beam_size > 1:
        texts.select(np.repeat(np.arange(n_items), beam_size))
    scores = np.tile([0.0] + [-np.inf] * (beam_size - 1), (n_items, 1))  # all beams start equal: only one counts
    written = np.zeros((n_items * beam_size, max_length + 1), int)
    written[:, 0] = np.repeat(first, beam_size)
    lasting = np.zeros((n_items, beam_size), int)  # lengths of those that are finished, 0 of others
    for t in range(max_length):
        logits = texts.step(written[:, t]).astype(np.float64)
        steps = kernels.log_softmax(logits).reshape(n_items, beam_size, -1)
        steps[lasting > 0] = -np.inf
        steps[lasting > 0, ends[0] if len(ends) else 0] = 0  # a finished one stays as it is
        totals = (scores[:, :, None] + steps).reshape(n_items, -1)
        best = np.stack([top_indices(row, beam_size) for row in totals])
        scores = np.take_along_axis(totals, best, axis=1)
        beams, tokens = np.divmod(best, steps.shape[-1])
        rows = (top + beams).reshape(-1)
        written, lasting = written[rows], np.take_along_axis(lasting, beams, axis=1)
        written[:, t + 1] = tokens.reshape(-1)
        lasting[(lasting == 0) & np.isin(tokens, ends)] = t + 1
        if (lasting > 0).all():
            break
        if beam_size > 1:
            texts.select(rows)
    n_written = np.where(lasting > 0, lasting, max_length)
    best_beam = (scores / n_written**length_penalty).argmax(axis=1)
    return [
        written[row, 1 : n + 1].tolist()
        for row, n in zip(top[:, 0] + best_beam, n_written[np.arange(n_items), best_beam])
    ]


def select_rows(state: Any, rows: np.ndarray) -> Any:
    """Return a copy of a decoder state with only the batch rows `rows` (may repeat) of Tensors, arrays and caches."""
    if isinstance(state, Tensor):
        return Tensor(state.array[state.xp.asarray(rows)], False)
    if isinstance(state, np.ndarray):
        return state[rows]
    if isinstance(state, KeyValueCache):
        return select_items(state, rows)
    if isinstance(state, dict):
        return {name: select_rows(value, rows) for name, value in state.items()}
    return type(state)(select_rows(value, rows) for value in state) if isinstance(state, (list, tuple)) else state
