"""Preferences: of two answers to a prompt the chosen one is to become likelier than the rejected one, and the model is
to stay near to what it was.

Source: Rafailov et al. 2023, "Direct preference optimization: your language model is secretly a reward model".

Shapes: P pairs, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.devices import Array, array_module, to_cpu
from tricycle.finetuning.packing import IGNORED, Batch, Example, PackedDataset
from tricycle.loss import CrossEntropy
from tricycle.models import GPT, MAX_LOGITS
from tricycle.tensor import Tensor, no_grad, record
from tricycle.training import BatchLossFn


class PairBatch(NamedTuple):
    """Pairs of answers, as `dpo_loss` takes them: P rows of chosen ones, then P of rejected ones.

    Attributes:
        tokens, labels: whole numbers (2 P, T), as of `packing.Batch`.
        reference: (2 P,), the logarithms of the rows' probabilities before anything was learnt.
    """

    tokens: np.ndarray
    labels: np.ndarray
    reference: np.ndarray

    @property
    def n_labels(self) -> int:
        """How many pairs there are: each counts as much as any other."""
        return len(self.tokens) // 2


class PairDataset(PackedDataset):
    """Batches of pairs without end, under `next()`, in another order each pass; its position is a number.

    Args:
        examples: of chosen and rejected answers in turn.
        batch_size: pairs a batch.
        window, seed: as of `PackedDataset`. Each text has its own row.

    Attributes:
        reference: (P, 2), what `measure_reference` has measured.

    Raises:
        ValueError: as of `PackedDataset`; or an example without another.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int, window: int, seed: int = 0) -> None:
        super().__init__(examples, batch_size, window, seed, pack=False)
        if len(self.examples) % 2:
            raise ValueError(f"PairDataset: expected chosen and rejected in turn, got {len(self.examples)} examples")
        self._begin(len(self.examples) // 2, batch_size, seed)
        self.batch().shuffle(seed)
        self.reference = np.zeros((self.n_items, 2), np.float32)

    def together(self, rows: Sequence[int]) -> Any:
        """A batch of pairs, by their numbers."""
        batch: Batch = super().together([2 * row + side for side in (0, 1) for row in rows])
        return PairBatch(batch.tokens, batch.labels, self.reference[list(rows)].T.reshape(-1))

    def measure_reference(self, model: GPT) -> None:
        """Note how likely the model takes each answer for: it is the one that what learns is to stay near to."""
        size = self.batch_size or 1
        with model.evaluating():
            for first in range(0, self.n_items, size):
                rows = range(first, min(first + size, self.n_items))
                batch = self.together(rows)
                values = to_cpu(log_probabilities(model, model.hidden_states(model.place(batch.tokens)), batch.labels))
                self.reference[list(rows)] = values.reshape(2, -1).T


def log_probabilities(model: GPT, hidden: Tensor, labels: np.ndarray) -> Array:
    """Of each row the logarithm of the probability of all its labels together, without gradients.

    Args:
        hidden: (B, T, C), as of `GPT.hidden`.
        labels: (B, T), in host memory; `IGNORED` where a token does not count.

    Returns:
        (B,). No more than `MAX_LOGITS` logits exist at a time.
    """
    xp = array_module(hidden.array)
    at_once = max(1, MAX_LOGITS // model.config.vocab_size)
    totals = xp.zeros(len(labels), np.float32)
    rows, places = np.nonzero(labels != IGNORED)
    ids = xp.asarray(labels[rows, places])
    with no_grad():
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            states = hidden.array[xp.asarray(some), xp.asarray(places[start : start + at_once])]
            logits = model.logits(Tensor(states, False)).array
            for row in np.unique(some).tolist():  # whose logits stand together
                first, end = np.searchsorted(some, (row, row + 1)).tolist()
                own = ids[start + first : start + end]
                ones = xp.ones(end - first, np.float32)
                totals[row] -= kernels.cross_entropy(logits[first:end], own, ones, with_gradient=False)[0]
    return totals


def margins_of(model: GPT, hidden: Tensor, batch: PairBatch, beta: float) -> Array:
    """Of each pair beta ((c - c') - (r - r')), (P,): c and r are the logarithms of the probabilities of the chosen and
    of the rejected answer, c' and r' those before anything was learnt. The paper calls it the difference of rewards.

    Args:
        hidden: (2 P, T, C), as of `GPT.hidden`.
    """
    gained = log_probabilities(model, hidden, batch.labels)
    gained -= array_module(gained).asarray(batch.reference)
    return beta * (gained[: batch.n_labels] - gained[batch.n_labels :])


def pair_losses(margins: Array) -> Array:
    """-log sigmoid(margin), (P,)."""
    return array_module(margins).logaddexp(0, -margins)


def dpo_loss(model: GPT, beta: float = 0.1, see: Callable[[Array], Any] | None = None) -> BatchLossFn:
    """The mean over pairs of -log sigmoid(margin).

    Args:
        model: what learns.
        beta: how much it costs to go away from what the model was: the smaller, the farther it goes.
        see: is given the margins (P,) of each batch.
    """
    loss_fn = CrossEntropy(ignore_index=IGNORED)

    def batch_loss(batch: PairBatch, factor: Any) -> Tensor:
        labels = model.place(batch.labels)
        hidden = model.hidden_states(model.place(batch.tokens))
        margins = margins_of(model, hidden, batch, beta)
        if see is not None:
            see(margins)
        # The derivative by c, and less that by r, is one number for each pair. With these as weights cross-entropy,
        # which makes the logits again, a few at a time, has the gradients of this loss.
        xp = array_module(margins)
        slope = factor * beta / (1 + xp.exp(margins)) / len(margins)
        n_counted = (labels.array != IGNORED).sum()
        weights = xp.broadcast_to(xp.concatenate([slope, -slope])[:, None] * n_counted, labels.shape)
        weighed = model.loss_from_hidden(labels, hidden, loss_fn, weights.astype(np.float32))
        value = (pair_losses(margins).mean() * factor).astype(np.float32)
        return record(value, (weighed,), lambda grad, needs_grad: (grad,), "dpo")

    return batch_loss
