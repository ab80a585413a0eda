"""Tensor: values in and out, printing, operators, copies."""

import copy
import operator
import pickle
import warnings

import numpy as np
import pytest

from tricycle import Tensor, extra_ops, no_grad, to_tensor
from tricycle.einsum import Einsum
from tricycle.functions import Softmax, linear
from tricycle.loss import MeanSquaredError
from tricycle.tensor import record


def tensor(*shape: int, dtype=np.float64, **kwargs) -> Tensor:
    return to_tensor(np.random.default_rng(sum(shape)).standard_normal(shape), dtype=dtype, **kwargs)


def assert_equal(t: Tensor, expected) -> None:
    np.testing.assert_array_equal(t.array, expected)


# -------------------------------------------------------------------- to_tensor
@pytest.mark.parametrize(
    ("value", "dtype", "expected", "expected_dtype"),
    [
        (2, None, 2, np.float32),
        (2.5, np.float64, 2.5, np.float64),
        (True, None, True, bool),
        ([1, 2], None, [1, 2], np.float32),
        ([1, 2], np.int32, [1, 2], np.int32),
        ([[1, 2], [3, 4]], None, [[1, 2], [3, 4]], np.float32),
        ([True, False], None, [True, False], bool),
        ([True, False], float, [1, 0], np.float64),
        (range(3), None, [0, 1, 2], np.float32),
        (np.array([1.5]), None, [1.5], np.float32),
        (np.array(3.0), None, 3, np.float32),
        (np.float64(3), None, 3, np.float32),
        (np.int32(3), int, 3, int),
        (np.bool_(True), None, True, bool),
        (np.float16([1.5]), None, [1.5], np.float32),
        (Tensor(np.array([1, 2])), None, [1, 2], np.float32),
        ([Tensor(np.array([1, 2])), Tensor(np.array([3, 4]))], None, [[1, 2], [3, 4]], np.float32),
        ([], None, [], np.float32),
    ],
    ids=str,
)
def test_to_tensor_values_and_dtypes(value, dtype, expected, expected_dtype):
    t = to_tensor(value, dtype=dtype)
    assert type(t.array) is np.ndarray
    assert t.dtype == expected_dtype and t.shape == np.shape(expected)
    assert_equal(t, expected)
    assert t.requires_grad == (t.dtype.kind == "f")
    assert (t.grad, t.args, t.back_fns, t.is_batched, t.name) == (None, (), (), False, None)


def test_to_tensor_accepts_memory_maps_and_flags(tmp_path):
    np.save(tmp_path / "x.npy", np.float32([1, 2]))
    t = to_tensor(np.load(tmp_path / "x.npy", mmap_mode="r"), requires_grad=False, is_batched=True, name="x")
    assert type(t.array) is np.ndarray
    assert (t.requires_grad, t.is_batched, t.name, str(t)) == (False, True, "x", "Tensor([1. 2.], name=x)")


def test_to_tensor_copies_only_to_change_dtype():
    array = np.float32([1, 2])
    assert to_tensor(array).array is array
    assert not np.shares_memory(to_tensor(array, dtype=np.float64).array, array)


@pytest.mark.parametrize(
    ("value", "dtype", "error", "message"),
    [
        ("abc", None, TypeError, "numbers.*<U3"),
        (None, None, TypeError, "numbers.*object"),
        ({"a": 1}, None, TypeError, "numbers.*object"),
        (1j, None, TypeError, "numbers.*complex128"),
        ([1.0], str, TypeError, "numbers.*<U"),
        ([1.0], complex, TypeError, "numbers.*complex128"),
        ([[1, 2], [3]], None, ValueError, "rows of equal length"),
    ],
)
def test_to_tensor_rejects_bad_input(value, dtype, error, message):
    with pytest.raises(error, match=message) as caught:
        to_tensor(value, dtype=dtype)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------- attributes and conversions
def test_tensor_attributes():
    t = to_tensor([[1, 2, 3], [4, 5, 6]])
    assert (t.shape, t.ndim, t.size, t.dtype, t.xp, t.on_gpu, len(t)) == ((2, 3), 2, 6, np.float32, np, False, 2)
    assert t.numpy() is t.array
    assert t.from_gpu() is t


def test_to_gpu_rejects_a_tensor_with_a_graph():
    """Its gradient would go back to inputs that lie elsewhere."""
    a, b = to_tensor([1, 2]), to_tensor([3, 4])
    with pytest.raises(RuntimeError, match=r"^to_gpu: .*bmul"):
        (a * b).to_gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there may be no GPU
        (a * b).detach().to_gpu()
        with no_grad():
            (a * b).to_gpu()


@pytest.mark.parametrize("value", [2.5, [2.5], [[2.5]]])
def test_one_element_converts_to_a_number(value):
    t = to_tensor(value)
    assert (t.item(), float(t), int(t), f"{t:.3f}", bool(t)) == (2.5, 2.5, 2, "2.500", True)
    assert type(t.item()) is float and type(to_tensor(2, dtype=int).item()) is int
    assert bool(to_tensor(0)) is False


@pytest.mark.parametrize(
    "turn", [float, int, bool, Tensor.item, "{:.3f}".format], ids=["float", "int", "bool", "item", "format"]
)
@pytest.mark.parametrize("value", [[1, 2], []], ids=str)
def test_other_sizes_do_not_convert_to_a_number(turn, value):
    with pytest.raises(ValueError, match=r"shape \(\d,\)"):
        turn(to_tensor(value))


def test_length_and_iteration():
    rows = list(to_tensor([[1, 2], [3, 4]]))
    assert [str(row) for row in rows] == ["Tensor([1. 2.], name=getitem)", "Tensor([3. 4.], name=getitem)"]
    for refused in (len, iter):
        with pytest.raises(TypeError, match="length"):
            refused(to_tensor(1))


def test_iteration_is_differentiable():
    x = tensor(3, 2)
    first, _, last = x
    (first * last).backward()
    assert_equal(x.grad, [x.array[2], [0, 0], x.array[0]])


def test_hash_is_identity():
    a, b = to_tensor([1]), to_tensor([1])
    assert {a: 1, b: 2} == {a: 1, b: 2} and len({a, b, a}) == 2


def test_array_protocol():
    t = tensor(2, 3)
    assert np.shares_memory(np.asarray(t), t.array)
    assert not np.shares_memory(np.array(t), t.array)
    assert np.asarray(t, dtype=np.float32).dtype == np.float32
    np.testing.assert_array_equal(np.ones_like(t), np.ones((2, 3)))
    with pytest.raises(ValueError):
        np.asarray(t, dtype=np.float32, copy=False)


@pytest.mark.parametrize(
    ("other", "kwargs", "expected"),
    [
        (to_tensor([1, 2]), {}, True),
        (np.array([1, 2]), {}, True),
        ([1, 2], {}, True),
        (1, {}, False),
        ([1, 2.001], {}, False),
        ([1, 2.001], {"rtol": 1e-2}, True),
        ([1, 2.001], {"atol": 1e-2, "rtol": 0}, True),
        ([1, np.nan], {}, False),
    ],
)
def test_close_to_results(other, kwargs, expected):
    assert to_tensor([1, 2]).close_to(other, **kwargs) is expected
    t = to_tensor([1, np.nan])
    assert not t.close_to(t) and t.close_to(t, equal_nan=True)


def test_set_is_batched():
    t = to_tensor([1, 2])
    assert t.to_batched() is t and t.is_batched
    assert t.from_batched() is t and not t.is_batched
    with pytest.raises(ValueError, match="no batch axis"):
        to_tensor(1).to_batched()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x + 1, True),
        (lambda x: x.exp(), True),
        (lambda x: x < 1, True),
        (lambda x: x.sum(), False),
        (lambda x: x.sum(0), False),
        (lambda x: x.mean(-1), True),
        (lambda x: x.max(1), True),
        (lambda x: x[0], False),
        (lambda x: x[None], False),
        (lambda x: x[:, 0], True),
        (lambda x: x[()], True),
        (lambda x: x[1:], True),
        (lambda x: x.reshape(2, 3, 1), True),
        (lambda x: x.reshape(-1), False),
        (lambda x: x.transpose(), False),
        (lambda x: x.transpose(0, 1), True),
        (lambda x: x.split(3)[0], True),
        (lambda x: x @ tensor(3, 4), True),
        (lambda x: Einsum("...i->...")(x), True),
        (lambda x: extra_ops.stack([x, x]), False),
        (lambda x: extra_ops.stack([x, x], 1), True),
        (lambda x: extra_ops.concatenate([x, tensor(1, 3)]), True),
        (lambda x: extra_ops.where(True, x, 0), True),
        (lambda x: extra_ops.where(x > 0, 1.0, tensor(3)), True),
        (lambda x: Softmax()(x), True),
        (lambda x: x.detach(), True),
        (lambda x: MeanSquaredError()(x, x), False),
    ],
)
def test_is_batched_propagates_through_ops(call, expected):
    assert call(tensor(2, 3, is_batched=True)).is_batched is expected
    assert call(tensor(2, 3)).is_batched is False


# -------------------------------------------------------------------- printing
A, B = to_tensor([1, 2, 3]), to_tensor([4, 5, 6])
PRINTED = [  # beside what test_seeds.py shows
    (A - B, "Tensor([-3. -3. -3.], name=bsub)"),
    (A * 2, "Tensor([2. 4. 6.], name=* 2)"),
    (2 * A, "Tensor([2. 4. 6.], name=* 2)"),
    (2 - A, "Tensor([ 1.  0. -1.], name=2 -)"),
    (linear(A, to_tensor([[1], [1], [1]]), None, "dense"), "Tensor([6.], name=dense)"),
    (to_tensor(0.1), "Tensor(0.1)"),
    (to_tensor([], name="none"), "Tensor([], name=none)"),
    (to_tensor([[1], [2]], dtype=int), "Tensor([[1], [2]])"),
]


@pytest.mark.parametrize(("t", "text"), PRINTED, ids=[text for _, text in PRINTED])
def test_repr_of_tensors(t, text):
    assert str(t) == repr(t) == f"{t}" == text


def test_repr_of_large_tensors_has_several_lines():
    text = str(to_tensor(np.zeros((4, 32, 32))))
    assert text.startswith("Tensor([[[0. 0. 0. ... 0. 0. 0.]\n") and text.endswith("]]])")
    assert all(line.startswith(" " * len("Tensor([")) or not line for line in text.splitlines()[1:])


# -------------------------------------------------------------------- operators
ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
NUMBERS = [2, 1.5, True, np.float64(1.5), np.float32(2), np.int64(2), np.True_]
ARRAYS = [np.array(1.5), np.array([1.5, 2, 1]), np.array([1, 2, 3]), np.array([[1.0], [2.0]]), np.float32([1, 2, 1.5])]
OPERANDS = [*NUMBERS, *ARRAYS, [1, 2, 1.5], to_tensor([1, 2.5, 2]), to_tensor([1, 2, 3], dtype=int)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("other", OPERANDS, ids=repr)
@pytest.mark.parametrize("apply", [*ARITHMETIC, *COMPARISONS])
def test_operators_accept_numbers_and_arrays_on_either_side(apply, other, side):
    x = to_tensor([1.5, 2, 3])
    plain = np.asarray(other).astype(np.float32)
    result = apply(other, x) if side == "left" else apply(x, other)
    assert type(result) is Tensor
    assert result.dtype == (bool if apply in COMPARISONS else np.float32)
    np.testing.assert_allclose(result.array, apply(plain, x.array) if side == "left" else apply(x.array, plain), 1e-6)
    if result.dtype != bool:
        result.backward()
        assert x.grad.shape == (3,) and x.grad.dtype == np.float32
    else:
        assert not result.requires_grad


def test_matmul_with_an_array_on_either_side():
    x, array = tensor(2, 3), np.ones((3, 2))
    np.testing.assert_allclose((x @ array).array, x.array @ array)
    np.testing.assert_allclose((array @ x).array, array @ x.array)
    assert (to_tensor([[1, 2]]) @ np.ones((2, 1))).dtype == np.float32
    assert (tensor(4, 2, 3) @ np.ones(3)).shape == (4, 2)
    assert (np.ones(2) @ tensor(4, 2, 3)).shape == (4, 3)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda i, x: i + i, int),
        (lambda i, x: i * 2, int),
        (lambda i, x: i * 2.0, np.float32),
        (lambda i, x: i / 2, np.float32),
        (lambda i, x: i + x, np.float32),
        (lambda i, x: i.mean(), np.float32),
        (lambda i, x: i.sum(), int),
        (lambda i, x: i.exp(), np.float32),
        (lambda i, x: i @ x, np.float32),
        (lambda i, x: Einsum("i,i->")(i, x), np.float32),
        (lambda i, x: extra_ops.where(True, i, x), np.float32),
        (lambda i, x: -i, int),
        (lambda i, x: extra_ops.concatenate([i, x]), np.float32),
        (lambda i, x: extra_ops.stack([x, i]), np.float32),
        (lambda i, x: extra_ops.maximum(i, x), np.float32),
        (lambda i, x: x ** np.float64(2), np.float32),
        (lambda i, x: Softmax()(i), np.float32),
        (lambda i, x: (x < 1) * x, np.float32),
        (lambda i, x: extra_ops.where(True, x, np.array([1.0, 2.0])), np.float32),
    ],
)
def test_integers_never_promote_to_float64(call, dtype):
    i, x = to_tensor([1, 2], dtype=int), to_tensor([1, 2])
    result = call(i, x)
    assert result.dtype == dtype
    if result.requires_grad:
        result.backward()
        assert x.grad.dtype == np.float32
    assert i.grad is None


def test_einsum_with_an_array_keeps_float64():
    third = to_tensor([1 / 3], dtype=np.float64)
    assert Einsum("i,i->")(third, np.array([1 / 3])).item() == (1 / 3) ** 2


@pytest.mark.parametrize("bad", ["a", None, object(), 1j], ids=["text", "None", "object", "complex"])
@pytest.mark.parametrize("apply", ARITHMETIC)
def test_operators_reject_non_numbers(apply, bad):
    for left, right in ((to_tensor([1]), bad), (bad, to_tensor([1]))):
        with pytest.raises(TypeError, match="dtype"):
            apply(left, right)


# -------------------------------------------------------------------- copies and pickles
@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), copy.copy], ids=["deepcopy", "pickle", "copy"]
)
def test_copies_have_no_graph(clone):
    x = tensor(2, 3, is_batched=True)
    y = x * 2
    twin = clone(y)
    assert_equal(twin, y.array)
    assert (twin.name, twin.is_batched, twin.requires_grad) == ("* 2", True, True)
    assert (twin.args, twin.back_fns, twin.grad) == ((), (), None)
    twin.sum().backward()
    assert twin.grad is not None and x.grad is None
    y.backward()
    assert x.grad is not None


def test_first_gradient_of_backward_cannot_be_changed_in_place():
    """All backward passes share it."""
    x = to_tensor(2.0)
    y = record(x.array * 3, (x,), lambda grad, needs_grad: (np.multiply(grad, 3, out=grad),), "op")
    with pytest.raises(ValueError, match="read-only"):
        y.backward()


@pytest.mark.gpu
def test_tensor_round_trips_through_the_gpu():
    x = to_tensor([1, 2])
    (x * 2).backward()
    assert x.to_gpu() is x and x.on_gpu and x.grad.on_gpu and x.xp.__name__ == "cupy"
    assert x.close_to([1, 2]) and str(x) == "Tensor([1. 2.])"
    with pytest.raises(ValueError, match="one device"):
        x + to_tensor([1, 2])
    with pytest.raises(TypeError, match=r"call \.numpy"):
        np.asarray(x)
    assert x.from_gpu() is x and not x.on_gpu and not x.grad.on_gpu
