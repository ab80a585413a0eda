"""Fit the temperature polynomial of `AdaptiveSoftmax` to attention scores of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tricycle import kernels
from tricycle.devices import Array
from tricycle.softmaxes import AdaptiveSoftmax


def fit_adaptive_temperature(
    scores: Sequence[Array],
    costs: Callable[[int, Array], Array],
    betas: Sequence[float] | None = None,
    degree: int = 4,
    n_bins: int = 20,
    threshold: float = 0.5,
) -> tuple[float, ...]:
    """Fit a polynomial to each entropy bin's cheapest beta; return it, highest degree first; ValueError with few rows.

    The rows with an entropy above the threshold are sorted by entropy and divided into bins of equal size. For each bin
    the inverse temperature with the lowest mean cost is selected; least squares fits the polynomial to these points.

    Args:
        scores: arrays (N, S) in host memory; S may differ.
        costs: maps the index of an array in `scores` and attention weights (N, S) to a cost for each row (N,), such as
            the loss of the model with these weights.
        betas: the inverse temperatures to try; default: 40 values from 1 to 12.
        degree: of the polynomial. Do not use the result for entropies outside the range of the data.
        n_bins: the number of bins.
        threshold: the entropy above which the polynomial will be used.

    Raises:
        ValueError: fewer such rows than bins, or fewer bins than coefficients.
    """
    candidates = np.geomspace(1, 12, 40) if betas is None else np.asarray(betas, float)
    softmax, entropies, expected_costs = AdaptiveSoftmax(), [], []
    for i, array in enumerate(scores):
        entropies.append(softmax.inverse_temperature(array)[-1][:, 0])
        expected_costs.append(
            np.stack([costs(i, kernels.softmax(array * array.dtype.type(beta))) for beta in candidates], axis=-1)
        )
    used = [values > threshold for values in entropies]
    if not sum(rows.sum() for rows in used) >= n_bins > degree:
        expected = f"{n_bins} rows with an entropy above {threshold} and {degree + 1} bins"
        raise ValueError(f"fit_adaptive_temperature: expected at least {expected}")
    entropy, cost = (
        np.concatenate([a[rows] for a, rows in zip(arrays, used)]) for arrays in (entropies, expected_costs)
    )
    bins = np.array_split(np.argsort(entropy), n_bins)
    centres = [entropy[rows].mean() for rows in bins]
    best = [candidates[cost[rows].mean(axis=0).argmin()] for rows in bins]
    return tuple(float(c) for c in np.polyfit(centres, best, degree))
