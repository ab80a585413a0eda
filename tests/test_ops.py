"""Ties, kinks and bad input of elementwise ops, reductions, shapes and indexing; more in test_properties.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp

from tricycle import extra_ops, ops, to_tensor
from tricycle.einsum import Einsum
from tricycle.functions import LogSoftmax
from tricycle.loss import MeanSquaredError
from tricycle.softmaxes import AdaptiveSoftmax

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@given(shape=SHAPES, other=SHAPES)
def test_incompatible_shapes_are_rejected(shape, other):
    x, y = to_tensor(np.ones(shape)), to_tensor(np.ones(other))
    try:
        np.broadcast_shapes(shape, other)
    except ValueError:
        for op in (ops.add, ops.multiply, extra_ops.power, extra_ops.maximum):
            with pytest.raises(ValueError, match=r"shapes .*broadcast"):
                op(x, y)
    else:
        assert (x + y).shape == np.broadcast_shapes(shape, other)


def test_concatenate_inverts_split():
    x = to_tensor(np.arange(24).reshape(2, 3, 4))
    for axis, n_parts in ((0, 2), (1, 3), (-1, 2)):
        parts = x.split(n_parts, axis)
        assert len(parts) == n_parts
        np.testing.assert_array_equal(extra_ops.concatenate(parts, axis).array, x.array)


# -------------------------------------------------------------------- ties, kinks, edges
@pytest.mark.parametrize(
    ("fn", "x", "grad"),
    [
        (lambda x: x.max(), [1, 3, 3], [0, 0.5, 0.5]),
        (lambda x: x.min(), [1, 1, 1], [1 / 3] * 3),
        (lambda x: x.max(0), [[1, 2], [1, 3]], [[0.5, 0], [0.5, 1]]),
        (lambda x: extra_ops.maximum(x, 1), [0, 1, 2], [0, 0.5, 1]),
        (lambda x: extra_ops.minimum(1, x), [0, 1, 2], [1, 0.5, 0]),
        (lambda x: extra_ops.maximum(x, x), [0, 1, 2], [1, 1, 1]),
        (lambda x: extra_ops.absolute(x), [-2, 0, 3], [-1, 0, 1]),
        (lambda x: x**0, [0, 2, -2], [0, 0, 0]),
        (lambda x: x**1, [0, 2, -2], [1, 1, 1]),
        (lambda x: x**2, [0, 2, -2], [0, 4, -4]),
        (lambda x: 0**x, [1, 2, 3], [0, 0, 0]),
        (lambda x: x[[0, 0, 2]], [5, 6, 7], [2, 0, 1]),
        (lambda x: x[[]], [5, 6, 7], [0, 0, 0]),
        (lambda x: extra_ops.where(x > 0, x.sqrt(), x * 0), [4.0, 1.0, 16.0], [0.25, 0.5, 0.125]),
    ],
)
def test_gradients_at_ties_and_kinks(fn, x, grad):
    x = to_tensor(x)
    fn(x).backward()
    np.testing.assert_allclose(x.grad.array, np.float32(grad), 1e-6)


def test_gradient_of_power_at_zero():
    x, y = to_tensor([0, 0, 2]), to_tensor([0, 2, 0])
    z = x**y
    z.backward()
    assert z.array.tolist() == [1, 0, 1]
    assert x.grad.array.tolist() == [0, 0, 0]
    np.testing.assert_allclose(y.grad.array, [0, 0, np.log(2)], 1e-6)


@pytest.mark.parametrize("op", [ops.sigmoid, ops.tanh])
def test_saturating_ops_do_not_overflow(op):
    x = to_tensor([-1e30, -1e3, 1e3, 1e30])
    y = op(x)
    y.backward()
    np.testing.assert_allclose(y.array, [0 if op is ops.sigmoid else -1] * 2 + [1, 1])
    assert x.grad.array.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (lambda x: x + to_tensor([1, 2]), ValueError, r"add: .*\(2, 3\) and \(2,\)"),
        (lambda x: x < to_tensor([1, 2]), ValueError, r"less: .*\(2, 3\) and \(2,\)"),
        (lambda x: x == [1, 2], ValueError, r"equal: .*\(2, 3\) and \(2,\)"),
        (lambda x: to_tensor([2], dtype=int) ** to_tensor([-1], dtype=int), ValueError, "pow: shapes"),
        (lambda x: extra_ops.where([True, False], x, x), ValueError, r"where: .*\(2,\) and \(2, 3\)"),
        (lambda x: extra_ops.concatenate([]), ValueError, "concatenate: .*at least one Tensor"),
        (lambda x: extra_ops.concatenate([x, x[0]]), ValueError, r"concatenate: .*\(2, 3\) and \(3,\)"),
        (lambda x: extra_ops.concatenate([x, x], axis=2), ValueError, "concatenate: .*axis 2 .*bounds"),
        (lambda x: extra_ops.stack([]), ValueError, "stack: .*at least one Tensor"),
        (lambda x: extra_ops.stack([x, x[0]]), ValueError, r"stack: .*\(2, 3\) and \(3,\)"),
        (lambda x: extra_ops.stack([x], axis=-4), ValueError, "stack: .*axis -4 .*bounds"),
        (lambda x: x.sum(2), ValueError, r"sum: axis 2 .*\(2, 3\)"),
        (lambda x: x.mean((0, -3)), ValueError, r"mean: axis -3 .*\(2, 3\)"),
        (lambda x: x.max((1, -1)), ValueError, r"max: .*once.*\(1, -1\)"),
        (lambda x: x.min(0.5), TypeError, "float"),
        (lambda x: x[:0].mean(), ValueError, r"mean: .*at least one element.*\(0, 1\)"),
        (lambda x: x[:0].max(0), ValueError, r"max: .*at least one element.*\(0,\)"),
        (lambda x: x.reshape(4, 2), ValueError, r"reshape: 6 elements.*\(4, 2\)"),
        (lambda x: x.reshape(-1, -1), ValueError, "reshape: 6 elements"),
        (lambda x: x.transpose(0), ValueError, r"transpose: .*2 axes.*\(0,\)"),
        (lambda x: x.transpose(0, 0), ValueError, r"transpose: .*once.*\(0, 0\)"),
        (lambda x: x.transpose(0, 3), ValueError, "transpose: axis 3"),
        (lambda x: to_tensor(1).transpose(0), ValueError, "transpose: axis 0"),
        (lambda x: x.split(2), ValueError, r"split: 2 equal parts.*axis 1.*\(2, 3\)"),
        (lambda x: x.split(0), ValueError, "split: 0 equal parts"),
        (lambda x: x.split(3, axis=5), ValueError, "split: axis 5"),
        (lambda x: x[2], IndexError, r"getitem: index 2 .*\(2, 3\)"),
        (lambda x: x[0, 0, 0], IndexError, "getitem: too many indices"),
        (lambda x: x[[0, 5]], IndexError, "getitem: index 5"),
        (lambda x: x[[True, False, True]], IndexError, "getitem: boolean index"),
        (lambda x: x[to_tensor([0, 1])], IndexError, "getitem: .*indices.*integer"),
        (lambda x: x["a"], IndexError, "getitem: only integers"),
        (lambda x: x < "a", TypeError, "less"),
    ],
)
def test_bad_input(fn, error, message):
    with pytest.raises(error, match=message) as caught:
        fn(to_tensor(np.ones((2, 3))))
    assert "\n" not in str(caught.value)


def test_axes_may_be_numpy_integers_and_lists():
    x = to_tensor(np.arange(6).reshape(2, 3))
    assert x.sum(np.int64(1)).array.tolist() == [3, 12]
    assert x.sum([0, 1]).item() == 15


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.sum(axis=0),
        lambda x: x.mean(axis=0),
        lambda x: Einsum("ij->j")(x),
        lambda x: LogSoftmax()(x.transpose()),
        lambda x: AdaptiveSoftmax()(x.transpose()) * x.transpose() * 1000,
        lambda x: MeanSquaredError()(2 * x, x),
        lambda x: x + x[:1],
    ],
    ids=["sum", "mean", "einsum", "log_softmax", "adaptive_softmax", "mean_squared_error", "broadcast"],
)
@pytest.mark.parametrize("dtype_name", ["float16", "bfloat16"])
def test_16_bit_floats_are_added_in_float32(reduce, dtype_name):
    """A sum in 16 bits does not grow beyond 256 in bfloat16, 2048 in float16, when small numbers are added to it."""
    dtype = np.dtype(np.float16 if dtype_name == "float16" else pytest.importorskip("ml_dtypes").bfloat16)
    values = np.random.default_rng(0).uniform(0.5, 1.5, (3000, 2)).astype(dtype)
    narrow, exact = to_tensor(values, dtype=dtype), to_tensor(values, dtype=float)
    results = [reduce(x) for x in (narrow, exact)]
    for y in results:
        y.backward()
    assert results[0].dtype == narrow.grad.dtype == dtype
    for x, expected in ((results[0], results[1]), (narrow.grad, exact.grad)):
        np.testing.assert_allclose(x.array.astype(float), expected.array, 0, 0.1 * np.abs(expected.array).max())


def test_mean_of_more_elements_than_float16_can_count():
    x = to_tensor(np.ones(70_000), dtype=np.float16)
    x.mean().backward()
    np.testing.assert_allclose(x.grad.array, 1 / 70_000, 0.01)


@pytest.mark.parametrize("dtype", [np.int8, bool])
def test_sums_of_small_integers_do_not_overflow(dtype):
    x = to_tensor(np.ones(300), dtype=dtype)
    assert x.sum().item() == Einsum("i->")(x).item() == 300
