"""The fused linear cross-entropy: the logits are computed in chunks of rows, and never stored in full.

`from_hidden` becomes a method of `CrossEntropy`; `GPT` uses it in training on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from tricycle.autograd import NeedsGrad, OwnedGradient, grad_enabled_for
from tricycle.create_graph import unfused
from tricycle.devices import Array, one, owns_memory
from tricycle.loss import CrossEntropy, scale_gradient
from tricycle.ops import as_floating, as_tensor, check_positive, reshape
from tricycle.tensor import Operand, Tensor, record
from tricycle.tensor_methods import leaf_gradients


def from_hidden(
    loss_fn: CrossEntropy,
    labels: Operand,
    hidden: Operand,
    head: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    n_rows: int,
    scale: Array | float = 1.0,
) -> Tensor:
    """Return the cross-entropy of `head(hidden)`, and compute its gradients, by chunks of rows, to save memory.

    The gradients are computed together with the loss of each chunk; the backward pass only multiplies them by the
    gradient of the loss, which is nearly always 1. So one more array for each parameter is stored until then. Rows with
    ignored labels are skipped.

    Source: Hsu et al. 2024, "Liger kernel", section 3.2.

    Args:
        labels: integers (...).
        hidden: (..., C), in host memory.
        head: a function from hidden states (N, C) to logits (N, V), independent for each row.
        parameters: of the head.
        n_rows: the number of rows of a chunk.

    Raises:
        ValueError: see `CrossEntropy`; or `n_rows` is below 1.
    """
    check_positive("CrossEntropy.from_hidden", n_rows=n_rows)
    hidden = as_tensor(hidden)
    rows, ids, weights = loss_fn.rows_labels_and_weights(as_tensor(labels), hidden, "hidden states", scale)
    inputs = (hidden, *(parameter for parameter in parameters if parameter.requires_grad))
    learns = grad_enabled_for(*inputs)
    to_rows = np.zeros_like(rows) if learns and hidden.requires_grad else None
    sums: list[Array | None] = [None for _ in inputs[1:]]

    def add(loss: Tensor, some: Tensor, places: Any) -> None:
        to_some, *new = leaf_gradients(loss, one(np, str(loss.array.device), loss.dtype), [some, *inputs[1:]])
        if to_rows is not None and to_some is not None:
            to_rows[places] = to_some
        sums[:] = [_add(held, more, to_some) for held, more in zip(sums, new)]

    total: Any = 0
    for places in _groups(weights, n_rows):
        some = Tensor(rows[places], to_rows is not None)
        logits = head(some)
        loss = loss_fn._weighted_sum(logits, as_floating(logits.array), ids[places], weights[places])
        del logits
        total = total + loss.array
        if learns:
            add(loss, some, places)

    def backward(grad: Array, needs_grad: NeedsGrad, *operands: Any) -> list[OwnedGradient | None]:
        whole = None if to_rows is None else to_rows.reshape(hidden.shape)
        return [None if array is None else OwnedGradient(scale_gradient(array, grad)) for array in (whole, *sums)]

    operands = (loss_fn, head, ids, weights)
    return record(weights.dtype.type(total), inputs, backward, "cross_entropy", False, operands)


@unfused("tricycle.losses.from_hidden", closure=True)
def _from_hidden(node: Tensor, variables: Any) -> Tensor:
    """Recompute a fused loss from its node's operands as differentiable operations, with all logits at once."""
    (hidden, *_), (loss_fn, head, ids, weights) = node.args, node._saved
    logits = head(reshape(hidden, -1, hidden.shape[-1]))
    loss: Tensor = loss_fn._weighted_sum(logits, as_floating(logits.array), ids, weights)
    return loss


def _groups(weights: Array, n_rows: int) -> Iterator[Any]:
    """Yield indices (a slice or array) of the rows of nonzero weight, in groups of at most `n_rows`, about equal."""
    places = np.flatnonzero(weights)
    n_groups = -(-len(places) // n_rows)
    for i in range(n_groups):
        some = places[i * len(places) // n_groups : (i + 1) * len(places) // n_groups]
        whole = some[-1] - some[0] == len(some) - 1
        yield slice(some[0], some[-1] + 1) if whole else some


def _add(held: Array | None, new: Array | None, other: Array | None) -> Array | None:
    """Return held + new, added to `held` in place; None counts as 0; copy a first `new` that shares memory."""
    if held is None:
        return new if new is None or (owns_memory(new) and new is not other) else new.copy()
    if new is not None:
        held += new
    return held


CrossEntropy.from_hidden = from_hidden
