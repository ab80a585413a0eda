"""What the first description of this library showed its users must run here, with the values it printed.

Printed values are compared up to the last digit of float32: how `exp` rounds differs between builds of NumPy.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

from tricycle import devices
from tricycle.activation import ReLU
from tricycle.blocks import MultiHeadSelfAttention
from tricycle.einsum import Einsum
from tricycle.functions import Softmax
from tricycle.gradcheck import gradcheck
from tricycle.layers import Dense, Sequential
from tricycle.loss import CrossEntropy
from tricycle.optimisers import StochasticGradientDescent
from tricycle.tensor import Tensor, to_tensor

NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")


def printed(tensor: Tensor) -> tuple[str, list[float]]:
    """What `print` shows: the text without its numbers' digits, and the numbers."""
    body, name, rest = str(tensor).partition(", name=")
    return NUMBER.sub("#", body) + name + rest, [float(n) for n in NUMBER.findall(body)]


def assert_prints(tensor: Tensor, expected: str) -> None:
    """The same text, but for the last digit of float32's numbers, and no digit more."""
    body, name, rest = expected.partition(", name=")
    text, numbers = printed(tensor)
    assert text == NUMBER.sub("#", body) + name + rest
    np.testing.assert_allclose(numbers, [float(n) for n in NUMBER.findall(body)], rtol=2.5e-7)
    assert len(str(tensor)) <= len(expected) + 1


# -------------------------------------------------------------------- Tensor
def test_printing_addition_comparison_softmax() -> None:
    a, b = to_tensor([1, 2, 3]), to_tensor([4, 5, 6])
    assert str(a) == "Tensor([1. 2. 3.])"
    assert str(a + b) == "Tensor([5. 7. 9.], name=badd)"
    assert str(a < b) == "Tensor([ True  True  True])"
    assert_prints(Softmax()(a), "Tensor([0.09003057 0.24472848 0.66524094], name=softmax)")


# -------------------------------------------------------------------- automatic differentiation
def test_the_derivative_of_a_polynomial() -> None:
    x = to_tensor(2)
    y = x**2 + 3 * x + 4
    assert str(y) == "Tensor(14.0, name=+ 4)"
    y.backward()
    assert str(x.grad) == "Tensor(7.0)"


def test_the_derivative_of_a_product_in_five_dimensions() -> None:
    shape = (6, 5, 4, 3, 2)
    a, b = to_tensor(np.random.random(shape)), to_tensor(np.random.random(shape))
    c = a * b
    c.backward()
    assert a.grad.close_to(b) and b.grad.close_to(a)
    assert not a.grad.close_to(a)


@pytest.mark.parametrize("n_tokens", [32, 20, 1])
def test_differentiating_through_attention(n_tokens: int) -> None:
    attention = MultiHeadSelfAttention(embedding_dim=32, n_heads=2, context_window=32)
    input = to_tensor(np.ones((4, n_tokens, 32)), is_batched=True)
    output = attention(input)
    output.backward()
    assert output.shape == input.grad.shape == (4, n_tokens, 32)
    assert str(input.grad).startswith("Tensor([[[") and np.abs(input.grad.array).max() > 0


def test_result_has_args_and_back_fns() -> None:
    a, b = to_tensor([1, 2]), to_tensor([3, 4])
    c = a * b
    assert [id(arg) for arg in c.args] == [id(a), id(b)]
    ones = to_tensor([1, 1])
    for back_fn, expected in zip(c.back_fns, ([3, 4], [1, 2]), strict=True):
        assert np.asarray(back_fn(ones)).tolist() == expected


# -------------------------------------------------------------------- einsum
EINSUMS = [
    ("ij->ji", [[[1, 2], [3, 4]]], "Tensor([[1. 3.], [2. 4.]], name=einsum ij->ji)"),
    ("ij->i", [[[1, 2], [3, 4]]], "Tensor([3. 7.], name=einsum ij->i)"),
    ("ij,jk->ik", [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "Tensor([[19. 22.], [43. 50.]], name=einsum ij,jk->ik)"),
    ("ij->", [[[1, 2], [3, 4]]], "Tensor(10.0, name=einsum ij->)"),
    ("ij->j", [[[1, 2], [3, 4]]], "Tensor([4. 6.], name=einsum ij->j)"),
]


@pytest.mark.parametrize("subscripts, inputs, expected", EINSUMS, ids=[row[0] for row in EINSUMS])
def test_einsum(subscripts: str, inputs: list, expected: str) -> None:
    assert str(Einsum(subscripts)(*map(to_tensor, inputs))) == expected


def test_the_derivative_of_a_transpose_by_hand() -> None:
    a = to_tensor([[1, 2], [3, 4]])
    y = Einsum("ij->ji")(a)
    grad = to_tensor(np.ones_like(y))
    derivative = Einsum("ji->ij")(grad)
    assert grad.shape == y.shape and grad.array.tolist() == [[1, 1], [1, 1]]
    y.backward()
    assert derivative.close_to(a.grad)


def test_the_derivative_of_a_dense_layer_by_hand() -> None:
    inputs = to_tensor(np.random.random((5, 4, 3, 2)))
    weights = to_tensor(np.random.random((2, 6)))
    y = Einsum("zxTb,bW->zxTW")(inputs, weights)
    assert y.shape == (5, 4, 3, 6)
    grad = to_tensor(np.ones_like(y))
    assert isinstance(np.ones_like(y), np.ndarray) and grad.shape == y.shape
    derivative = Einsum("zxTb,zxTW->bW")(inputs, grad)
    y.backward()
    assert derivative.close_to(weights.grad, rtol=1e-4)
    assert Einsum("zxTW,bW->zxTb")(grad, weights).close_to(inputs.grad, rtol=1e-4)


def test_weights_that_do_not_fit_their_inputs_raise() -> None:
    """The shapes as they were first written down: 2 features meet weights for 3."""
    with pytest.raises(ValueError, match=r"^Einsum\('zxTb,bW->zxTW'\): .*'b'.*2.*3"):
        Einsum("zxTb,bW->zxTW")(to_tensor(np.ones((5, 4, 3, 2))), to_tensor(np.ones((3, 6))))


# -------------------------------------------------------------------- a simple network
def test_dense_layer_relu_and_cross_entropy() -> None:
    out = Dense(from_size=3, to_size=1)(to_tensor([1, 2, 3]))
    assert re.fullmatch(r"Tensor\(\[-?[\d.]+(e-\d+)?\], name=dense\)", str(out))
    assert str(ReLU()(to_tensor([-1, 0, 1]))) == "Tensor([0. 0. 1.], name=> 0)"
    label = to_tensor([0, 1, 2], dtype=int)
    predicted = to_tensor([[0, 0, 1], [0, 0, 1], [0, 0, 1]])
    loss = CrossEntropy()(label, predicted)
    assert_prints(loss, "Tensor(1.2181114, name=cross_entropy)")
    assert f"{loss:.3f}" == "1.218"


def test_updating_the_weights_of_a_model() -> None:
    model = Sequential(Dense(4, 16), ReLU(), Dense(16, 3))
    optimiser = StochasticGradientDescent(learning_rate=1e-1)
    before = copy.deepcopy(model)
    model(to_tensor([1, 2, 3, 4])).backward()
    grads = [p.grad.array.copy() for p in model.parameters()]
    model.update(optimiser)
    for new, old, grad in zip(model.parameters(), before.parameters(), grads, strict=True):
        np.testing.assert_allclose(new.array, old.array - 0.1 * grad, rtol=1e-5, atol=1e-6)
        assert new.grad is None


@pytest.mark.parametrize("seed", range(5))
def test_iris(seed: int) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    X, y = datasets.load_iris(return_X_y=True)
    inputs = to_tensor(X, is_batched=True)
    outputs = to_tensor(y, is_batched=True, dtype=int)
    generator = np.random.default_rng(seed)
    model = Sequential(Dense(4, 16, generator=generator), ReLU(), Dense(16, 3, generator=generator))
    loss_fn, optimiser = CrossEntropy(), StochasticGradientDescent(learning_rate=1e-1)
    for step in range(1000):
        y_pred = model(inputs)
        loss = loss_fn(outputs, y_pred)
        if step == 0:
            first = loss.item()
            assert re.fullmatch(r"Tensor\(\d+\.\d+, name=cross_entropy\)", f"{loss}")
        loss.backward()
        model.update(optimiser)
    assert float(loss) < 0.15 < first
    predicted_labels = np.argmax(y_pred.array, axis=-1)
    assert (predicted_labels == outputs.array).mean() >= 0.97


# -------------------------------------------------------------------- batching
def test_batched_einsum_equals_einsum_of_each_item() -> None:
    inputs = to_tensor(np.random.random((16, 8, 8)))
    weights = to_tensor(np.random.random((8, 8)))
    one_by_one = [Einsum("ij,jk->ik")(inp, weights) for inp in inputs]
    together = Einsum("aij,jk->aik")(inputs, weights)
    assert len(one_by_one) == 16 and together.shape == (16, 8, 8)
    for one, all_ in zip(one_by_one, together):
        assert one.close_to(all_)


def test_a_batched_tensor_carries_its_batch_through_einsum() -> None:
    inputs, weights = to_tensor(np.random.random((5, 3, 2))), to_tensor(np.random.random((2, 4)))
    assert not inputs.is_batched
    assert inputs.to_batched() is inputs and inputs.is_batched
    out = Einsum("ij,jk->ik")(inputs, weights)
    assert out.is_batched and out.close_to(inputs.array @ weights.array, rtol=1e-4)
    out.backward()
    expected = np.einsum("aij,aik->jk", inputs.array, np.ones((5, 3, 4)))
    assert weights.grad.close_to(expected, rtol=1e-4)
    assert not inputs.from_batched().is_batched


# -------------------------------------------------------------------- xp and devices
def test_xp_is_numpy_for_an_array_in_host_memory() -> None:
    tensor = to_tensor([1, 2, 3])
    assert tensor.xp == np and not tensor.on_gpu


@pytest.mark.gpu
def test_xp_is_cupy_after_a_move() -> None:
    cp = pytest.importorskip("cupy")
    tensor = to_tensor([1, 2, 3])
    tensor.to_gpu()
    assert tensor.xp == cp and tensor.on_gpu
    tensor.from_gpu()
    assert tensor.xp == np and tensor.array.tolist() == [1, 2, 3]


@pytest.mark.skipif(devices.gpu_problem() is None, reason="a GPU is there")
def test_to_gpu_without_a_gpu_raises_and_changes_nothing() -> None:
    tensor = to_tensor([1, 2, 3])
    with pytest.warns(UserWarning, match=r"^to_gpu: .*GPU.*CPU"):
        assert tensor.to_gpu() is tensor
    assert tensor.xp == np and tensor.array.tolist() == [1, 2, 3]


# -------------------------------------------------------------------- an op of a user's own
class FusedSoftmax:
    """Written as users were told to: state on the object, the graph's attributes set by hand."""

    def forward(self, tensor: Tensor) -> Tensor:
        xp = tensor.xp
        powers = xp.exp(tensor.array - xp.max(tensor.array, axis=-1, keepdims=True))
        self._out = powers / xp.sum(powers, axis=-1, keepdims=True)

        result = to_tensor(self._out)
        result.args = (tensor,)
        result.name = "softmax"
        result.is_batched = tensor.is_batched
        result.back_fns = (self.backward,)
        return result

    def backward(self, grad: Tensor) -> Tensor:
        xp = grad.xp
        inner = xp.sum(grad.array * self._out, axis=-1, keepdims=True)
        self._grad = self._out * (grad.array - inner)
        return to_tensor(self._grad, is_batched=grad.is_batched, requires_grad=grad.requires_grad)

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.forward(tensor)


class AttentionScores:
    """The same style in an op whose forward slices, transposes and masks arrays by `xp`."""

    def __init__(self, n_heads: int) -> None:
        self.n_heads = n_heads

    def __call__(self, tensor: Tensor) -> Tensor:
        assert tensor.is_batched
        xp, width = tensor.xp, tensor.shape[-1] // 3
        self._input = tensor
        query, key, value = (tensor[:, :, i * width : (i + 1) * width].array for i in range(3))
        n_items, n_tokens, _ = key.shape
        heads = (n_items, n_tokens, self.n_heads, width // self.n_heads)
        query, key, value = (xp.einsum("BTNH->BNTH", part.reshape(heads)) for part in (query, key, value))
        attention = xp.einsum("BNIh, BNJh -> BNIJ", query, key) / np.sqrt(heads[-1])
        attention = xp.where(xp.triu(xp.ones((n_tokens, n_tokens), bool), 1), -xp.inf, attention)
        exp = xp.exp(attention - xp.max(attention, axis=-1, keepdims=True))
        attention = exp / xp.sum(exp, axis=-1, keepdims=True)
        out = xp.einsum("BNTj, BNjH -> BTNH", attention, value).reshape(n_items, n_tokens, width)
        return to_tensor(out, is_batched=True)


def test_a_fused_op_of_a_user_runs_inside_a_graph(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6)).astype(np.float32)
    weighting = rng.standard_normal((4, 3)).astype(np.float32)
    results = []
    for softmax in (FusedSoftmax(), Softmax()):
        tensor = to_tensor(x, is_batched=True)
        model = Sequential(Dense(6, 3, generator=1), softmax, Dense(3, 3, generator=2))
        out = model(tensor)
        assert out.is_batched and out.requires_grad
        (out * weighting).sum().backward()
        results.append([out.array, tensor.grad.array, *(p.grad.array for p in model.parameters())])
    for expected, actual in zip(*results, strict=True):
        np.testing.assert_allclose(expected, actual, rtol=1e-4, atol=1e-6)


def test_user_defined_fused_op_as_last_and_as_first_op() -> None:
    a = to_tensor([1, 2, 3])
    out = FusedSoftmax()(a)
    assert_prints(out, "Tensor([0.09003057 0.24472848 0.66524094], name=softmax)")
    out.backward()
    np.testing.assert_allclose(a.grad.array, 0, atol=1e-7)  # the sum of a softmax is always 1
    b = to_tensor([1, 2, 3])
    (FusedSoftmax()(b) * to_tensor([0, 0, 1])).backward()
    p = np.exp([1, 2, 3]) / np.exp([1, 2, 3]).sum()
    np.testing.assert_allclose(b.grad.array, p[2] * (np.array([0, 0, 1]) - p), rtol=1e-5)


def test_gradcheck_serves_a_user(rng: np.random.Generator) -> None:
    class InFloat64(FusedSoftmax):
        def forward(self, tensor: Tensor) -> Tensor:
            result = super().forward(tensor)
            result.array = self._out  # to_tensor makes float32 unless told otherwise
            return result

        def backward(self, grad: Tensor) -> Any:
            super().backward(grad)
            return self._grad

    gradcheck(InFloat64(), rng.standard_normal((3, 4)))

    class Wrong(InFloat64):
        def backward(self, grad: Tensor) -> Any:
            return grad.array * self._out

    with pytest.raises(ValueError, match=r"^gradcheck: softmax, input 0"):
        gradcheck(Wrong(), rng.standard_normal((3, 4)))


def test_attention_written_in_einsums_equals_the_layer(rng: np.random.Generator) -> None:
    layer = MultiHeadSelfAttention(embedding_dim=12, n_heads=3, context_window=16)
    x = to_tensor(rng.standard_normal((2, 10, 12)), is_batched=True)
    spelt_out = layer.projection(AttentionScores(3)(layer.qkv(x)))
    np.testing.assert_allclose(layer(x).array, spelt_out.array, rtol=1e-4, atol=1e-5)
