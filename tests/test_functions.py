"""Softmax and its kin at the edges, the linear map, gradients computed together."""

import numpy as np
import pytest

from tricycle import to_tensor
from tricycle.functions import LogSoftmax, Sigmoid, Softmax, Softmax1, Tanh, linear, shared_backward
from tricycle.kernels import use_reference
from tricycle.tensor import record

INF = np.inf

# the worked examples of seed 000: inputs, softmax1 to four digits, its sum
WORKED = [
    ([1, 2, 3, 4, 5], [0.0116, 0.0315, 0.0858, 0.2331, 0.6337], 0.9957),
    ([1, 2, -3, -4, -10000], [0.2432, 0.6612, 0.0045, 0.0016, 0], 0.9105),
    ([1, 2, -32498321749821, -190487129857, -10000], [0.2447, 0.6652, 0, 0, 0], 0.9100),
    ([-1, -2, -32498321749821, -190487129857, -10000], [0.2447, 0.0900, 0, 0, 0], 0.3348),
]


@pytest.mark.parametrize(("x", "expected", "total"), WORKED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softmax1_worked_examples(x, expected, total, dtype):
    y = Softmax1()(to_tensor(x, dtype=dtype))
    # half a unit of the fourth digit, and a little for the example whose fifth digit is a 5
    np.testing.assert_allclose(y.array, expected, rtol=0, atol=6e-5)
    assert abs(float(y.sum()) - total) < 6e-5


EXTREMES = [
    # x, softmax, softmax1
    ([1e30, -1e30, 0], [1, 0, 0], [1, 0, 0]),
    ([1e30, 1e30], [0.5, 0.5], [0.5, 0.5]),
    ([-1e30, -1e30], [0.5, 0.5], [0, 0]),
    ([3e38, -3e38], [1, 0], [1, 0]),
    ([-INF, -INF], [0, 0], [0, 0]),
    ([-INF, 0], [0, 1], [0, 0.5]),
    ([-INF, -1e30], [0, 1], [0, 0]),
    ([100, 100], [0.5, 0.5], [0.5, 0.5]),
    ([0], [1], [0.5]),
    ([[0, 0], [-INF, -INF]], [[0.5, 0.5], [0, 0]], [[1 / 3, 1 / 3], [0, 0]]),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("x", "softmax", "softmax1"), EXTREMES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("plain", [False, True])
def test_extreme_rows(x, softmax, softmax1, dtype, plain):
    for op, expected in ((Softmax(), softmax), (Softmax1(), softmax1)):
        t = to_tensor(x, dtype=dtype)
        if plain:
            with use_reference():
                y = op(t)
        else:
            y = op(t)
        (y * np.arange(t.size).reshape(t.shape)).sum().backward()
        np.testing.assert_allclose(y.array, expected, 1e-6)
        assert y.dtype == dtype and np.isfinite(t.grad.array).all()


def test_softmax1_over_the_whole_range():
    """Against the definition, where it can be computed, from -1e30 to 1e30."""
    for size in 10.0 ** np.arange(-30, 31):
        row = Softmax1()(to_tensor([-size, 0, size], dtype=np.float64)).array
        assert (row >= 0).all() and row.sum() <= 1 + 1e-15
        if size < 300:
            e = np.exp([-size, 0, size])
            np.testing.assert_allclose(row, e / (1 + e.sum()), 1e-12)
        else:
            assert row.tolist() == [0, 0, 1]


def test_log_softmax_keeps_what_a_log_would_lose():
    y = LogSoftmax()(to_tensor([0, -1000, 1e30]))
    assert y.array.tolist() == np.float32([-1e30, -1e30, 0]).tolist()
    y = LogSoftmax()(to_tensor([0, -1000]))
    assert y.array.tolist() == [0, -1000]


@pytest.mark.parametrize("op", [Softmax(), Softmax1(), LogSoftmax()], ids=repr)
def test_rows_need_an_axis(op):
    with pytest.raises(ValueError, match=f"^{type(op).__name__}: expected at least one axis, got a single number$"):
        op(to_tensor(1))


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (Softmax(), "softmax"),
        (Softmax1(), "softmax1"),
        (LogSoftmax(), "log_softmax"),
        (Sigmoid(), "sigmoid"),
        (Tanh(), "tanh"),
    ],
    ids=repr,
)
def test_names_and_plain_inputs(op, name):
    assert op([1, 2]).name == name
    assert op(to_tensor([1, 2], dtype=int)).dtype == np.float32
    assert repr(op) == f"{type(op).__name__}()"


@pytest.mark.parametrize(
    ("x", "weights", "bias", "message"),
    [
        ((2, 4), (3, 5), None, r"Linear\(from_size=3\): expected the last axis to be 3, got shape \(2, 4\)"),
        ((), (3, 5), None, r"expected the last axis to be 3, got shape \(\)"),
        (
            (2, 3),
            (3,),
            None,
            r"linear: expected weights \(from_size, to_size\) and a bias \(to_size,\), got shapes \(3,\)",
        ),
        ((2, 3), (3, 5), (4,), r"got shapes \(3, 5\) and \(4,\)"),
        ((2, 3), (3, 5), (1,), r"got shapes \(3, 5\) and \(1,\)"),
        ((2, 3), (3, 5), (), r"got shapes \(3, 5\) and \(\)"),
    ],
)
def test_linear_refuses(x, weights, bias, message):
    with pytest.raises(ValueError, match=message) as caught:
        linear(*(None if shape is None else to_tensor(np.ones(shape)) for shape in (x, weights, bias)))
    assert "\n" not in str(caught.value)


def test_shared_backward_computes_once_a_pass():
    calls = []

    def compute(grad):
        calls.append(grad)
        return grad * 2, grad * 3

    a, b = to_tensor([1, 2]), to_tensor([3, 4])
    y = record(a.array + b.array, (a, b), shared_backward(compute, 2), "both")
    y.backward(retain_graph=True)
    assert len(calls) == 1
    y.backward()
    assert len(calls) == 2
    assert a.grad.array.tolist() == [4, 4] and b.grad.array.tolist() == [6, 6]
