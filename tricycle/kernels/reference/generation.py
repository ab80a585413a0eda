"""What a model computes between the matrix products of a token, when it writes and nobody asks for gradients.

There is so little to do that what counts is how many calls it takes.

Shapes: R rows, C channels; H heads of queries, K heads of keys and values, D head size, S tokens so far.
"""

from __future__ import annotations

import numpy as np

from tricycle.kernels.dispatch import kernel
from tricycle.kernels.reference.widening import wide, widening


@kernel
@widening(1)
def normalise(x: np.ndarray, gain: np.ndarray | None, bias: np.ndarray | None, eps: float, centred: bool) -> np.ndarray:
    """The rows (..., C) divided by their root mean square (Zhang and Sennrich 2019), then times gain plus bias (C,).

    Args:
        centred: the mean is taken away first, which makes it a layer norm (Ba et al. 2016).
    """
    size = x.shape[-1]
    if centred:
        x = x - np.add.reduce(x, -1, keepdims=True) / size
    scale = np.vecdot(x, x)[..., None]
    scale /= size
    scale += eps
    np.sqrt(scale, out=scale)
    y: np.ndarray = x / scale
    if gain is not None:
        y *= gain
    if bias is not None:
        y += bias
    return y


@kernel
@widening(1)
def gated_swish(x: np.ndarray) -> np.ndarray:
    """a b / (1 + exp(-b)) for rows (R, 2 C) of a and b side by side (SwiGLU, Shazeer 2020)."""
    half = x.shape[-1] // 2
    b = x[..., half:]
    gate = np.exp(-b)
    gate += 1
    y: np.ndarray = x[..., :half] * (b / gate)
    return y


@kernel
def turn(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Turn the pairs (i, i + D / 2) of heads (R, H, D) by an angle for each row, in place (Su et al. 2021, RoFormer).

    Args:
        cos, sin: (R, n), of the first 2 n channels of each head; the others stay.
    """
    n_pairs = cos.shape[1]
    first, second = heads[..., :n_pairs], heads[..., n_pairs : 2 * n_pairs]
    cos, sin = cos[:, None], sin[:, None]
    crossed = second * sin, first * sin
    first *= cos
    first -= crossed[0]
    second *= cos
    second += crossed[1]


@kernel
@widening(1)
def attend_one(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, cap: float | None, nothing: bool
) -> np.ndarray:
    """(H, D): what one query (H, D) makes of keys and values (S, K, D), which may have 16 bits.

    Args:
        scale: of the scores.
        cap: scores go through cap tanh(score / cap).
        nothing: one more score, of 0, takes its part of the weights (`softmax1`).
    """
    keys = wide(keys)
    queries = q.reshape(keys.shape[1], -1, q.shape[1])
    products = keys.swapaxes(0, 1) @ queries.swapaxes(1, 2)  # (K, S, H / K): BLAS is slower the other way round
    weights = np.multiply(products.swapaxes(1, 2), scale, order="C")
    if cap is not None:
        weights /= cap
        np.tanh(weights, out=weights)
        weights *= cap
    largest = np.maximum.reduce(weights, -1, keepdims=True)
    if nothing:
        np.maximum(largest, 0, out=largest)
    weights -= largest
    np.exp(weights, out=weights)
    total = np.add.reduce(weights, -1, keepdims=True)
    if nothing:
        total += np.exp(-largest)
    mixed: np.ndarray = weights @ wide(values).swapaxes(0, 1)
    mixed /= total
    return mixed.reshape(q.shape)
