"""Cross-entropy, and its derivative."""

from __future__ import annotations

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import wide


@kernel
def cross_entropy(logits: Array, labels: Array, weights: Array, smoothing: float = 0.0) -> Array:
    """Sum over rows of weight * -log softmax(logits)[label], a 0-d array.

    Args:
        logits: (N, V).
        labels: (N,) whole numbers in 0..V-1.
        weights: (N,), 0 for rows that do not count.
        smoothing: the share of a row's weight that all labels have in common.
    """
    return cross_entropy_with_slope.plain(logits, labels, weights, smoothing)[0]


@kernel
def cross_entropy_with_slope(
    logits: Array, labels: Array, weights: Array, smoothing: float = 0.0
) -> tuple[Array, Array]:
    """The same, and its derivative by the logits (N, V): both need the same exponentials."""
    xp = array_module(logits)
    dtype = logits.dtype
    logits = wide(logits)
    places = xp.arange(len(labels)), labels
    shifted = logits - logits.max(axis=-1, keepdims=True)
    slope = xp.exp(shifted)
    total = slope.sum(axis=-1)
    truth = shifted[places]
    if smoothing:
        truth = (1 - smoothing) * truth + smoothing * shifted.mean(axis=-1)
    # where, for a row that does not count may cost infinitely much, and 0 times that is not 0
    costs = xp.where(weights == 0, 0, xp.log(total) - truth)
    slope *= (weights / total)[:, None]
    if smoothing:
        slope -= (weights * (smoothing / logits.shape[1]))[:, None]
    slope[places] -= weights * (1 - smoothing)
    return (costs * weights).sum(), slope.astype(dtype, copy=False)
