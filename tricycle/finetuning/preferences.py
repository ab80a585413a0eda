"""DPO: direct preference optimization on pairs of a chosen and a rejected answer.

Training raises the probability of the chosen answer relative to the rejected one, compared with the probabilities of
the reference model: the model before training. `tricycle finetune` uses this module for preference data.

Source: Rafailov et al. 2023, "Direct preference optimization: your language model is secretly a reward model".

Shapes: P pairs, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tricycle import kernels
from tricycle.create_graph import scatter, unfused
from tricycle.devices import Array, array_module, to_cpu
from tricycle.extra_ops import stack
from tricycle.finetuning.packing import IGNORED, Batch, Example, PackedDataset
from tricycle.functions import LogSoftmax
from tricycle.loss import CrossEntropy
from tricycle.models import GPT, n_logit_rows
from tricycle.tensor import Tensor, no_grad, record
from tricycle.training import BatchLossFn


class PairBatch(NamedTuple):
    """A batch of pairs for `dpo_loss`: P rows of chosen answers, then P rows of rejected answers.

    Attributes:
        tokens, labels: token ids (2 P, T), as of `packing.Batch`.
        reference_log_probs: (2 P,), the log-probabilities of the rows' answers in the reference model.
    """

    tokens: np.ndarray
    labels: np.ndarray
    reference_log_probs: np.ndarray

    @property
    def n_labels(self) -> int:
        """The number of pairs, which is the weight of a batch in the mean loss."""
        return len(self.tokens) // 2


class PairDataset(PackedDataset):
    """An endless dataset of pairs: `next()` returns a `PairBatch`; each epoch has another order.

    Args:
        examples: chosen and rejected answers, alternating.
        batch_size: pairs per batch.
        window, seed: as of `PackedDataset`. Each text has its own row.

    Attributes:
        reference_log_probs: (P, 2), the results of `compute_reference_log_probs`; zeros before.

    Raises:
        ValueError: as of `PackedDataset`; or an odd number of examples.
    """

    def __init__(self, examples: Sequence[Example], batch_size: int, window: int, seed: int = 0) -> None:
        super().__init__(examples, batch_size, window, seed, pack=False)
        if len(self.examples) % 2:
            raise ValueError(
                f"PairDataset: expected pairs of examples, chosen and rejected, got {len(self.examples)} examples"
            )
        self._initialize(len(self.examples) // 2, batch_size, seed)
        self.batch().shuffle(seed)
        self.reference_log_probs = np.zeros((self.n_items, 2), np.float32)

    def collate(self, rows: Sequence[int]) -> Any:
        """Return a PairBatch of the pairs with these indices: the chosen answers first, then the rejected ones."""
        batch: Batch = super().collate([2 * row + side for side in (0, 1) for row in rows])
        return PairBatch(batch.tokens, batch.labels, self.reference_log_probs[list(rows)].T.reshape(-1))

    def compute_reference_log_probs(self, model: GPT) -> None:
        """Overwrite `reference_log_probs` (P, 2) with the summed log-probabilities of all answers in `model`."""
        size = self.batch_size or 1
        with model.evaluating():
            for first in range(0, self.n_items, size):
                rows = range(first, min(first + size, self.n_items))
                batch = self.collate(rows)
                values = to_cpu(sequence_log_probs(model, model.hidden_states(model.place(batch.tokens)), batch.labels))
                self.reference_log_probs[list(rows)] = values.reshape(2, -1).T


def sequence_log_probs(model: GPT, hidden: Tensor, labels: np.ndarray) -> Array:
    """Return the summed log-probability (B,) of each row's labels that are not ignored, without gradients.

    The logits of at most `n_logit_rows` labels are stored at a time.

    Args:
        hidden: (B, T, C), as of `GPT.hidden_states`.
        labels: (B, T), in host memory; `IGNORED` for tokens that are not predicted.
    """
    xp = array_module(hidden.array)
    chunk_size = n_logit_rows(model.config.vocab_size)
    totals = xp.zeros(len(labels), np.float32)
    rows, columns = np.nonzero(labels != IGNORED)
    ids = xp.asarray(labels[rows, columns])
    with no_grad():
        for start in range(0, len(rows), chunk_size):
            chunk_rows = rows[start : start + chunk_size]
            states = hidden.array[xp.asarray(chunk_rows), xp.asarray(columns[start : start + chunk_size])]
            logits = model.logits(Tensor(states, False)).array
            for row in np.unique(chunk_rows).tolist():  # the logits of a row are contiguous
                first, end = np.searchsorted(chunk_rows, (row, row + 1)).tolist()
                row_ids = ids[start + first : start + end]
                ones = xp.ones(end - first, np.float32)
                totals[row] -= kernels.cross_entropy(logits[first:end], row_ids, ones, with_gradient=False)[0]
    return totals


def reward_margins(model: GPT, hidden: Tensor, batch: PairBatch, beta: float) -> Array:
    """Return each pair's margin (P,), beta times the log-ratio to the reference of chosen minus rejected answers.

    c and r are the log-probabilities of the chosen and of the rejected answer, c' and r' those in the reference model.

    Args:
        hidden: (2 P, T, C), as of `GPT.hidden_states`.
    """
    log_ratios = sequence_log_probs(model, hidden, batch.labels)
    log_ratios -= array_module(log_ratios).asarray(batch.reference_log_probs)
    return beta * (log_ratios[: batch.n_labels] - log_ratios[batch.n_labels :])


def preference_losses(margins: Array) -> Array:
    """Return the DPO loss of each pair, -log sigmoid(margin), (P,)."""
    return array_module(margins).logaddexp(0, -margins)


def dpo_loss(model: GPT, beta: float = 0.1, on_margins: Callable[[Array], Any] | None = None) -> BatchLossFn:
    """Return f(batch, factor): `factor` times the mean of -log sigmoid(margin); `on_margins` is called with margins.

    Args:
        model: the model to train.
        beta: the strength of the constraint to the reference model; a smaller one allows larger changes.
        on_margins: called with the margins (P,) of each batch.
    """
    loss_fn = CrossEntropy(ignore_index=IGNORED)

    def batch_loss(batch: PairBatch, factor: Any) -> Tensor:
        labels = model.place(batch.labels)
        hidden = model.hidden_states(model.place(batch.tokens))
        margins = reward_margins(model, hidden, batch, beta)
        if on_margins is not None:
            on_margins(margins)
        # The loss depends on each pair's log-probabilities only through its margin. Cross-entropy with the derivative
        # by the margin as the weight of the pair's tokens therefore has the gradients of this loss, and computes the
        # logits in chunks.
        xp = array_module(margins)
        slope = factor * beta / (1 + xp.exp(margins)) / len(margins)
        n_labels = (labels.array != IGNORED).sum()
        weights = xp.broadcast_to(xp.concatenate([slope, -slope])[:, None] * n_labels, labels.shape)
        weighted = model.loss_from_hidden(labels, hidden, loss_fn, weights.astype(np.float32))
        value = (preference_losses(margins).mean() * factor).astype(np.float32)
        # the hidden states and parameters are args for derivatives of higher order, where the weights are not constants
        others = (hidden, *(parameter for parameter in model.parameters() if parameter.requires_grad))
        backward = lambda grad, needs_grad, *saved: (grad, *(None for _ in others))
        return record(value, (weighted, *others), backward, "dpo", False, (model, batch, beta, factor))

    return batch_loss


@unfused("tricycle.finetuning.preferences.dpo_loss", closure=True)
def _dpo(node: Tensor, variables: Any) -> Tensor:
    """Recompute the DPO loss by operations on Tensors, with the logits of all labels at once."""
    hidden, (model, batch, beta, factor) = node.args[1], node._saved
    xp, rows_and_columns = hidden.xp, np.nonzero(batch.labels != IGNORED)
    rows, columns, ids = (xp.asarray(x) for x in (*rows_and_columns, batch.labels[rows_and_columns]))
    log_probs = LogSoftmax()(model.logits(hidden[rows, columns]))[xp.arange(len(ids)), ids]
    totals = scatter(log_probs, (rows,), xp.zeros(len(batch.labels), log_probs.dtype))
    log_ratios = totals - xp.asarray(batch.reference_log_probs, log_probs.dtype)
    margins = (log_ratios[: batch.n_labels] - log_ratios[batch.n_labels :]) * beta
    return -LogSoftmax()(stack([margins, 0 * margins], axis=-1))[:, 0].mean() * factor
