"""Elementwise ops, reductions, shapes and indexing against NumPy on any shapes; ties, kinks and bad input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tricycle import extra_ops, ops, to_tensor
from tricycle.gradcheck import gradcheck

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
SEEDS = st.integers(0, 2**16)


def values(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return distinct values, none near 0."""
    size = int(np.prod(shape))
    order = np.random.default_rng(seed).permutation(size)
    return np.where(order % 2, 1, -1).reshape(shape) * (0.5 + order.reshape(shape) / max(size, 1))


def check(fn, numpy_fn, *arrays) -> None:
    """Compare values with NumPy and gradients with finite differences."""
    actual = fn(*(to_tensor(a, dtype=np.float64) for a in arrays))
    expected = numpy_fn(*arrays)
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(actual.array, expected, 1e-12, 1e-12)
    gradcheck(fn, *arrays, n_directions=2, elementwise_up_to=4)


# -------------------------------------------------------------------- any shape
BINARY = {
    "add": (ops.add, np.add),
    "sub": (extra_ops.subtract, np.subtract),
    "mul": (ops.multiply, np.multiply),
    "div": (extra_ops.divide, np.divide),
    "pow": (lambda x, y: extra_ops.power(extra_ops.absolute(x), y), lambda x, y: np.abs(x) ** y),
    "maximum": (extra_ops.maximum, np.maximum),
    "minimum": (extra_ops.minimum, np.minimum),
    "where": (lambda x, y: extra_ops.where(x < 0, x, y), lambda x, y: np.where(x < 0, x, y)),
}


@pytest.mark.parametrize("name", BINARY)
@given(shapes=hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, min_side=0, max_side=3), seed=SEEDS)
def test_binary_ops_broadcast_as_numpy(name, shapes, seed):
    a, b = shapes.input_shapes
    check(*BINARY[name], values(seed, a), values(seed + 1, b) + 0.013)


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


REDUCTIONS = {name: (getattr(extra_ops, name), getattr(np, name)) for name in ("sum", "mean", "max", "min")}


@pytest.mark.parametrize("name", REDUCTIONS)
@given(data=st.data(), seed=SEEDS, keepdims=st.booleans())
def test_reductions_match_numpy(name, data, seed, keepdims):
    op, numpy_op = REDUCTIONS[name]
    x = values(
        seed, data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0 if name == "sum" else 1, max_side=4))
    )
    axes = st.none() | hnp.valid_tuple_axes(x.ndim, max_size=x.ndim)
    axis = data.draw(axes | st.integers(-x.ndim, x.ndim - 1) if x.ndim else axes)
    check(lambda t: op(t, axis, keepdims), lambda a: numpy_op(a, axis=axis, keepdims=keepdims), x)


@given(data=st.data(), seed=SEEDS)
def test_basic_indexing_matches_numpy(data, seed):
    x = values(seed, data.draw(SHAPES))
    index = data.draw(hnp.basic_indices(x.shape, allow_newaxis=True))
    check(lambda t: t[index], lambda a: a[index], x)


@given(data=st.data(), seed=SEEDS)
def test_array_indexing_matches_numpy(data, seed):
    x = values(seed, data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4)))
    index = data.draw(
        hnp.integer_array_indices(x.shape, result_shape=hnp.array_shapes(max_dims=2, min_side=0, max_side=3))
    )
    check(lambda t: t[index], lambda a: a[index], x)
    check(lambda t: t[tuple(to_tensor(i, dtype=int) for i in index)], lambda a: a[index], x)


@given(data=st.data(), seed=SEEDS)
def test_mask_indexing_matches_numpy(data, seed):
    x = values(seed, data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4)))
    mask = data.draw(hnp.arrays(bool, x.shape[: data.draw(st.integers(1, x.ndim))]))
    check(lambda t: t[mask], lambda a: a[mask], x)
    check(lambda t: t[to_tensor(mask)], lambda a: a[mask], x)


@given(data=st.data(), seed=SEEDS)
def test_transpose_and_reshape_match_numpy(data, seed):
    x = values(seed, data.draw(SHAPES))
    order = data.draw(st.permutations(range(x.ndim)))
    check(lambda t: t.transpose(order), lambda a: a.transpose(order), x)
    check(lambda t: t.transpose(*order).reshape(t.size), lambda a: a.transpose(order or None).reshape(-1), x)


@given(data=st.data(), seed=SEEDS)
def test_concatenate_stack_and_split_match_numpy(data, seed):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    a, b = values(seed, shape), values(seed + 1, shape)
    check(lambda *ts: extra_ops.concatenate(ts, axis), lambda *xs: np.concatenate(xs, axis), a, b)
    check(lambda *ts: extra_ops.stack(ts, axis), lambda *xs: np.stack(xs, axis), a, b)
    if shape[axis]:
        check(lambda t: extra_ops.concatenate(t.split(shape[axis], axis), axis), lambda x: x, a)


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


def test_unbroadcast_sums_to_shape():
    grad = np.arange(24.0).reshape(2, 3, 4)
    for shape in ((2, 3, 4), (3, 4), (1, 3, 1), (4,), (1,), (), (2, 1, 4)):
        summed = ops.unbroadcast(grad, shape)
        assert summed.shape == shape
        assert summed.sum() == grad.sum()
    assert ops.unbroadcast(np.zeros((2, 0)), (2, 1)).tolist() == [[0], [0]]


def test_split_heads_gradients(rng):
    x = rng.standard_normal((2, 3, 16))
    parts = ops.split_heads(to_tensor(x, dtype=np.float64), (4, 2, 2), 2)
    assert [part.shape for part in parts] == [(2, 3, 4, 2), (2, 3, 2, 2), (2, 3, 2, 2)]
    np.testing.assert_array_equal(np.concatenate([part.array.reshape(2, 3, -1) for part in parts], -1), x)
    factors = [rng.standard_normal(part.shape) for part in parts]

    def rows_labels_and_weights(x):
        q, k, v = ops.split_heads(x, (4, 2, 2), 2)
        return (q * factors[0]).sum() + (k * factors[1]).sum() + (v * factors[2]).sum()

    gradcheck(rows_labels_and_weights, x)
    gradcheck(lambda x: ops.split_heads(x, (4, 2, 2), 2)[1], x)  # the others have no gradient
