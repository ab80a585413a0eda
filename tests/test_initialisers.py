"""Initialization of weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tricycle.initialisers import Initialiser, normal, xavier, zeros


@pytest.mark.parametrize("initialiser", [zeros, xavier, normal(0.02)], ids=["zeros", "xavier", "normal"])
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (5,)], ids=str)
def test_initialisers_give_shape_dtype_and_follow_the_seed(initialiser: Initialiser, shape: tuple[int, ...]) -> None:
    values = initialiser(shape, np.random.default_rng(1))
    assert values.shape == shape and values.dtype == np.float32
    assert np.array_equal(values, initialiser(shape, np.random.default_rng(1)))
    if initialiser is zeros:
        assert not values.any()
    else:
        assert not np.array_equal(values, initialiser(shape, np.random.default_rng(2)))


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_normal_has_mean_0_and_the_given_std(std: float) -> None:
    values = normal(std)((300, 300), np.random.default_rng(0)).astype(np.float64)
    assert abs(values.mean()) < 5 * std / 300
    assert values.std() == pytest.approx(std, rel=0.02)
    # a normal distribution: about 68.3% within one deviation, 4.55% beyond two
    assert (abs(values) < std).mean() == pytest.approx(0.683, abs=0.01)
    assert (abs(values) > 2 * std).mean() == pytest.approx(0.0455, abs=0.005)


@pytest.mark.parametrize("shape", [(200, 300), (100, 900)], ids=str)
def test_xavier_is_uniform_over_its_interval(shape: tuple[int, int]) -> None:
    values = xavier(shape, np.random.default_rng(0)).astype(np.float64)
    limit = math.sqrt(6 / sum(shape))
    assert abs(values).max() <= limit * (1 + 1e-6)
    counts, _ = np.histogram(values, bins=10, range=(-limit, limit))
    np.testing.assert_allclose(counts / values.size, 0.1, rtol=0.1)
    # Glorot and Bengio's aim: variance 2 / (inputs + outputs)
    assert values.var() == pytest.approx(2 / sum(shape), rel=0.03)
