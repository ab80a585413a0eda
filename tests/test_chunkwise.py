"""Functions that the CPU kernels compute chunk by chunk: layouts, whole axes, dtypes, warnings and errors.

test_registry.py computes every op in tiny chunks.
"""

import itertools
import operator

import numpy as np
import pytest

from tricycle import kernels
from tricycle.kernels import in_chunks
from tricycle.tensor import Tensor
from tricycle_accelerators import threads
from tricycle_accelerators.cpu import chunkwise

SHAPE = (3, 5, 7)
# operands that broadcast to SHAPE
SHAPES = [SHAPE, (7,), (5, 1), (3, 1, 1), (1, 5, 7), ()]


@pytest.fixture(autouse=True)
def tiny_chunks(monkeypatch):
    monkeypatch.setattr(kernels, "LARGE", 20)
    monkeypatch.setattr(chunkwise, "CHUNK_SIZE", 10)
    monkeypatch.setattr(chunkwise, "MIN_RUN", 2)
    monkeypatch.setattr(threads, "n_threads", lambda: 3)


@pytest.fixture
def normal():
    rng = np.random.default_rng(0)
    return lambda shape=SHAPE: rng.standard_normal(shape)


@pytest.mark.parametrize(("left", "right"), itertools.product([SHAPE], SHAPES))
def test_operands_broadcast(left, right, normal):
    x, y = normal(left), normal(right)
    for a, b in ((x, y), (y, x)):
        np.testing.assert_array_equal(in_chunks(operator.sub, a, b), a - b)
        np.testing.assert_array_equal(in_chunks(lambda a, b: a - 2 * b, a, b), a - 2 * b)


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_results_lie_in_memory_like_the_operands(order, normal):
    x = normal().transpose(order)
    for result in (in_chunks(operator.neg, x), in_chunks(lambda x: 2 - x, x)):
        assert result.strides == (-x).strides
    np.testing.assert_array_equal(in_chunks(lambda x: 2 - x, x), 2 - x)


def test_results_do_not_lie_in_memory_like_a_broadcast_operand(normal):
    x, row = normal(), np.broadcast_to(normal((7,)), SHAPE)
    assert in_chunks(operator.mul, row, x).strides == x.strides
    assert in_chunks(operator.neg, row).flags.c_contiguous


def test_reversed_and_spaced_arrays(normal):
    x, y = normal((6, 10, 7))[::2, ::-2], normal()
    np.testing.assert_array_equal(in_chunks(operator.mul, x, y), x * y)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("reduce", [np.sum, np.max])
def test_whole_axes(axes, reduce, normal):
    x = normal()
    result = in_chunks(lambda x: reduce(x, axis=axes, keepdims=True), x, whole_axes=axes)
    np.testing.assert_allclose(result, reduce(x, axis=axes, keepdims=True), 1e-12)


def test_chunks_divide_only_other_axes(normal):
    shapes = set()
    in_chunks(lambda x: shapes.add(x.shape) or x, normal((30, 7, 2)), whole_axes=(1,))
    assert shapes == {(1, 7, 1), (1, 7, 2)}  # the first call finds the dtype


def test_no_chunk_is_much_larger_than_asked(normal):
    sizes = []
    in_chunks(lambda x: sizes.append(x.size) or x, normal((40, 6)))
    assert max(sizes) <= 10
    assert sum(sizes) == 1 + 240


def test_dtype_is_that_of_the_result(normal):
    x = normal().astype(np.float32)
    assert in_chunks(lambda x: x > 0, x).dtype == bool
    assert in_chunks(operator.truediv, np.arange(100), 2).dtype == np.float64
    assert in_chunks(operator.mul, x, 2).dtype == np.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_floats_are_computed_in_float32(dtype, normal):
    pytest.importorskip("ml_dtypes")
    x, y = normal().astype(dtype), normal((7,)).astype(dtype)
    wide = x.astype(np.float32), y.astype(np.float32)
    for function in (operator.mul, lambda x, y: np.tanh(x) * y + 1):
        result = in_chunks(function, x, y)
        assert result.dtype == x.dtype
        np.testing.assert_array_equal(result, function(*wide).astype(dtype))
    assert in_chunks(operator.add, x, wide[1]).dtype == np.float32
    assert in_chunks(lambda x: x > 0, x).dtype == bool


def test_sums_in_place(normal):
    x, y = normal(), normal()
    expected = x + y
    assert kernels.add(x, y, x) is x
    np.testing.assert_array_equal(x, expected)
    turned = np.empty(SHAPE[::-1]).T
    assert kernels.add(x, y, turned) is turned
    np.testing.assert_array_equal(turned, x + y)


def test_warnings_follow_the_settings_of_the_caller(normal):
    with np.errstate(divide="ignore"):
        assert np.isinf(in_chunks(lambda x: x / 0, 1 + abs(normal()))).all()
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        in_chunks(lambda x: x / 0, 1 + abs(normal()))


def test_shapes_that_do_not_broadcast_raise_the_error_of_the_op(normal):
    with pytest.raises(ValueError, match=r"mul: shapes \(3, 5, 7\) and \(3, 5, 6\)"):
        Tensor(normal()) * Tensor(normal((3, 5, 6)))


def test_same_bits_at_each_call(normal):
    x = normal((40, 33))
    results = [in_chunks(lambda x: np.tanh(x) * x, x) for _ in range(3)]
    assert all(np.array_equal(results[0], other) for other in results)


@pytest.mark.parametrize("shape", [(), (5,), (2, 9)])
def test_few_elements_are_computed_at_once(shape, normal):
    x = normal(shape)
    assert "too few elements" in str(kernels.explain(kernels.compute_in_chunks, x, np.exp, (x,)))


def test_one_whole_array_cannot_be_divided(normal):
    x = normal()
    assert "no axis to divide" in str(kernels.explain(kernels.compute_in_chunks, x, np.sum, (x,), (0, 1, 2)))
