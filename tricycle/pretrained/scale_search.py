"""Searches for the scales of quantized blocks that minimize the weighted squared error.

Each search rounds the values with several scales. For the integers q of each, the scale that minimizes the error has a
closed form (weighted least squares). The scale with the smallest error of all wins.

Arrays are (values of a block, N blocks), because NumPy adds up along the first axis faster than along a short last one.
(Source of the method: `make_qkx3_quants`, `make_qx_quants` and `make_qp_quants` of llama.cpp's `ggml-quants.c`.)
"""

from __future__ import annotations

import numpy as np

# Added to the number of steps of the range, before its values are rounded; first none.
_STEPS = np.concatenate([[0], np.linspace(-1, -0.1, 10), np.linspace(0.1, 1, 10)])
_MIN_DETERMINANT = 1e-5  # relative; smaller ones, of a single value with a weight, consist of rounding errors
_COMMON_STEPS = np.linspace(-4, 4, 41)
_SIGNED_STEPS = np.linspace(-0.9, 0.9, 19)


def search_scale_and_minimum(x: np.ndarray, weights: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scales >= 0, minima <= 0 (N,): scale q + minimum nearly fits x (size, N) best, q from 0 to `largest`.

    Args:
        x: float32 (values, N), finite and not near the limits of float32.
        weights: of the squared errors, >= 0, as x.
        largest: the largest q.
    """
    low = np.minimum(x.min(axis=0), 0)
    span = x.max(axis=0) - low
    y = x - low  # the errors are computed in y, whose sums lose no digits to a large minimum
    weighted = weights * y
    sum_w, sum_y = weights.sum(axis=0), weighted.sum(axis=0)
    scale, offset = span / largest, np.zeros_like(span)
    best = np.full_like(span, np.inf)
    for step in _STEPS:
        # The range from the best minimum so far to the largest value is divided into `largest + step` parts.
        inverse = _divide(np.float32(largest + step), span - offset)
        q = np.subtract(y, offset)
        q *= inverse
        np.clip(np.rint(q, out=q), 0, largest, out=q)
        products = weights * q
        sum_q, sum_qq, sum_qy = products.sum(axis=0), _sum_products(products, q), _sum_products(q, weighted)
        determinant = sum_w * sum_qq - sum_q * sum_q
        new_scale = _divide(sum_w * sum_qy - sum_y * sum_q, determinant)
        new_offset = _divide(sum_qq * sum_y - sum_q * sum_qy, determinant)
        is_positive = new_offset > -low  # a minimum above 0 cannot be stored, the best one is then 0
        np.copyto(new_scale, _divide(sum_qy + low * sum_q, sum_qq), where=is_positive)
        np.copyto(new_offset, -low, where=is_positive)
        error = new_scale * (new_scale * sum_qq + 2 * new_offset * sum_q - 2 * sum_qy)
        error += new_offset * (new_offset * sum_w - 2 * sum_y)
        is_better = (error < best) & (determinant > _MIN_DETERMINANT * sum_w * sum_qq) & (new_scale >= 0)
        for current, new in ((best, error), (scale, new_scale), (offset, new_offset)):
            np.copyto(current, new, where=is_better)
    return scale, low + offset


def search_signed_scale(x: np.ndarray, weights: np.ndarray, n_negative: int) -> np.ndarray:
    """Return signed scales (N,): scale q is closest to x (size, N), q from -n_negative to n_negative - 1.

    The value with the largest magnitude becomes about -n_negative times the scale, which then has the opposite sign.

    Args:
        x: float32 (values, N), finite and not near the limits of float32.
        weights: of the squared errors, >= 0, as x.
        n_negative: the number of negative integers.
    """
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    inverse = _divide(1, extreme)
    weighted = weights * x
    scale = extreme / -n_negative
    best = np.zeros_like(scale)
    for step in _SIGNED_STEPS:
        q = np.rint(x * (-(n_negative + step) * inverse).astype(np.float32))
        np.clip(q, -n_negative, n_negative - 1, out=q)
        sum_qx, sum_qq = _sum_products(q, weighted), _sum_products(q * q, weights)
        new_scale = _divide(sum_qx, sum_qq)
        reduction = new_scale * sum_qx  # of the error, compared with a scale of 0
        is_better = reduction > best
        np.copyto(best, reduction, where=is_better)
        np.copyto(scale, new_scale, where=is_better)
    return scale


def search_common_scale(x: np.ndarray, weights: np.ndarray, largest: int) -> np.ndarray:
    """Return scales (N,): scale q is closest to x >= 0, (size, N), with integers q from 0 to `largest`.

    Args:
        x: float32 (values, N), the scales of the parts of a block.
        weights: of the squared errors, >= 0, as x.
        largest: the largest q.
    """
    inverse = _divide(1, x.max(axis=0))
    weighted = weights * x
    scale = x.max(axis=0) / largest
    best = np.zeros_like(scale)
    for step in _COMMON_STEPS:
        q = np.minimum(np.rint(x * (np.float32(largest + step) * inverse)), largest)
        sum_qx, sum_qq = _sum_products(q, weighted), _sum_products(q * q, weights)
        new_scale = _divide(sum_qx, sum_qq)
        is_better = new_scale * sum_qx > best
        np.copyto(best, new_scale * sum_qx, where=is_better)
        np.copyto(scale, new_scale, where=is_better)
    return scale


def _sum_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the sums (N,) over axis 0 of the elementwise products of two arrays (size, N)."""
    return np.einsum("in,in->n", a, b)


def _divide(a: np.ndarray | np.floating | float, b: np.ndarray) -> np.ndarray:
    """Return a / b in float32, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(b), where=b != 0)
