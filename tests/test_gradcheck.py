"""gradcheck passes correct gradients and names wrong ones."""

import numpy as np
import pytest

from tricycle import Tensor, ops, to_tensor
from tricycle.gradcheck import gradcheck
from tricycle.tensor import record


def op(value, gradient):
    """Return an op with a given gradient, correct or wrong."""
    return lambda x: record(value(x.array), (x,), lambda grad, needs_grad: (gradient(x.array, grad),), "mine")


SQUARE = op(lambda x: x * x, lambda x, g: 2 * x * g)


@pytest.mark.parametrize(
    "x", [1.5, [1.0, 2.0], np.ones((2, 3)), np.zeros((0, 2)), np.float32([1, 2]), to_tensor([1, 2])], ids=str
)
def test_correct_gradients_pass(x):
    gradcheck(SQUARE, x)
    gradcheck(lambda t: t.exp() * t, x)


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (op(lambda x: x * x, lambda x, g: x * g), ValueError, "mine, input 0.*backward.*finite differences"),
        (op(lambda x: x * x, lambda x, g: 2 * x * g * 1.0001), ValueError, "finite differences"),
        (op(lambda x: x * x, lambda x, g: 2 * x), ValueError, "finite differences"),
        (op(lambda x: x * x, lambda x, g: 0 * g), ValueError, "finite differences"),
        (op(lambda x: x * x, lambda x, g: np.nan * g), ValueError, "finite differences"),
        (op(lambda x: x * x, lambda x, g: (2 * x * g)[:1]), RuntimeError, r"shape.*got shape \(1,\)"),
        (
            op(lambda x: (x * x).astype(np.float32), lambda x, g: 2 * x * g),
            ValueError,
            "mine.*float64.*float32",
        ),
        (lambda x: record(x.array, (x,), lambda grad, needs_grad: (), "none"), ValueError, "zip"),
        (lambda x: x.detach() * x, ValueError, "finite differences"),
        (lambda x: x.detach(), RuntimeError, "does not require a gradient"),
    ],
)
def test_wrong_gradients_raise(fn, error, message):
    with pytest.raises(error, match=message):
        gradcheck(fn, np.array([0.5, 1, 2, 3]))


def test_integers_have_no_gradient():
    with pytest.raises(RuntimeError, match="does not require a gradient"):
        gradcheck(lambda x: x * 2, np.arange(3))


def test_error_names_the_input_and_element():
    def fn(x, y):
        return record(x.array * y.array, (x, y), lambda g, needs_grad: (g * y.array, g * x.array * [1, 1, 2]), "mine")

    with pytest.raises(ValueError, match="input 1"):
        gradcheck(fn, np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match=r"input 1.*element 2"):
        gradcheck(fn, np.ones(3), np.ones(3), n_directions=0)


def test_large_inputs_use_only_directional_derivatives():
    calls = []

    def fn(x):
        calls.append(1)
        return SQUARE(x)

    gradcheck(fn, np.ones(65), n_directions=3)
    assert len(calls) == 1 + 2 * 3


def test_inputs_are_unchanged():
    array = np.float32([1, 2])
    t = to_tensor(array, is_batched=True)
    arguments: list[Tensor] = []
    gradcheck(lambda x, i: arguments.append((x, i)) or ops.multiply(x, i), t, np.array([1, 2]))
    assert array.tolist() == [1, 2] and t.grad is None
    x, i = arguments[0]
    assert x.dtype == np.float64 and x.is_batched and i.dtype == int and not i.requires_grad


def test_inputs_without_requires_grad_are_skipped():
    wrong_for_y = lambda x, y: record(x.array * y.array, (x, y), lambda g, needs_grad: (g * y.array, g), "mine")
    gradcheck(wrong_for_y, np.ones(2), to_tensor([3, 4], requires_grad=False))
    with pytest.raises(ValueError, match="input 1"):
        gradcheck(wrong_for_y, np.full(2, 2.0), np.array([3.0, 4]))


def test_functions_must_return_one_tensor():
    with pytest.raises(TypeError, match=r"gradcheck: .*returns a Tensor, got tuple"):
        gradcheck(lambda x: (x, x), np.ones(2))
