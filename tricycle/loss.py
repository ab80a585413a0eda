"""Loss functions: the truth first, the prediction second, one number out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad, grad_enabled_for, gradients_of
from tricycle.devices import Array, on_gpu
from tricycle.ops import Op, as_tensor, check_device, check_range, floating, positive
from tricycle.tensor import Operand, Tensor, record


class CrossEntropy(Op):
    """The mean of -log softmax(logits)[label] over all positions, in nats.

    Args:
        ignore_index: positions with this label count neither in the loss nor in the mean.
        label_smoothing: this share of the truth is spread evenly over all labels (Szegedy et al. 2016, section 7).
    """

    def __init__(self, ignore_index: int | None = None, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"CrossEntropy: expected label_smoothing from 0 to below 1, got {label_smoothing!r}")
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, labels: Operand, logits: Operand, scale: Array | float = 1.0) -> Tensor:
        """Compute the loss of labels, whole numbers (...), and logits (..., V).

        Args:
            scale: multiplies the loss, and its gradient before that is rounded to the dtype of the logits: a number or
                a 0-d array on their device, or (...), a weight for each label.

        Raises:
            ValueError: shapes that do not fit, labels that are not whole numbers in 0..V-1, no label that counts.
        """
        logits = as_tensor(logits)
        return self._weighted_sum(logits, *self._weighed(as_tensor(labels), logits, "logits", scale))

    def _weighed(self, labels: Tensor, x: Tensor, what: str, scale: Array | float) -> tuple[Array, Array, Array]:
        """Return x as rows (N, V), their labels (N,), 0 where they do not count, and the weight of each, (N,)."""
        if x.ndim == 0 or labels.shape != x.shape[:-1]:
            expected = f"labels of shape {x.shape[:-1]} for {what} of shape {x.shape}"
            raise ValueError(f"CrossEntropy: expected {expected}, got {labels.shape}")
        check_device("CrossEntropy", labels.array, x.array)
        if labels.dtype.kind not in "iu":
            raise ValueError(f"CrossEntropy: expected whole numbers (dtype=int) as labels, got {labels.dtype}")
        rows, ids, xp = floating(x.array).reshape(-1, x.shape[-1]), labels.array.reshape(-1), labels.xp
        wide = np.float32 if rows.dtype.itemsize == 2 else rows.dtype.type  # 16 bits cannot count far
        if not isinstance(scale, float) and np.ndim(scale):
            scale = scale.reshape(-1)
        counted = None if self.ignore_index is None else ids != self.ignore_index
        n_counted = ids.size if counted is None else counted.sum()
        if not on_gpu(ids) and n_counted == 0:
            raise ValueError(f"CrossEntropy: expected at least one label to count, got none of shape {labels.shape}")
        if counted is not None:
            return rows, xp.where(counted, ids, 0), counted.astype(wide) * (scale / n_counted.astype(wide))
        weight = scale / wide(n_counted)
        return rows, ids, xp.full(ids.shape, weight) if isinstance(scale, float) else xp.ones(ids.shape, wide) * weight

    def _weighted_sum(self, logits: Tensor, rows: Array, ids: Array, weights: Array) -> Tensor:
        """Return the weighted sum of the losses of all rows of logits."""
        check_range("CrossEntropy: labels", ids, rows.shape[-1])
        arguments = rows, ids, weights, self.label_smoothing
        if not grad_enabled_for(logits):
            return record(kernels.cross_entropy(*arguments), (logits,), None, "cross_entropy", False)
        loss, slope = kernels.cross_entropy_with_slope(*arguments)
        backward = lambda grad, needs_grad: (_times(slope, grad).reshape(logits.shape),)
        return record(loss, (logits,), backward, "cross_entropy", False)

    def of_head(
        self,
        labels: Operand,
        hidden: Operand,
        head: Callable[[Tensor], Tensor],
        parameters: Iterable[Tensor],
        n_rows: int,
        scale: Array | float = 1.0,
    ) -> Tensor:
        """Compute `forward` of the logits `head(hidden)` for some rows at a time, so that they never exist whole.

        The gradients of some rows are computed while their logits exist; the backward pass only hands them on. One
        array like each parameter is kept for it. Rows that do not count are left out (as in Hsu et al. 2024, "Liger
        kernel", section 3.2).

        Args:
            hidden: (..., C), in host memory.
            head: maps hidden states (N, C) to logits (N, V), each row by itself.
            parameters: of the head.
            n_rows: the most rows whose logits exist at a time.
        """
        positive("CrossEntropy.of_head", n_rows=n_rows)
        hidden = as_tensor(hidden)
        rows, ids, weights = self._weighed(as_tensor(labels), hidden, "hidden states", scale)
        inputs = (hidden, *(parameter for parameter in parameters if parameter.requires_grad))
        learns = grad_enabled_for(*inputs)
        to_rows = np.zeros_like(rows) if learns and hidden.requires_grad else None
        sums: list[Array | None] = [None for _ in inputs[1:]]

        def add(loss: Tensor, some: Tensor, places: Any) -> None:
            to_some, *new = gradients_of(loss, np.ones_like(loss.array), [some, *inputs[1:]])
            if to_rows is not None and to_some is not None:
                to_rows[places] = to_some
            sums[:] = [_add(held, more, to_some) for held, more in zip(sums, new)]

        total: Any = 0
        for places in _groups(weights, n_rows):
            some = Tensor(rows[places], to_rows is not None)
            logits = head(some)
            loss = self._weighted_sum(logits, floating(logits.array), ids[places], weights[places])
            del logits
            total = total + loss.array
            if learns:
                add(loss, some, places)

        def backward(grad: Array, needs_grad: NeedsGrad) -> list[Array | None]:
            whole = None if to_rows is None else to_rows.reshape(hidden.shape)
            return [None if array is None else _times(array, grad) for array in (whole, *sums)]

        return record(weights.dtype.type(total), inputs, backward, "cross_entropy", False)


def _groups(weights: Array, n_rows: int) -> Iterator[Any]:
    """Yield indices of the rows that count, in groups of at most `n_rows` and about equal size."""
    places = np.flatnonzero(weights)
    n_groups = -(-len(places) // n_rows)
    for i in range(n_groups):
        some = places[i * len(places) // n_groups : (i + 1) * len(places) // n_groups]
        whole = some[-1] - some[0] == len(some) - 1
        yield slice(some[0], some[-1] + 1) if whole else some


def _add(held: Array | None, new: Array | None, other: Array | None) -> Array | None:
    """Add a gradient to the sum that is held, in place: memory that is shared with anything else is copied first."""
    if held is None:
        return new if new is None or (new.flags.owndata and new is not other) else new.copy()
    if new is not None:
        held += new
    return held


def _times(array: Array, grad: Array) -> Array:
    """Multiply by a 0-d gradient; the usual 1 needs no pass over a large array (a check on a GPU would wait for it)."""
    return array if not on_gpu(grad) and grad == 1 else kernels.multiply(array, grad)


class MeanSquaredError(Op):
    """The mean of (y_true - y_pred)^2 over everything; two equal shapes, for to broadcast them is mostly a mistake."""

    def forward(self, y_true: Operand, y_pred: Operand) -> Tensor:
        y_pred = as_tensor(y_pred)
        y_true = as_tensor(y_true, y_pred)
        if y_true.shape != y_pred.shape:
            raise ValueError(f"MeanSquaredError: expected two equal shapes, got {y_true.shape} and {y_pred.shape}")
        if y_pred.size == 0:
            raise ValueError(f"MeanSquaredError: expected at least one element, got shape {y_pred.shape}")
        check_device("MeanSquaredError", y_true.array, y_pred.array)
        difference = floating(y_pred.array) - floating(y_true.array)
        loss, scale = (difference * difference).mean(), 2 / difference.size

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, Array]:
            to_pred = scale * grad * difference
            return (-to_pred if needs_grad[0] else None), to_pred

        return record(loss, (y_true, y_pred), backward, "mean_squared_error", False)
