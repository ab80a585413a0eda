"""Temperatures fitted to costs."""

import numpy as np
import pytest

from tricycle.functions import Softmax
from tricycle.softmaxes import AdaptiveSoftmax
from tricycle_lab.temperature import fit_adaptive_temperature


def test_fitting_finds_a_known_polynomial(rng):
    """Costs that are lowest at a beta that is a parabola of the entropy, with noise in each row."""
    scores = [3 * rng.random() * rng.standard_normal((400, n)) for n in (4, 16, 64, 256)]
    coefficients = (0.25, -0.5, 2.0)
    entropy = [AdaptiveSoftmax().inverse_temperature(array)[-1] for array in scores]
    betas = np.linspace(1, 12, 111)

    weights_at = [[Softmax()(array * beta).array for beta in betas] for array in scores]

    def costs(i, weights):
        tried = betas[np.argmin([np.abs(at - weights).max() for at in weights_at[i]])]
        best = np.polyval(coefficients, entropy[i][:, 0])
        return np.log(tried / best) ** 2 + 0.01 * rng.random(len(weights))

    found = fit_adaptive_temperature(scores, costs, betas, degree=2)
    at = np.linspace(0.5, 5, 10)
    np.testing.assert_allclose(np.polyval(found, at), np.polyval(coefficients, at), rtol=0.1)


def test_too_few_rows():
    with pytest.raises(ValueError, match=r"fit_adaptive_temperature: .*20 rows.*0\.5.*5 bins"):
        fit_adaptive_temperature([np.ones((3, 4))], lambda i, weights: weights[:, 0])
