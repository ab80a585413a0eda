"""NumPy functions of Tensors against the same functions of arrays and finite differences; DLPack."""

import numpy as np
import pytest

import tricycle
from tricycle import to_tensor
from tricycle.gradcheck import gradcheck
from tricycle.numpy_protocol import CONSTANT, FUNCTIONS, UFUNCS, from_dlpack
from tricycle.tensor import Tensor
from tricycle.transforms import grad, hessian

X = np.random.default_rng(0).uniform(0.5, 1.5, (2, 3, 3)) + 3 * np.eye(3)
Y = np.random.default_rng(1).uniform(0.5, 1.5, (3, 3))


# -------------------------------------------------------------------- code written for NumPy
def plain_code(x, weights):
    """Code without Tensors."""
    hidden = np.tanh(x) @ weights
    hidden = np.maximum(hidden, 0.1) / np.sum(np.exp(hidden), axis=1, keepdims=True)
    joined = np.concatenate([hidden, np.where(hidden > 0.2, hidden, 0.0)], axis=0)
    return np.mean(np.linalg.solve(np.transpose(weights), np.reshape(joined, (3, 4))) ** 2)


def test_plain_numpy_code_is_differentiated():
    x, weights = X[0, :2], Y + 2 * np.eye(3)
    result = plain_code(to_tensor(x, dtype=float), to_tensor(weights, dtype=float))
    assert isinstance(result, Tensor)
    assert result.item() == pytest.approx(plain_code(x, weights))
    gradcheck(plain_code, x, weights)
    second, direction, step = hessian(plain_code)(to_tensor(x, dtype=float), weights).array, np.cos(x), 1e-6
    above, below = (grad(plain_code)(to_tensor(x + sign * step * direction, dtype=float), weights) for sign in (1, -1))
    expected = (above.array - below.array) / (2 * step)
    np.testing.assert_allclose(np.einsum("abcd,cd->ab", second, direction), expected, 1e-5, 1e-7)


CALLS = {
    np.sum: lambda x: np.sum(x, axis=(0, 1), keepdims=True),
    np.mean: lambda x: np.mean(x, -1),
    np.max: lambda x: np.max(x, axis=1),
    np.amax: lambda x: np.amax(x, axis=1),
    np.min: lambda x: np.min(x),
    np.amin: lambda x: np.amin(x, keepdims=True),
    np.concatenate: lambda x: np.concatenate((x, X), axis=-1),
    np.stack: lambda x: np.stack([X, x], axis=1),
    np.where: lambda x: np.where(X > 1, x, 2 * x),
    np.reshape: lambda x: np.reshape(x, (3, -1)),
    np.ravel: np.ravel,
    np.transpose: lambda x: np.transpose(x, (1, 0, 2)),
    np.swapaxes: lambda x: np.swapaxes(x, 0, -1),
    np.expand_dims: lambda x: np.expand_dims(x, (0, -1)),
    np.squeeze: lambda x: np.squeeze(np.expand_dims(x, 1), axis=1),
    np.broadcast_to: lambda x: np.broadcast_to(x, (2, 2, 3, 3)),
    np.var: lambda x: np.var(x, axis=1),
    np.std: lambda x: np.std(x, axis=(0, 2), keepdims=True),
    np.clip: lambda x: np.clip(x, 0.8, 3.9),
    np.dot: lambda x: np.dot(np.reshape(x, (6, 3)), Y),
    np.einsum: lambda x: np.einsum("bij,jk->bk", x, Y),
    np.linalg.solve: lambda x: np.linalg.solve(x, Y),
    np.linalg.inv: np.linalg.inv,
    np.linalg.det: np.linalg.det,
    np.linalg.slogdet: lambda x: np.linalg.slogdet(x)[1],
    np.linalg.cholesky: lambda x: np.linalg.cholesky(x @ np.transpose(x, (0, 2, 1))),
    np.linalg.eigh: lambda x: np.linalg.eigh(x + np.transpose(x, (0, 2, 1)))[0],
    np.linalg.svd: lambda x: np.linalg.svd(x)[1],
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_match_numpy(function):
    result = CALLS[function](to_tensor(X, dtype=float))
    assert isinstance(result, Tensor)
    np.testing.assert_allclose(result.array, CALLS[function](X), 1e-12)
    gradcheck(CALLS[function], X)


@pytest.mark.parametrize("ufunc", UFUNCS, ids=lambda ufunc: ufunc.__name__)
def test_ufuncs_match_numpy(ufunc):
    x = to_tensor(X, dtype=float)
    for array_first in (False, True):
        inputs = ((Y, x) if array_first else (x, Y)) if ufunc.nargs == 3 else (x,)
        result = ufunc(*inputs)
        assert isinstance(result, Tensor)
        np.testing.assert_allclose(result.array, ufunc(*(i.array if i is x else i for i in inputs)), 1e-12)
        if result.requires_grad:
            gradcheck(ufunc, *inputs)
        else:
            zero_gradient = ("sign", "floor", "ceil", "rint", "trunc")
            assert result.dtype == bool or ufunc.__name__ in zero_gradient


def test_concatenation_of_flattened_arrays():
    joined = np.concatenate([to_tensor(X, dtype=float), Y], axis=None)
    np.testing.assert_array_equal(joined.array, np.concatenate([X, Y], axis=None))


def test_gradient_of_a_standard_deviation_of_0_is_0():
    x = to_tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
    np.std(x, axis=1).sum().backward()
    np.testing.assert_allclose(x.grad.array, [[0, 0, 0], [-(6**-0.5), 0, 6**-0.5]], rtol=1e-6)


def test_functions_without_gradient_return_what_numpy_returns():
    x = to_tensor(X, dtype=float)
    assert np.shape(x) == (2, 3, 3)
    assert (np.argmax(x, axis=1) == np.argmax(X, axis=1)).all()
    assert np.allclose(x, X) and np.array_equal(x, X) and np.shares_memory(x, x.array)
    assert type(np.zeros_like(x)) is np.ndarray
    assert not CONSTANT & set(FUNCTIONS)


def test_the_attribute_of_a_tensor_is_none():
    """CuPy calls the reflected operators only then."""
    assert to_tensor(1).__array_ufunc__ is None
    assert callable(Tensor.__array_ufunc__)


# -------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (np.arctan, r"numpy\.arctan: expected a function with an operation on Tensors.*x\.numpy\(\)"),
        (np.median, r"numpy\.median: expected a function"),
        (np.linalg.pinv, r"numpy\.linalg\.pinv: expected a function"),
        (np.add.reduce, r"numpy\.add\.reduce: expected a function"),
        (lambda x: np.add(x, x, out=np.ones(2)), r"numpy\.add: .*besides the operands.* out"),
        (lambda x: np.exp(x, where=np.array([True, False])), r"numpy\.exp: .* where"),
        (
            lambda x: np.sum(x, dtype=float),
            r"numpy\.sum: expected for a Tensor the arguments x, axis, keepdims: .*dtype",
        ),
        (lambda x: np.where(x), r"numpy\.where: expected for a Tensor the arguments condition, x, y"),
        (lambda x: np.linalg.svd(np.reshape(x, (2, 1))), r"numpy\.linalg\.svd: expected full_matrices=False"),
        (lambda x: np.add(np.ones(2), 1, out=x), r"numpy\.add: .* out"),
    ],
)
def test_functions_without_rule_raise(call, message):
    with pytest.raises(TypeError, match=message):
        call(to_tensor([1.0, 2.0]))


def test_errors_of_operations_are_kept():
    with pytest.raises(ValueError, match=r"add: shapes \(3,\) and \(2,\) do not broadcast"):
        np.ones(3) + to_tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="axis 7 is out of bounds"):
        np.expand_dims(to_tensor(X), 7)
    with pytest.raises(ValueError, match="axis 3 is out of bounds"):
        np.swapaxes(to_tensor(X), 0, 3)
    with pytest.raises(ValueError, match=r"numpy\.dot: expected at most 2 axes"):
        np.dot(to_tensor(X), Y)
    array = np.ones(2)
    with pytest.raises(TypeError):
        array += to_tensor([1.0, 2.0])


# -------------------------------------------------------------------- DLPack
def test_numpy_shares_the_memory_of_a_tensor():
    x = to_tensor([[1.0, 2], [3, 4]])
    assert x.__dlpack_device__() == (1, 0)
    array = np.from_dlpack(x)
    assert np.shares_memory(array, x.array)
    assert array.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "bool"])
def test_tensor_shares_the_memory_of_an_array(dtype):
    array = np.ones((3, 4), dtype)[:, ::2]
    x = tricycle.from_dlpack(array)
    assert np.shares_memory(x.array, array)
    assert (x.dtype, x.shape, x.requires_grad) == (array.dtype, (3, 2), array.dtype.kind == "f")
    assert np.shares_memory(from_dlpack(x, requires_grad=False, name="x").array, array)
    assert not from_dlpack(x, requires_grad=False).requires_grad


def test_read_only_arrays():
    array = np.ones(3)
    array.flags.writeable = False
    assert not from_dlpack(array).array.flags.writeable
    with pytest.raises(BufferError, match="readonly"):
        Tensor(array).__dlpack__()


class Elsewhere:
    def __init__(self, kind):
        self.kind = kind

    def __dlpack_device__(self):
        return self.kind, 0

    def __dlpack__(self, **options):
        raise RuntimeError("Unsupported dtype in DLTensor.")


def test_bad_sources(monkeypatch):
    monkeypatch.setattr(tricycle.devices, "gpu_problem", lambda: "CUDA sees no device")
    for source, error, message in [
        ([1.0], TypeError, "from_dlpack: expected an object with __dlpack__ .*got list: use to_tensor"),
        (Elsewhere(8), ValueError, "from_dlpack: expected host memory or CUDA .*device type 8"),
        (Elsewhere(2), RuntimeError, "from_dlpack: expected host memory, got an array on a GPU: CUDA sees no device"),
        (Elsewhere(1), TypeError, "from_dlpack: expected numbers of a dtype that numpy has: Unsupported"),
        (np.ones(2, complex), TypeError, "expected numbers, got dtype complex128"),
    ]:
        with pytest.raises(error, match=message):
            from_dlpack(source)


def test_pytorch_shares_memory_in_both_directions():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(6.0).reshape(2, 3)
    ours = from_dlpack(theirs)
    theirs += 1
    np.testing.assert_array_equal(ours.array, theirs.numpy())
    (ours * ours).sum().backward()
    np.testing.assert_allclose(ours.grad.array, 2 * theirs.numpy())
    back = torch.from_dlpack(to_tensor([1.0, 2]))
    assert back.tolist() == [1, 2]
    with pytest.raises(BufferError, match="grad"):
        from_dlpack(torch.ones(2, requires_grad=True))
