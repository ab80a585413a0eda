"""experiments/second_derivatives: derivatives by hand, Lanczos's method, and a small run."""

import math

import numpy as np
import pytest
from studies import check_files, run_study

from experiments.second_derivatives import heat, sharpness
from experiments.second_derivatives.__main__ import main
from experiments.shared.results import read
from tricycle.extra_ops import exp, sin
from tricycle.tensor import Tensor


def columns(n: int = 7) -> list[Tensor]:
    return [Tensor(column, False) for column in np.random.default_rng(0).random((2, n, 1))]


def test_residual_of_known_functions():
    x, t = columns()
    exact = lambda x, t: exp(-heat.DIFFUSIVITY * math.pi**2 * t) * sin(math.pi * x)
    np.testing.assert_allclose(heat.residual(exact, x, t).array, 0, atol=1e-12)
    polynomial = lambda x, t: x**3 * t**2
    expected = 2 * x.array**3 * t.array - heat.DIFFUSIVITY * 6 * x.array * t.array**2
    np.testing.assert_allclose(heat.residual(polynomial, x, t).array, expected, 1e-12)


def test_network_satisfies_initial_and_boundary_conditions():
    u = heat.solution_of(heat.new_network(4, 0))
    values, _ = heat.errors(u, 11)
    np.testing.assert_allclose(values[0], np.sin(np.pi * np.linspace(0, 1, 11)), atol=1e-6)
    np.testing.assert_allclose(values[:, [0, -1]], 0, atol=1e-6)


def test_training_reduces_the_residual():
    losses, _ = heat.train(40, 8, 64)
    assert losses[-1] < 0.3 * losses[0]


def test_lanczos_finds_extreme_eigenvalues(rng):
    matrix = rng.standard_normal((40, 40))
    matrix = matrix + matrix.T
    exact, found = np.linalg.eigvalsh(matrix), sharpness.lanczos(matrix.__matmul__, rng.standard_normal(40), 30)
    np.testing.assert_allclose(found[[0, -1]], exact[[0, -1]], 1e-6)
    np.testing.assert_allclose(sharpness.lanczos(matrix.__matmul__, rng.standard_normal(40), 40), exact, 1e-8, 1e-8)
    rank_one = lambda v: np.ones(40) * v.sum()  # Lanczos's method ends early
    assert sharpness.lanczos(rank_one, rng.standard_normal(40), 10)[-1] == pytest.approx(40)


def test_sharpness_equals_largest_eigenvalue_of_hessian():
    loss, parameters = sharpness.new_problem(5, 0)
    assert sharpness.sharpness(loss, parameters) == pytest.approx(sharpness.exact_sharpness(loss, parameters), rel=1e-8)


@pytest.mark.slow
def test_heat_equation_is_solved_and_sharpness_reaches_its_limit(tmp_path):
    printed = run_study(main, "--widths", 32, "--rates", 0.2, "--descent-steps", 4000, "--output", tmp_path)
    assert "Heat equation" in printed and "Sharpness" in printed
    check_files(tmp_path, ["results.json", "curves.png"])
    results = read(tmp_path / "results.json")
    (solved,), (descended,) = results["heat"], results["sharpness"]
    assert solved["error"] < 1e-3
    assert descended["history"][0][2] < 7
    late = [value for step, _, value in descended["history"] if step >= 2500]
    assert np.mean(late) == pytest.approx(2 / 0.2, rel=0.1)


def test_wrong_settings_are_rejected():
    with pytest.raises(ValueError, match="expected --steps to be at least 1, got 0"):
        run_study(main, "--steps", 0)
