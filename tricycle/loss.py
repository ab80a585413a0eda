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

    Raises:
        ValueError: a share below 0, or 1 and above.
    """

    def __init__(self, ignore_index: int | None = None, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"CrossEntropy: expected label_smoothing from 0 to below 1, got {label_smoothing!r}")
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, labels: Operand, logits: Operand, scale: Array | float = 1.0) -> Tensor:
        """
        Args:
            labels: whole numbers of shape (...).
            logits: (..., V).
            scale: the loss is multiplied by it, a number or a 0-d array on its device; and its gradient, before that is
                rounded to the dtype of the logits. An array of shape (...) weighs each label by itself.

        Raises:
            ValueError: shapes that do not fit, labels that are not whole numbers in 0..V-1, no label at all.
        """
        labels, logits = as_tensor(labels), as_tensor(logits)
        n_classes = logits.shape[-1] if logits.ndim else 0
        if logits.ndim == 0 or labels.shape != logits.shape[:-1]:
            wanted = f"labels of shape {logits.shape[:-1]} for logits of shape {logits.shape}"
            raise ValueError(f"CrossEntropy: expected {wanted}, got {labels.shape}")
        check_device("CrossEntropy", labels.array, logits.array)
        rows = floating(logits.array).reshape(-1, n_classes)
        ids, weights = self._weighed(labels, rows.dtype, scale)
        return self._weighted_sum(logits, rows, ids, weights)

    def _weighed(self, labels: Tensor, dtype: np.dtype, scale: Array | float) -> tuple[Array, Array]:
        """The labels in a row, those that do not count as 0; and what each weighs, where logits have that dtype."""
        if labels.dtype.kind not in "iu":
            raise ValueError(f"CrossEntropy: expected whole numbers (dtype=int) as labels, got {labels.dtype}")
        ids = labels.array.reshape(-1)
        xp = labels.xp
        wide = np.float32 if dtype.itemsize == 2 else dtype.type  # 16 bits cannot count far
        if not isinstance(scale, float) and np.ndim(scale):
            scale = scale.reshape(-1)
        counted = None if self.ignore_index is None else ids != self.ignore_index
        n_counted = ids.size if counted is None else counted.sum()
        if not on_gpu(ids) and n_counted == 0:
            raise ValueError(f"CrossEntropy: expected at least one label to count, got none of shape {labels.shape}")
        if counted is None:
            weight = scale / wide(n_counted)
            return ids, xp.full(ids.shape, weight) if isinstance(scale, float) else xp.ones(ids.shape, wide) * weight
        return xp.where(counted, ids, 0), counted.astype(wide) * (scale / n_counted.astype(wide))

    def _weighted_sum(self, logits: Tensor, rows: Array, ids: Array, weights: Array) -> Tensor:
        """Return the weighted sum of the losses of all rows of logits."""
        check_range("CrossEntropy: labels", ids, rows.shape[-1])
        arguments = rows, ids, weights, self.label_smoothing
        if not grad_enabled_for(logits):
            return record(kernels.cross_entropy(*arguments), (logits,), None, "cross_entropy", False)
        loss, slope = kernels.cross_entropy_with_slope(*arguments)

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array]:
            return (_times(slope, grad).reshape(logits.shape),)

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

        While the logits of some rows are at hand, their gradients are computed too, for a loss is a number, and its own
        gradient nearly always 1; the backward pass only hands them on. So one more matrix like the head's weights is
        kept until then, if these want a gradient. What does not count is left out altogether.

        Source: the same is known from Hsu et al. 2024, "Liger kernel", section 3.2.

        Args:
            labels: whole numbers of shape (...).
            hidden: (..., C), in host memory.
            head: gives logits (N, V) of hidden states (N, C), each row by itself.
            parameters: those that the head has.
            n_rows: the most rows whose logits exist at a time.

        Raises:
            ValueError: as of `forward`; `n_rows` below 1.
        """
        labels, hidden = as_tensor(labels), as_tensor(hidden)
        if hidden.ndim == 0 or labels.shape != hidden.shape[:-1]:
            wanted = f"labels of shape {hidden.shape[:-1]} for hidden states of shape {hidden.shape}"
            raise ValueError(f"CrossEntropy: expected {wanted}, got {labels.shape}")
        check_device("CrossEntropy", labels.array, hidden.array)
        positive("CrossEntropy.of_head", n_rows=n_rows)
        rows = floating(hidden.array).reshape(-1, hidden.shape[-1])
        ids, weights = self._weighed(labels, rows.dtype, scale)
        inputs = (hidden, *(parameter for parameter in parameters if parameter.requires_grad))
        sums = _Sums(rows, inputs) if grad_enabled_for(*inputs) else None
        total: Any = 0
        for places in _pieces(weights, n_rows):
            some = Tensor(rows[places], sums is not None and hidden.requires_grad)
            logits = head(some)
            loss = self._weighted_sum(logits, floating(logits.array), ids[places], weights[places])
            del logits
            total = total + loss.array
            if sums is not None:
                sums.add(loss, some, places)
        backward = None if sums is None else sums.backward
        return record(weights.dtype.type(total), inputs, backward, "cross_entropy", False)


class _Sums:
    """The gradients of a head's input and parameters, summed up over groups of rows."""

    def __init__(self, rows: Array, inputs: tuple[Tensor, ...]) -> None:
        self.shape = inputs[0].shape
        self.parameters = inputs[1:]
        self.of_rows = np.zeros_like(rows) if inputs[0].requires_grad else None
        self.of_parameters: list[Array | None] = [None for _ in self.parameters]

    def add(self, loss: Tensor, rows: Tensor, places: Any) -> None:
        to_rows, *to_parameters = gradients_of(loss, np.ones_like(loss.array), [rows, *self.parameters])
        if self.of_rows is not None and to_rows is not None:
            self.of_rows[places] = to_rows
        for i, new in enumerate(to_parameters):
            held = self.of_parameters[i]
            if held is None and new is not None:  # is added to, so it shares memory with nothing else
                self.of_parameters[i] = new if new.flags.owndata and new is not to_rows else new.copy()
            elif held is not None and new is not None:
                held += new

    def backward(self, grad: Array, needs_grad: NeedsGrad) -> list[Array | None]:
        to_rows = None if self.of_rows is None else _times(self.of_rows, grad).reshape(self.shape)
        return [to_rows, *(None if array is None else _times(array, grad) for array in self.of_parameters)]


def _pieces(weights: Array, n_rows: int) -> Iterator[Any]:
    """Yield indices of the rows that count, in groups of at most `n_rows` and about equal size."""
    places = np.flatnonzero(weights)
    n_pieces = -(-len(places) // n_rows)
    for i in range(n_pieces):
        some = places[i * len(places) // n_pieces : (i + 1) * len(places) // n_pieces]
        whole = some[-1] - some[0] == len(some) - 1
        yield slice(some[0], some[-1] + 1) if whole else some


def _times(array: Array, grad: Array) -> Array:
    """Multiply by a 0-d gradient; the usual 1 needs no pass over a large array (a check on a GPU would wait for it)."""
    return array if not on_gpu(grad) and grad == 1 else kernels.multiply(array, grad)


class MeanSquaredError(Op):
    """The mean of (y_true - y_pred)^2 over everything."""

    def forward(self, y_true: Operand, y_pred: Operand) -> Tensor:
        """Two Tensors of one shape.

        Raises:
            ValueError: the shapes differ (broadcasting here is a mistake more often than a wish).
        """
        y_pred = as_tensor(y_pred)
        y_true = as_tensor(y_true, y_pred)
        if y_true.shape != y_pred.shape:
            raise ValueError(f"MeanSquaredError: expected two equal shapes, got {y_true.shape} and {y_pred.shape}")
        if y_pred.size == 0:
            raise ValueError(f"MeanSquaredError: expected at least one element, got shape {y_pred.shape}")
        check_device("MeanSquaredError", y_true.array, y_pred.array)
        difference = floating(y_pred.array) - floating(y_true.array)
        loss = (difference * difference).mean()
        scale = 2 / difference.size

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, Array]:
            to_pred = scale * grad * difference
            return (-to_pred if needs_grad[0] else None), to_pred

        return record(loss, (y_true, y_pred), backward, "mean_squared_error", False)
