"""The searches for block scales, against a fine grid of scales, and their constraints."""

import numpy as np
import pytest

from tricycle.pretrained.scale_search import search_common_scale, search_scale_and_minimum, search_signed_scale


def blocks(seed: int = 0, offset: float = 0.0, n_values: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Return values and weights, (n_values, 200)."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n_values, 200)) + offset
    return values.astype(np.float32), rng.gamma(0.5, 1, (n_values, 200)).astype(np.float32)


def error(x: np.ndarray, weights: np.ndarray, scale: np.ndarray, low: int, high: int, minimum=0.0) -> np.ndarray:
    """Return the weighted squared error of each block, (N,), with the best integers for a scale and a minimum."""
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.clip(np.nan_to_num(np.rint((x - minimum) / scale)), low, high)
    return (weights * (scale * q + minimum - x) ** 2).sum(axis=0)


@pytest.mark.parametrize("n_negative", [8, 16, 32])
def test_signed_scale_is_about_the_best_of_a_fine_grid(n_negative):
    x, weights = blocks()
    found = error(x, weights, search_signed_scale(x, weights, n_negative), -n_negative, n_negative - 1)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    grid = [
        error(x, weights, extreme / -d, -n_negative, n_negative - 1) for d in np.linspace(0.8, 1.2, 81) * n_negative
    ]
    naive = error(x, weights, extreme / -n_negative, -n_negative, n_negative - 1)
    assert found.mean() < 0.95 * naive.mean()
    assert found.mean() < 1.15 * np.min(grid, axis=0).mean()


@pytest.mark.parametrize("largest", [15, 31])
@pytest.mark.parametrize("offset", [0.0, -3.0, 3.0])
def test_scale_and_minimum_reduce_the_error(largest, offset):
    x, weights = blocks(offset=offset)
    scale, minimum = search_scale_and_minimum(x, weights, largest)
    assert (scale > 0).all() and (minimum <= 0).all()
    assert offset < 3 or (minimum == 0).mean() > 0.3
    low = np.minimum(x.min(axis=0), 0)
    naive = error(x, weights, (x.max(axis=0) - low) / largest, 0, largest, low)
    found = error(x, weights, scale, 0, largest, minimum)
    assert found.mean() < 0.75 * naive.mean()
    assert (found <= 1.05 * naive).all()


def test_large_minimum_does_not_reduce_precision():
    """Values between -1000 and -999 are fitted as well as those between 0 and 1."""
    x, weights = blocks()
    x = np.abs(x) / 4
    close, far = (search_scale_and_minimum(x - shift, weights, 15) for shift in (np.float32(1), np.float32(1000)))
    np.testing.assert_allclose(far[0].mean(), close[0].mean(), rtol=0.02)


def test_common_scale_of_exact_multiples_is_found():
    rng = np.random.default_rng(0)
    q = rng.integers(0, 64, (8, 500))
    q[0] = 63
    scale = search_common_scale((q * 0.25).astype(np.float32), np.ones((8, 500), np.float32), 63)
    np.testing.assert_allclose(scale, 0.25, rtol=1e-6)


def test_blocks_without_values_or_weights():
    zeros, (x, weights) = np.zeros((32, 3), np.float32), blocks()
    for found in (search_signed_scale(zeros, zeros, 8), search_common_scale(zeros, zeros, 63)):
        assert not found.any()
    assert not np.any(search_scale_and_minimum(zeros, zeros, 15))
    scale, minimum = search_scale_and_minimum(x, np.zeros_like(x), 15)  # the range of the values
    np.testing.assert_allclose(scale * 15 + minimum, x.max(axis=0), rtol=1e-5)
    weights[1:] = 0  # a single value matters
    scale, minimum = search_scale_and_minimum(x, weights, 15)
    deviation = np.sqrt(error(x, np.sign(weights), scale, 0, 15, minimum))
    assert (deviation <= 1.01 / 28 * (x.max(axis=0) - np.minimum(x.min(axis=0), 0))).all()
