"""Errors, identities and derivatives of linear algebra; each op on drawn matrices: test_registry.py and others."""

import numpy as np
import pytest

from tricycle import to_tensor
from tricycle.gradcheck import gradcheck
from tricycle.linalg import cholesky, det, eigh, inv, slogdet, solve, svd
from tricycle.transforms import grad, hessian, jacobian


def double(x, **options):
    return to_tensor(np.array(x, np.float64), dtype=np.float64, **options)


def matrices(*shape):
    return np.random.default_rng(0).standard_normal(shape) + 4 * np.eye(*shape[-2:])


# -------------------------------------------------------------------- values
def test_solve_of_vectors_and_batches():
    a, vector, columns = matrices(2, 3, 3), np.arange(3.0), matrices(3, 2)
    np.testing.assert_allclose(solve(double(a), vector).array, np.linalg.inv(a) @ vector)
    np.testing.assert_allclose(solve(double(a), columns).array, np.linalg.inv(a) @ columns)
    assert solve(a[0], vector).shape == (3,)
    gradcheck(solve, a, vector)
    gradcheck(solve, a[:1], matrices(2, 3, 2))


def test_empty_batches():
    x = double(np.ones((0, 3, 3)))
    for result in (inv(x), solve(x, np.ones(3)), cholesky(x), *slogdet(x), *eigh(x), *svd(x)):
        assert result.shape[0] == 0
    inv(x).backward()
    assert x.grad.shape == (0, 3, 3)


def test_float32_and_integers_give_float32():
    assert solve(np.float32([[2]]), np.float32([3])).dtype == np.float32
    assert inv(np.array([[2]])).array.tolist() == [[0.5]]
    assert solve(double([[2]]), np.array([3])).dtype == np.float64


def test_factors_multiply_to_the_matrix():
    x = matrices(2, 4, 3)
    u, s, vh = svd(double(x))
    np.testing.assert_allclose((u * s[..., None, :] @ vh).array, x)
    symmetric = x.swapaxes(-1, -2) @ x
    factor = cholesky(double(symmetric)).array
    np.testing.assert_allclose(factor @ factor.swapaxes(-1, -2), symmetric)
    values, vectors = (t.array for t in eigh(double(symmetric)))
    np.testing.assert_allclose(symmetric @ vectors, vectors * values[..., None, :])
    assert (np.diff(values) > 0).all()


def test_slogdet_of_determinants_beyond_floating_point():
    sign, log = slogdet(-1e-30 * np.eye(21))
    assert sign.item() == -1
    assert not sign.requires_grad
    assert log.item() == pytest.approx(-21 * 30 * np.log(10))
    assert slogdet(np.zeros((2, 2)))[1].item() == -np.inf


def test_batched_results_keep_the_batch():
    x = double(matrices(2, 3, 3), is_batched=True)
    assert det(x).is_batched and inv(x).is_batched and all(t.is_batched for t in (*svd(x), *slogdet(x)))
    assert not det(double(np.eye(2), is_batched=True)).is_batched


# -------------------------------------------------------------------- derivatives in closed form
def test_derivatives_of_the_determinant():
    x = double([[2, 1], [3, 4]])
    assert np.allclose(grad(det)(x).array, [[4, -3], [-1, 2]])
    second = hessian(det)(x).array.reshape(4, 4)
    np.testing.assert_allclose(second, [[0, 0, 0, 1], [0, 0, -1, 0], [0, -1, 0, 0], [1, 0, 0, 0]], atol=1e-12)


def test_third_derivative_of_the_inverse():
    third = grad(grad(grad(lambda x: inv(x.reshape(1, 1)).sum())))
    assert third(double(2.0)).item() == pytest.approx(-6 / 2**4)


def test_gradients_of_all_factors_together():
    """The reconstructed matrix has the gradient of the identity, with the gradients of all factors added."""

    def reconstruct(x):
        u, s, vh = svd(x)
        return u * s[..., None, :] @ vh

    for shape in ((3, 3), (4, 2), (2, 4)):
        x = double(np.random.default_rng(1).standard_normal(shape))
        identity = jacobian(reconstruct)(x).array.reshape(x.size, x.size)
        np.testing.assert_allclose(identity, np.eye(x.size), atol=1e-10)


def test_gradient_only_where_needed():
    a, b = double(matrices(3, 3), requires_grad=False), double([1.0, 2, 3])
    solve(a, b).backward()
    assert a.grad is None
    np.testing.assert_allclose(b.grad.array, np.linalg.inv(a.array).T @ np.ones(3))


# -------------------------------------------------------------------- errors
SINGULAR = [[1.0, 2], [2, 4]]


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (lambda: inv(SINGULAR), ValueError, r"inv: expected an invertible matrix, got .*\(2, 2\)"),
        (lambda: solve([SINGULAR], [1.0, 2]), ValueError, r"solve: expected an invertible matrix.*\(1, 2, 2\)"),
        (lambda: det(double(SINGULAR)).backward(), ValueError, "inv: expected an invertible"),
        (lambda: slogdet(double(SINGULAR))[1].backward(), ValueError, "inv: expected an invertible"),
        (lambda: cholesky([[1.0, 2], [2, 1]]), ValueError, "cholesky: expected a positive definite matrix"),
        (lambda: svd([[np.nan, 2], [2, 1]]), ValueError, "svd: expected finite numbers, got NaN"),
        (lambda: det(np.ones((2, 3))), ValueError, r"det: expected square .*\(2, 3\)"),
        (lambda: eigh(np.ones(3)), ValueError, r"eigh: expected square .*\(3,\)"),
        (lambda: svd(np.ones(3)), ValueError, r"svd: expected matrices \(..., m, n\).*\(3,\)"),
        (lambda: solve(np.eye(2), np.ones((3, 1))), ValueError, r"solve: expected b with 2 rows.*\(3, 1\)"),
        (lambda: solve(np.eye(2), 1.0), ValueError, r"solve: expected b with 2 rows.*\(\)"),
        (lambda: solve(matrices(2, 3, 3), matrices(4, 3, 3)), ValueError, r"solve: .*do not broadcast"),
        (
            lambda: inv(to_tensor(np.ones((2, 2)), dtype=np.float16)),
            TypeError,
            "inv: expected float32 or float64, got float16",
        ),
    ],
)
def test_bad_input(fn, error, message):
    with pytest.raises(error, match=message) as caught:
        fn()
    assert "\n" not in str(caught.value)


def test_equal_eigenvalues_have_no_gradient_of_eigenvectors():
    x = double(np.eye(2))
    eigh(x)[0].sum().backward()
    np.testing.assert_allclose(x.grad.array, np.eye(2))
    x.zero_grad()
    with np.errstate(all="ignore"):
        (eigh(x)[1] * [[1.0, 2], [3, 4]]).sum().backward()
    assert not np.isfinite(x.grad.array).all()
