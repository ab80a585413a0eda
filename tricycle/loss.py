"""Loss functions: each takes the target first and the prediction second, and returns a scalar."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tricycle import kernels
from tricycle.autograd import NeedsGrad, grad_enabled_for
from tricycle.devices import Array, array_module, on_gpu, one
from tricycle.ops import Op, as_floating, as_tensor, as_tensors, check_device, check_range
from tricycle.tensor import Operand, Tensor, record


class CrossEntropy(Op):
    """The cross-entropy loss: the mean of -log softmax(logits)[label] over all positions, in nats.

    Args:
        ignore_index: positions with this label are excluded from the mean.
        label_smoothing: this fraction of the target is spread evenly over all labels (Szegedy et al. 2016, section 7).
    """

    from_hidden: Callable[..., Tensor]  # defined in `tricycle.losses`: computes logits in chunks

    def __init__(self, ignore_index: int | None = None, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"CrossEntropy: expected label_smoothing from 0 to below 1, got {label_smoothing!r}")
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, labels: Operand, logits: Operand, scale: Array | float = 1.0) -> Tensor:
        """Return `scale` * mean cross-entropy in nats of labels (...), logits (..., V); ValueError if no label counts.

        Args:
            scale: multiplies the loss, and its gradient before rounding to the dtype of the logits: a number, a 0-d
                array on their device, or an array (...) with a weight for each label.
        """
        logits = as_tensor(logits)
        return self._weighted_sum(logits, *self.rows_labels_and_weights(as_tensor(labels), logits, "logits", scale))

    def rows_labels_and_weights(
        self, labels: Tensor, x: Tensor, x_name: str, scale: Array | float
    ) -> tuple[Array, Array, Array]:
        """Return rows of x (N, V), labels (N,), weights (N,), scale / n_counted; both 0 if ignored; else ValueError."""
        if x.ndim == 0 or labels.shape != x.shape[:-1]:
            expected = f"labels of shape {x.shape[:-1]} for {x_name} of shape {x.shape}"
            raise ValueError(f"CrossEntropy: expected {expected}, got {labels.shape}")
        check_device("CrossEntropy", labels.array, x.array)
        if labels.dtype.kind not in "iu":
            raise ValueError(f"CrossEntropy: expected whole numbers (dtype=int) as labels, got {labels.dtype}")
        rows, ids, xp = as_floating(x.array).reshape(-1, x.shape[-1]), labels.array.reshape(-1), labels.xp
        wide = np.float32 if rows.dtype.itemsize == 2 else rows.dtype.type  # 16-bit floats cannot hold large counts
        scale = scale if isinstance(scale, float) or not np.ndim(scale) else scale.reshape(-1)
        counted = None if self.ignore_index is None else ids != self.ignore_index
        n_counted = ids.size if counted is None else counted.sum()
        if not on_gpu(ids) and n_counted == 0:
            raise ValueError(f"CrossEntropy: expected at least one label to count, got none of shape {labels.shape}")
        if counted is not None:
            return rows, xp.where(counted, ids, 0), counted.astype(wide) * (scale / n_counted.astype(wide))
        weight = scale / wide(n_counted)
        return rows, ids, xp.full(ids.shape, weight) if isinstance(scale, float) else xp.ones(ids.shape, wide) * weight

    def _weighted_sum(self, logits: Tensor, rows: Array, ids: Array, weights: Array) -> Tensor:
        """Return the weighted sum of the losses of all rows, a 0-d Tensor; ValueError for labels out of range."""
        check_range("CrossEntropy: labels", ids, rows.shape[-1])
        loss, slope = kernels.cross_entropy(rows, ids, weights, self.label_smoothing, grad_enabled_for(logits))

        def backward(grad: Array, needs_grad: NeedsGrad, *target: object) -> tuple[Array]:
            return (scale_gradient(slope, grad).reshape(logits.shape),)

        return record(loss, (logits,), backward, "cross_entropy", False, (ids, weights, self.label_smoothing))


def scale_gradient(array: Array, grad: Array) -> Array:
    """Return array * grad (0-d); the array itself if grad is the shared array 1 that `Tensor.backward` begins with."""
    return array if grad is one(array_module(grad), str(grad.device), grad.dtype) else kernels.multiply(array, grad)


class MeanSquaredError(Op):
    """The mean of (y_true - y_pred)^2 over all elements; both must have the same shape."""

    def forward(self, y_true: Operand, y_pred: Operand) -> Tensor:
        """Return the 0-d mean of (y_true - y_pred)^2 over all elements; ValueError for unequal or empty shapes."""
        y_true, y_pred = as_tensors(y_true, y_pred)
        if y_true.shape != y_pred.shape:
            raise ValueError(f"MeanSquaredError: expected two equal shapes, got {y_true.shape} and {y_pred.shape}")
        if y_pred.size == 0:
            raise ValueError(f"MeanSquaredError: expected at least one element, got shape {y_pred.shape}")
        check_device("MeanSquaredError", y_true.array, y_pred.array)
        difference = as_floating(y_pred.array) - as_floating(y_true.array)
        wide, scale = kernels.upcast(difference), 2 / difference.size

        def backward(grad: Array, needs_grad: NeedsGrad) -> tuple[Array | None, Array]:
            to_pred = scale * kernels.upcast(grad) * wide
            return (-to_pred if needs_grad[0] else None), to_pred

        loss = (wide * wide).mean().astype(difference.dtype)
        return record(loss, (y_true, y_pred), backward, "mean_squared_error", False)
