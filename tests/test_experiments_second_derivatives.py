"""experiments/second_derivatives: derivatives by hand, linear systems, and a small run of each part."""

import math

import numpy as np
import pytest
from studies import check_files, run_study
from tables import wrong_flags

from experiments.second_derivatives import heat, influence, maml, newton, penalty, report, sharpness
from experiments.second_derivatives.__main__ import main
from experiments.second_derivatives.vectors import as_function, conjugate_gradient, hessian_product
from experiments.shared.results import read
from tricycle.extra_ops import exp, sin
from tricycle.layers import Dense, Sequential
from tricycle.tensor import Tensor
from tricycle.transforms import grad, hessian


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


@pytest.mark.nightly
def test_largest_eigenvalues_of_a_gpt_equal_those_of_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(sharpness, "N_TOKENS", 4)
    loss, parameters = sharpness.new_problem(2, 0)
    exact = np.linalg.eigvalsh(hessian(loss)(parameters).array)
    found = sharpness.largest_eigenvalues(loss, parameters, 60)
    np.testing.assert_allclose(found, exact[:-4:-1], 1e-6)


def test_model_as_function_of_a_vector_in_float64(rng):
    model, x = Sequential(Dense(3, 2), Dense(2, 1)), rng.standard_normal((4, 3))
    predict, vector = as_function(model)
    np.testing.assert_allclose(predict(vector, x).array, model(Tensor(x, False)).array, 1e-6)
    vector = vector + 1e-12  # lost in float32
    first, second = vector[:8], vector[8:]
    expected = (x @ first[:6].reshape(3, 2) + first[6:]) @ second[:2, None] + second[2:]
    assert predict(vector, x).dtype == np.float64
    np.testing.assert_allclose(predict(vector, x).array, expected, 1e-14)


def test_conjugate_gradients_solve_a_system_and_stop_at_negative_curvature(rng):
    square = rng.standard_normal((12, 12))
    matrix, b = square @ square.T + np.eye(12), rng.standard_normal(12)
    np.testing.assert_allclose(
        conjugate_gradient(matrix.__matmul__, b, tolerance=1e-10), np.linalg.solve(matrix, b), 1e-6
    )
    np.testing.assert_array_equal(conjugate_gradient((-matrix).__matmul__, b), b)
    loss = lambda vector: (vector**4).sum()
    product = hessian_product(loss, b, damping=2.0)
    np.testing.assert_allclose(product(np.ones(12)), 12 * b**2 + 2)


@pytest.mark.parametrize("part", ["influence", "maml", "newton", "penalty", "heat", "sharpness"])
def test_each_example_has_at_most_80_lines(part):
    with open(f"{influence.__file__.removesuffix('influence.py')}{part}.py", encoding="utf-8") as file:
        assert len(file.readlines()) <= 80


# -------------------------------------------------------------------- influence
@pytest.mark.parametrize("hidden", [0, 3])
def test_influence_is_the_derivative_by_the_weight_of_an_example(hidden):
    """The estimate equals n times the change of the loss when an example has 1e-4 less weight, not none."""
    pytest.importorskip("sklearn")
    problem = influence.Problem(hidden, 0.05, 20, 0)
    vector = influence.minimize(problem.training_loss, problem.start)
    assert np.linalg.norm(grad(problem.training_loss)(vector).array) < 1e-7
    estimates = influence.influences(problem, vector, 5)
    image_loss = lambda vector: problem.image_loss(vector, problem.test_x[5], problem.test_y[5]).item()
    less = lambda v: problem.training_loss(v) - 1e-4 / 20 * problem.image_loss(v, problem.x[7], problem.y[7])
    changed = influence.minimize(less, vector)
    assert image_loss(changed) - image_loss(vector) == pytest.approx(1e-4 * estimates[7], rel=0.02)


def test_training_without_an_example_gives_it_no_weight():
    pytest.importorskip("sklearn")
    problem = influence.Problem(0, 0.1, 6, 0)
    losses = [problem.image_loss(problem.start, x, y).item() for x, y in zip(problem.x, problem.y)]
    decay = 0.05 * (problem.start @ problem.start)
    expected = (sum(losses) - losses[2]) / 6 + decay
    assert problem.training_loss(problem.start, 2).item() == pytest.approx(expected)
    (change,) = influence.changes(problem, influence.minimize(problem.training_loss, problem.start), 0, 1)
    assert change != 0


# -------------------------------------------------------------------- the other parts
def test_image_gradients_and_penalty_match_differences():
    pytest.importorskip("sklearn")
    model = penalty.train(0.0, 1, 0)
    images, labels = np.random.default_rng(0).random((3, 64)), np.array([1, 2, 3])
    slopes = penalty.image_gradients(model, images, labels).array
    step = np.zeros((3, 64))
    step[1, 9] = 1e-4
    loss = lambda x: penalty.CrossEntropy()(labels, model(Tensor(x, False))).item() * 3
    assert slopes.shape == (3, 64)
    assert slopes[1, 9] == pytest.approx((loss(images + step) - loss(images - step)) / 2e-4, rel=1e-3)


def test_adapted_weights_are_a_gradient_step_and_have_second_derivatives():
    weights = maml.new_weights(0)
    known, other = maml.new_tasks(np.random.default_rng(0), 2, 4)
    steps = maml.adapted(weights, known)
    alone = maml.adapted(weights, (known[0][1:], known[1][1:]))
    for both, one in zip(steps, alone):
        np.testing.assert_allclose(both.array[1:], one.array, 1e-4, 1e-6)
    slopes = {}
    for constant in (False, True):
        maml.errors(maml.adapted(weights, known, constant), other).sum().backward()
        slopes[constant] = [w.grad.array for w in weights]
        for w in weights:
            w.zero_grad()
    assert abs(slopes[True][2] - slopes[False][2]).max() > 1e-2 * abs(slopes[True][2]).max()
    matrix, step = weights[2].array, np.float32(1e-2)
    losses = []
    for sign in (1, -1):
        matrix[3, 4] += sign * step
        losses.append(maml.errors(maml.adapted(weights, known), other).sum().item())
        matrix[3, 4] -= sign * step
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slopes[False][2][3, 4], rel=0.05)


def test_newton_step_solves_a_quadratic_and_descends_at_a_saddle():
    matrix, slope = np.diag([2.0, -4.0]), np.array([2.0, 4.0])
    exact = newton.newton_step(matrix, slope, False)
    np.testing.assert_allclose((matrix + newton.DAMPING * np.eye(2)) @ exact, -slope)
    assert exact @ slope > 0  # upwards
    np.testing.assert_allclose(newton.newton_step(matrix, slope, True), [-2 / 2.01, -4 / 4.01])


def test_newton_converges_quadratically():
    loss = lambda vector: (vector**4 / 4 - vector).sum()
    losses = newton.descend(loss, np.array([1.5, 2.0]), "Newton, absolute", 8)
    assert losses[-1] == pytest.approx(-1.5, abs=1e-12) and losses == sorted(losses, reverse=True)
    assert hessian(loss)(np.ones(2)).array.tolist() == [[3, 0], [0, 3]]


# -------------------------------------------------------------------- the study
@pytest.mark.nightly
def test_heat_equation_is_solved_and_sharpness_stays_near_its_limit(tmp_path):
    words = "--parts heat sharpness --widths 32 --rates 0.4 --descent-steps 200".split()
    printed = run_study(main, *words, "--output", tmp_path)
    assert "Heat equation" in printed and "Sharpness" in printed
    check_files(tmp_path, ["results.json", "curves.png"])
    results = read(tmp_path / "results.json")
    (solved,), (descended,) = results["heat"], results["sharpness"]
    assert solved["error"] < 1e-3
    history = descended["history"]
    assert history[-1][1] < 0.7 * history[0][1]
    late = [values[0] for step, _, values in history if step >= 100]
    assert 2 / 0.4 < np.mean(late) < 2.5 * 2 / 0.4


@pytest.mark.nightly
def test_influence_penalty_meta_learning_and_newton_have_their_effects(tmp_path):
    pytest.importorskip("sklearn")
    printed = run_study(main, "--quick", "--parts", "influence", "penalty", "maml", "newton", "--output", tmp_path)
    assert all(title in printed for title in ("Influence", "Gradient penalty", "MAML", "Newton's method"))
    check_files(tmp_path, ["results.json", "curves.png", "images.png"])
    results = read(tmp_path / "results.json")
    assert report.correlation(results["influence"][0]) > 0.99
    without, with_penalty = results["penalty"]
    assert with_penalty["accuracies"][0][2] > without["accuracies"][0][2] + 0.1
    second, _, joint = results["maml"]
    assert second["errors"][1] < joint["errors"][1]
    descent, newton_run, absolute = (run["losses"] for run in results["newton"])
    assert absolute[6] < 0.1 < descent[100] < 1 < newton_run[-1]


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--steps", "0"], "expected --steps to be at least 1, got 0"),
    (["--parts", "gan"], "expected --parts among heat, .*got gan"),
    (["--train-images", "59"], "expected --removed to be at most 59, the training images, got 60"),
)
