"""Activations at known points and at the edges; their gradients are in test_registry.py."""

import math

import numpy as np
import pytest

from tricycle import no_grad, ops, to_tensor
from tricycle.activation import GLU, Gated, GeLU, ReLU, SwiGLU, Swish
from tricycle.activations import ClampedSwiGLU
from tricycle.functions import Tanh
from tricycle.gradcheck import gradcheck
from tricycle.kernels.activations import gaussian_and_cdf

X = [-1e4, -3, -1, -0.5, 0, 0.5, 1, 3, 1e4]


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


@pytest.mark.parametrize(
    ("op", "formula"),
    [
        (ReLU(), lambda x: max(x, 0)),
        (GeLU(), lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        (GeLU(approximate=False), lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2))),
        (Swish(), lambda x: x * sigmoid(x)),
        (GLU(), lambda x: x * sigmoid(x)),
        (SwiGLU(), lambda x: x * x * sigmoid(x)),
        (ClampedSwiGLU(), lambda x: (1 + max(-7, min(7, x))) * min(7, x) * sigmoid(1.702 * min(7, x))),
    ],
    ids=lambda value: repr(value) if isinstance(value, ops.Op) else "formula",
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_values_match_formula(op, formula, dtype, tolerance):
    gated = isinstance(op, Gated)
    x = to_tensor([[x, x] for x in X] if gated else X, dtype=dtype)
    y = op(x)
    y.backward()
    assert y.dtype == dtype
    np.testing.assert_allclose(y.array.reshape(-1), [formula(x) for x in X], tolerance, tolerance)
    assert np.isfinite(x.grad.array).all()


def test_relu_gradient_at_zero():
    x = to_tensor([-1, 0, -0.0, 1])
    ReLU()(x).backward()
    assert x.grad.array.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-7), (np.float64, 1e-15)])
def test_normal_distribution_matches_math_erfc(dtype, tolerance):
    x = np.concatenate([np.linspace(-8, 8, 4_001), [0, 1e-300, -1e-8, 1e30, -1e30, np.inf, -np.inf]]).astype(dtype)
    gaussian, cdf = gaussian_and_cdf(x)
    assert gaussian.dtype == cdf.dtype == dtype
    np.testing.assert_allclose(cdf, [math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()], 1e3 * tolerance, tolerance)
    np.testing.assert_allclose(gaussian, [math.exp(-v * v / 2) for v in x.tolist()], 0, tolerance)


@pytest.mark.parametrize("op", [GLU(), SwiGLU()], ids=repr)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_gates_reject_odd_last_axis(op, shape):
    with pytest.raises(ValueError, match=rf"{type(op).__name__}: .*even.*\({str(shape)[1:-1]}\)"):
        op(to_tensor(np.ones(shape)))


def test_sigmoid_of_large_negative_input_keeps_precision():
    x = np.array([-80, -20, -10, 0, 10, 80], np.float32)
    expected = 1 / (1 + np.exp(-x.astype(np.float64)))
    for y in (ops.sigmoid(to_tensor(x)), GLU()(to_tensor(np.concatenate([np.ones(6), x])))):
        np.testing.assert_allclose(y.array, expected, rtol=1e-6)


# -------------------------------------------------------------------- gates of users
GATES = {
    "two operations": lambda t, w: Tanh()(t * 3.0),
    "the identity": lambda t, w: t,
    "its input twice": lambda t, w: t * Tanh()(t),
    "a parameter": lambda t, w: Tanh()(t * w),
    "one operation of two inputs": lambda t, w: t * t,
    "a constant": lambda t, w: to_tensor(np.full((3, 2), 0.7), dtype=np.float64, requires_grad=False),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_glu_accepts_any_gate_function(gate):
    x = to_tensor(np.random.default_rng(0).standard_normal((3, 4)), dtype=np.float64)
    w = to_tensor([1.5, -0.5], dtype=np.float64)
    gated = lambda x, w: Gated(lambda t: gate(t, w))(x)
    expected = (x[:, :2] * gate(x[:, 2:], w)).array
    np.testing.assert_allclose(gated(x, w).array, expected)
    with no_grad():
        np.testing.assert_array_equal(gated(x, w).array, expected)
    gradcheck(gated, x, w)
