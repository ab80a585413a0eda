"""A temperature for `AdaptiveSoftmax`, fitted to a model's own scores."""

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
    """Coefficients for `AdaptiveSoftmax`, from data: the polynomial from a row's entropy to the best beta.

    Rows of like entropy, above the threshold, go into bins of like size; in each bin the beta of the lowest mean cost
    is looked up among `betas`, and the polynomial is fitted to these by least squares.

    Args:
        scores: arrays (N, S) on the host, S may differ between them.
        costs: from the number of an array in `scores` and weights (N, S) in its place to the cost of each row (N,),
            such as the loss of the model with these weights.
        betas: inverse temperatures to try, 1 to 12 unless given.
        degree: of the polynomial, which is worth nothing outside the entropies that it was fitted to.
        threshold: the entropy above which the polynomial will be used.

    Raises:
        ValueError: fewer such rows than bins, or fewer bins than coefficients.
    """
    tried = np.geomspace(1, 12, 40) if betas is None else np.asarray(betas, float)
    softmax, entropies, expected_costs = AdaptiveSoftmax(), [], []
    for i, array in enumerate(scores):
        entropies.append(softmax.inverse_temperature(array)[-1][:, 0])
        expected_costs.append(
            np.stack([costs(i, kernels.softmax(array * array.dtype.type(beta))) for beta in tried], axis=-1)
        )
    used = [values > threshold for values in entropies]
    if not sum(rows.sum() for rows in used) >= n_bins > degree:
        wanted = f"{n_bins} rows with an entropy above {threshold} and {degree + 1} bins"
        raise ValueError(f"fit_adaptive_temperature: expected at least {wanted}")
    entropy, cost = (
        np.concatenate([a[rows] for a, rows in zip(arrays, used)]) for arrays in (entropies, expected_costs)
    )
    bins = np.array_split(np.argsort(entropy), n_bins)
    centres = [entropy[rows].mean() for rows in bins]
    best = [tried[cost[rows].mean(axis=0).argmin()] for rows in bins]
    return tuple(float(c) for c in np.polyfit(centres, best, degree))
