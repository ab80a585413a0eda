"""Loss functions: the truth first, the prediction second, one number out."""

from __future__ import annotations

import numpy as np

from tricycle import kernels
from tricycle.devices import Array, on_gpu
from tricycle.ops import Op, Wanted, as_tensor, check_device, check_range, floating
from tricycle.tensor import Operand, Tensor, record, remembers


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
                rounded to the dtype of the logits.

        Raises:
            ValueError: shapes that do not fit, labels that are not whole numbers in 0..V-1, no label at all.
        """
        labels, logits = as_tensor(labels), as_tensor(logits)
        n_classes = logits.shape[-1] if logits.ndim else 0
        if logits.ndim == 0 or labels.shape != logits.shape[:-1]:
            wanted = f"labels of shape {logits.shape[:-1]} for logits of shape {logits.shape}"
            raise ValueError(f"CrossEntropy: expected {wanted}, got {labels.shape}")
        if labels.dtype.kind not in "iu":
            raise ValueError(f"CrossEntropy: expected whole numbers (dtype=int) as labels, got {labels.dtype}")
        check_device("CrossEntropy", labels.array, logits.array)
        rows = floating(logits.array).reshape(-1, n_classes)
        ids = labels.array.reshape(-1)
        xp = logits.xp
        counted = xp.ones(ids.shape, bool) if self.ignore_index is None else ids != self.ignore_index
        ids = xp.where(counted, ids, 0)
        check_range("CrossEntropy: labels", ids, n_classes)
        n_counted = counted.sum()
        if not on_gpu(ids) and n_counted == 0:
            raise ValueError(f"CrossEntropy: expected at least one label to count, got none of shape {labels.shape}")
        wide = np.float32 if rows.dtype.itemsize == 2 else rows.dtype  # 16 bits cannot count far
        weights = counted.astype(wide) * (scale / n_counted.astype(wide))
        arguments = rows, ids, weights, self.label_smoothing
        if not remembers(logits):
            return record(kernels.cross_entropy(*arguments), (logits,), None, "cross_entropy", False)
        loss, slope = kernels.cross_entropy_with_slope(*arguments)

        def backward(grad: Array, wanted: Wanted) -> tuple[Array]:
            # the usual 1 needs no pass over a large array; on a GPU to look would wait for it
            is_one = not on_gpu(grad) and grad == 1
            dlogits = slope if is_one else kernels.multiply(slope, grad)
            return (dlogits.reshape(logits.shape),)

        return record(loss, (logits,), backward, "cross_entropy", False)


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

        def backward(grad: Array, wanted: Wanted) -> tuple[Array | None, Array]:
            to_pred = scale * grad * difference
            return (-to_pred if wanted[0] else None), to_pred

        return record(loss, (y_true, y_pred), backward, "mean_squared_error", False)
