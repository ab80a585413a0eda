"""Softmax and its kin, over the last axis."""

from __future__ import annotations

import numpy as np

from tricycle.devices import Array, array_module
from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import widening


@kernel
@widening(1)
def softmax(x: Array) -> Array:
    """exp(x_i) / sum_j exp(x_j). A row that is -inf everywhere gives zeros."""
    return _normalised_exp(x, attend_nothing=False)


@kernel
@widening(1)
def softmax1(x: Array) -> Array:
    """exp(x_i) / (1 + sum_j exp(x_j)) (Miller 2023, "Attention is off by one")."""
    return _normalised_exp(x, attend_nothing=True)


def _normalised_exp(x: Array, attend_nothing: bool) -> Array:
    xp = array_module(x)
    if not x.size:
        return x.copy()
    shift = x.max(axis=-1, keepdims=True)
    if attend_nothing:  # the "1 +" is one more score of 0
        shift = xp.maximum(shift, 0)
    shift = xp.where(xp.isneginf(shift), xp.zeros_like(shift), shift)
    with np.errstate(over="ignore"):  # scores that lie further apart than the dtype reaches give 0, as they should
        y = xp.exp(x - shift)
    total = y.sum(axis=-1, keepdims=True)
    if attend_nothing:
        total += xp.exp(-shift)
    return y / xp.where(total == 0, xp.ones_like(total), total)


@kernel
@widening(1)
def softmax_backward(grad: Array, y: Array) -> Array:
    """The gradient of x for y = softmax(x), and for softmax1 too: both have dy_i/dx_j = y_i (delta_ij - y_j)."""
    return y * (grad - (grad * y).sum(axis=-1, keepdims=True))


@kernel
@widening(1)
def log_softmax(x: Array) -> Array:
    xp = array_module(x)
    if not x.size:
        return x.copy()
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
