"""Transforms of functions against derivatives by hand, finite differences and each other."""

import gc
import tracemalloc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from tricycle import no_grad, to_tensor
from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.attention import KeyShift, TokenShift
from tricycle.autograd import increment_versions
from tricycle.configs import ModelConfig
from tricycle.extra_ops import exp, sin
from tricycle.gradcheck import gradcheck
from tricycle.layers import Dense, Dropout, Layer, Sequential
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.ops import tanh
from tricycle.optimisers import StochasticGradientDescent
from tricycle.tensor import Tensor
from tricycle.transforms import (
    functional_call,
    grad,
    hessian,
    hvp,
    jacobian,
    jvp,
    tree_leaves,
    tree_map,
    value_and_grad,
    vjp,
    vmap,
)


def float64(values, requires_grad=False) -> Tensor:
    return to_tensor(values, dtype=np.float64, requires_grad=requires_grad)


def close(actual, expected, rtol=1e-10) -> None:
    np.testing.assert_allclose(actual.array if isinstance(actual, Tensor) else actual, expected, rtol, 1e-12)


X = np.array([0.5, -1.2, 2.0])
MATRIX = np.array([[2.0, 1.0, 0.0], [1.0, -3.0, 0.5], [0.0, 0.5, 1.0]])
quadratic = lambda x: 0.5 * (x * (float64(MATRIX) @ x)).sum()
wave = lambda x: (sin(x) * exp(0.5 * x)).sum()


# -------------------------------------------------------------------- derivatives of functions of one Tensor
@pytest.mark.parametrize("requires_grad", [False, True])
def test_repeated_grad_gives_higher_derivatives(requires_grad):
    f, x = (lambda x: x**5), float64(1.5, requires_grad)
    for order, factor in enumerate((5, 20, 60, 120, 120)):
        f = grad(f)
        assert f(x).item() == pytest.approx(factor * 1.5 ** (4 - order))


def test_hessian_of_quadratic_is_its_matrix():
    for x in (float64(X), float64(X, requires_grad=True)):
        close(hessian(quadratic)(x), MATRIX)
        close(hvp(quadratic, (x,), (MATRIX[0],))[0], MATRIX @ MATRIX[0])


def test_jacobian_and_products_with_it_agree(rng):
    f = lambda x: tanh(float64(MATRIX) @ x) * x[0]
    x, v, w = float64(X), rng.standard_normal(3), rng.standard_normal(3)
    matrix = jacobian(f)(x).array
    gradcheck(f, X)
    value, pull_back = vjp(f, x)
    close(value, f(x).array)
    close(pull_back(w)[0], w @ matrix)
    close(pull_back(v)[0], v @ matrix)  # the graph is kept
    value, tangent = jvp(f, (x,), (v,))
    close(value, f(x).array)
    close(tangent, matrix @ v)


def test_transforms_compose(rng):
    x, v = float64(X), rng.standard_normal(3)
    expected = hessian(wave)(x).array @ v
    close(hvp(wave, (x,), (v,))[0], expected)
    close(jvp(grad(wave), (x,), (v,))[1], expected)
    close(grad(lambda x: (grad(wave)(x) * v).sum())(x), expected)
    close(jvp(lambda x: jvp(wave, (x,), (v,))[1], (x,), (v,))[1], expected @ v)
    close(jacobian(jacobian(wave))(x), hessian(wave)(x).array)
    close(jacobian(lambda x: hvp(wave, (x,), (v,))[0])(x), np.diag(v * third_derivative(X)))


def third_derivative(x):
    """Of sin(x) exp(x / 2)."""
    return np.exp(x / 2) * (-np.cos(x) - 1.5 * np.sin(x) + 0.75 * np.cos(x) + 0.125 * np.sin(x))


def test_gradient_of_closed_over_tensor_flows():
    """The derivative of a network with respect to its input can be trained."""
    weights = float64([2.0, 3.0], requires_grad=True)
    slope = grad(lambda x: (weights * x * x).sum())(float64(5.0))
    close(slope, 50.0)
    slope.backward()
    close(weights.grad, [10.0, 10.0])


def test_gradient_of_same_tensor_in_two_places():
    x = float64(3.0)
    first, second = grad(lambda x, y: x * x * y, argnums=(0, 1))(x, x)
    assert (first.item(), second.item()) == (18.0, 9.0)
    assert grad(lambda y: x * y)(x).item() == 3.0  # a closed-over Tensor is a constant
    assert grad(lambda x, y: x * y, argnums=-1)(x, 2.0).item() == 3.0


def test_value_aux_and_keywords():
    f = lambda x, scale: (scale * x * x, {"x": x.numpy()})
    (value, aux), slope = value_and_grad(f, has_aux=True)(float64(3.0), scale=2.0)
    assert (value.item(), slope.item(), aux["x"]) == (18.0, 12.0, 3.0)
    slope, aux = grad(f, has_aux=True)(float64(3.0), scale=2.0)
    assert (slope.item(), aux["x"]) == (12.0, 3.0)


def test_numbers_and_arrays_are_inputs():
    assert grad(lambda x: x * x)(3).item() == 6.0
    assert grad(lambda x: (x * x).sum())(X).dtype == np.float64
    assert grad(lambda x: (x * x).sum())(float64(X).to_batched()).is_batched


# -------------------------------------------------------------------- trees
def test_trees_of_inputs_and_outputs():
    tree = {"a": [float64(X), (float64(2.0),)], "b": None}
    f = lambda tree: (tree["a"][0] * tree["a"][1][0]).sum()
    slopes = grad(f)(tree)
    assert isinstance(slopes["a"][1], tuple) and slopes["b"] is None
    close(slopes["a"][0], [2.0] * 3)
    close(slopes["a"][1][0], X.sum())
    second = hessian(f)(tree)
    close(second["a"][0]["a"][1][0], [1.0] * 3)
    close(second["a"][0]["a"][0], np.zeros((3, 3)))
    (product,) = hvp(f, (tree,), ({"a": [X, (1.0,)], "b": None},))
    close(product["a"][0], [1.0] * 3)
    pair = jacobian(lambda x: {"double": 2 * x, "constant": float64(1.0)})(float64(X))
    close(pair["double"], 2 * np.eye(3))
    close(pair["constant"], np.zeros(3))
    assert [x.size for x in tree_leaves(tree)] == [3, 1]


def test_trees_must_match():
    with pytest.raises(ValueError, match="one structure"):
        tree_map(lambda x, y: x, (1, 2), (1,))
    with pytest.raises(ValueError, match="one structure"):
        tree_map(lambda x, y: x, {"a": 1}, {"b": 1})
    with pytest.raises(ValueError, match=r"shape \(3,\), got \(2,\)"):
        jvp(wave, (float64(X),), (X[:2],))


def test_vmap_gives_gradient_of_each_item(rng):
    batch, weights = float64(rng.standard_normal((4, 3))), float64(X)
    loss = lambda weights, x: (weights * x).sum() ** 2
    each = vmap(grad(loss), (None, 0))(weights, batch)
    close(each, 2 * (batch.array @ X)[:, None] * batch.array)
    close(vmap(lambda x, y: x * y, (1, 0))(batch, float64(X)), batch.array.T * X[:, None])
    close(grad(lambda w: vmap(loss, (None, 0))(w, batch).sum())(weights), each.array.sum(axis=0))
    with pytest.raises(ValueError, match=r"got lengths \[3, 4\]"):
        vmap(loss)(weights, batch)


# -------------------------------------------------------------------- models
def in_float64(model: Layer) -> dict[str, Tensor]:
    return {name: Tensor(p.array.astype(np.float64), False) for name, p in model.named_parameters()}


def check_hvp(loss, parameters, rng) -> None:
    """Compare with the difference of two gradients."""
    direction = tree_map(lambda p: rng.standard_normal(p.shape), parameters)
    (product,) = hvp(loss, (parameters,), (direction,))
    moved = lambda eps: grad(loss)(tree_map(lambda p, d: Tensor(p.array + eps * d, False), parameters, direction))
    above, below = moved(1e-5), moved(-1e-5)
    for name, value in product.items():
        expected = (above[name].array - below[name].array) / 2e-5
        np.testing.assert_allclose(value.array, expected, 1e-4, 1e-5 * max(1e-3, np.abs(expected).max()), err_msg=name)


SMALL = {"vocab_size": 11, "context_window": 8, "embedding_dim": 8, "n_heads": 2, "n_layers": 1}
ARCHITECTURES = {
    "GPT-2": {},
    "modern": {"positions": "rotary", "norm": "rms_norm", "activation": "swiglu", "bias": False, "n_key_heads": 1},
    "Gemma": {"norm_unit_offset": True, "norm": "rms_norm", "score_cap": 2.0, "logit_cap": 3.0, "window": 3},
    "shifts": {"token_shift": True, "key_shift": True, "qk_norm": True, "positions": "rotary", "parallel": True},
}


@pytest.mark.parametrize("fields", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_hessian_vector_product_of_gpt(fields, rng):
    model, tokens = GPT(ModelConfig(**SMALL, **fields)), rng.integers(0, 11, (2, 6))
    loss = lambda p: CrossEntropy()(tokens, functional_call(model, p, tokens))
    check_hvp(loss, tree_map(lambda p: Tensor(p.array + 0.1, False), in_float64(model)), rng)


def test_chunked_loss_and_checkpointing_are_differentiable(rng):
    model, tokens = GPT(ModelConfig(**SMALL)), rng.integers(0, 11, (2, 6))
    chunked = lambda hidden: CrossEntropy().from_hidden(tokens, hidden, model.logits, [], 4)
    whole = lambda hidden: CrossEntropy()(tokens, model.logits(hidden))
    x, v = (float64(rng.standard_normal((2, 6, 8))) for _ in range(2))
    close(hvp(chunked, (x,), (v,))[0], hvp(whole, (x,), (v,))[0].array)
    block, weights = model.blocks[0], rng.standard_normal((2, 6, 8))
    plain = lambda x: (block(x) * weights).sum()
    recomputed = lambda x: (checkpoint_activations(block, x) * weights).sum()
    close(hvp(recomputed, (x,), (v,))[0], hvp(plain, (x,), (v,))[0].array)


@pytest.mark.parametrize("layer", [TokenShift(4), KeyShift(2, 2)], ids=["token_shift", "key_shift"])
def test_shifts(layer, rng):
    parameters = {"mix": float64(rng.standard_normal(4)), "x": float64(rng.standard_normal((2, 3, 4)))}
    check_hvp(lambda p: (functional_call(layer, {"mix": p["mix"]}, p["x"]) ** 3).sum(), parameters, rng)


def test_functional_call_changes_nothing_and_shares_tied_parameters(rng):
    model, tokens = GPT(ModelConfig(**SMALL)), rng.integers(0, 11, (2, 6))
    before = model(tokens).array
    zeros = {name: Tensor(0 * p.array, False) for name, p in model.named_parameters()}
    assert not functional_call(model, zeros, tokens).array.any()
    assert not functional_call(model, {name: x.array for name, x in zeros.items()}, tokens).array.any()
    close(functional_call(model, {}, tokens), before)
    close(model(tokens), before)
    for wrong in ({"nothing": to_tensor(1.0)}, {"norm.gain": to_tensor(1.0)}):
        with pytest.raises(ValueError, match="functional_call: expected"):
            functional_call(model, wrong, tokens)


def test_functional_call_of_containers_and_shared_layers():
    shared = Dense(2, 2, generator=0)
    model = Sequential(shared, tanh, shared, Dropout(0.0))
    values = {name: Tensor(2 * p.array, False) for name, p in model.named_parameters()}
    assert list(values) == ["steps.0.weights", "steps.0.bias"]
    x = np.ones((1, 2), np.float32)
    twice = lambda x: x @ (2 * shared.weights.array)
    close(functional_call(model, values, x), twice(np.tanh(twice(x))), 1e-5)


# -------------------------------------------------------------------- errors
def test_no_graph_is_built_within_no_grad():
    x = float64(X, requires_grad=True)
    y = (x * x).sum()
    with no_grad():
        for differentiate in (
            lambda: y.backward(create_graph=True),
            lambda: grad(wave)(x),
            lambda: hvp(wave, (x,), (x,)),
            lambda: jvp(wave, (x,), (x,)),
            lambda: jacobian(sin)(x),
            lambda: vmap(grad(wave))(x.reshape(3, 1)),
        ):
            with pytest.raises(RuntimeError, match="no_grad"):
                differentiate()


def test_changes_in_place_between_the_orders_are_detected():
    layer, x = Dense(3, 2, generator=0), np.ones((1, 3), np.float32)
    _, pull_back = vjp(lambda x: layer(x).sum(), x)
    slope = grad(lambda x: (layer(x) ** 2).sum())(x)
    (slope**2).sum().backward(retain_graph=True)
    layer.update(StochasticGradientDescent(0.1))
    for differentiate in (
        lambda: pull_back(1.0),
        lambda: (slope**2).sum().backward(create_graph=True),
        lambda: (slope**2).sum().backward(),  # frees what it has visited
    ):
        with pytest.raises(RuntimeError, match="changed in place"):
            differentiate()

    def changes(x):
        y = layer(x)
        increment_versions([layer.weights])
        return y

    for differentiate in (lambda: jvp(changes, (x,), (x,)), lambda: grad(lambda x: changes(x).sum())(x)):
        with pytest.raises(RuntimeError, match="changed in place"):
            differentiate()


def test_inputs_must_be_real_and_floating():
    with pytest.raises(TypeError, match="real floating-point inputs, got int"):
        grad(wave)(to_tensor([1, 2], dtype=int))
    complex_input = Tensor(np.array([1j]))
    with pytest.raises(TypeError, match="complex128"):
        grad(wave)(complex_input)
    with pytest.raises(TypeError, match="expected real numbers, got complex128"):
        (complex_input * complex_input).sum().backward(create_graph=True)
    with pytest.raises(TypeError, match="expected real numbers, got complex128"):
        jvp(lambda x: x * complex_input, (X,), (X,))


def test_functions_must_return_one_element():
    for differentiate in (
        lambda: grad(lambda x: x)(X),
        lambda: grad(lambda x: 1.0)(X),
        lambda: hvp(lambda x: x, (X,), (X,)),
    ):
        with pytest.raises(ValueError, match="a Tensor of one element, got"):
            differentiate()
    with pytest.raises(ValueError, match="argnums"):
        grad(wave, argnums=1)(X)


# -------------------------------------------------------------------- memory
@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_graph_of_gradient_is_freed_with_it(no_garbage_collection):
    nodes = []

    def f(x):
        y = exp(sin(x))
        nodes.append(weakref.ref(y))
        return y.sum()

    x, weights = float64(X), float64(X, requires_grad=True)
    slope = grad(lambda x: f(x * weights))(x)
    assert nodes[0]() is not None and slope.requires_grad
    del slope
    assert nodes.pop()() is None
    tangent = lambda x: jvp(f, (x,), (x,))[1]
    for differentiate in (
        grad(f),
        grad(lambda x: grad(f)(x).sum()),
        hessian(f),
        tangent,
        grad(tangent),
        lambda x: hvp(f, (x,), (x,))[0],
        vmap(grad(lambda x: f(x * 2))),
    ):
        constant = differentiate(x)
        assert not constant.requires_grad and all(node() is None for node in nodes)


def test_hessian_vector_products_use_no_more_memory_when_repeated():
    x = float64(np.ones(10_000))
    sizes = []
    tracemalloc.start()
    for _ in range(4):
        hvp(wave, (x,), (x,)), jvp(grad(wave), (x,), (x,))
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] - sizes[1] < x.array.nbytes


def test_derivatives_of_constant_and_linear_functions_are_zero():
    x, constant = float64(X), lambda x: float64(2.0)
    for differentiate in (
        grad(constant),
        lambda x: hvp(constant, (x,), (x,))[0],
        lambda x: hvp(lambda x: x.sum(), (x,), (x,))[0],
    ):
        close(differentiate(x), np.zeros(3))
    close(hessian(lambda x: x.sum())(x), np.zeros((3, 3)))
    close(jvp(constant, (x,), (x,))[1], 0.0)


@pytest.mark.parametrize("depends_on_values", [False, True])
def test_vmap_calls_functions_with_tensors_of_the_dtype_of_arrays(depends_on_values, rng):
    """Both where the function is called once, and where it is called for each item."""
    x = rng.standard_normal((4, 3))

    def f(x):
        return -x.exp() if depends_on_values and float(x.sum()) > 0 else x.exp()

    expected = np.where(depends_on_values & (x.sum(axis=1, keepdims=True) > 0), -1, 1) * np.exp(x)
    np.testing.assert_allclose(vmap(f)(x).array, expected, 1e-12)


def test_vmap_of_wrong_arguments():
    for call, message in (
        (lambda: vmap(lambda x, y: x)(np.ones((2, 3)), 2.0), r"an axis 0, got shape \(\)"),
        (lambda: vmap(lambda x: x, -3)(np.ones((2, 3))), r"an axis -3, got shape \(2, 3\)"),
        (lambda: vmap(lambda x, y: x, (0,))(np.ones((2, 3)), 2.0), r"in_axes for 2 arguments, got \(0,\)"),
        (lambda: vmap(lambda x: x if x.sum() > 0 else -x)(np.ones((0, 3))), "an item or more"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert vmap(lambda x: x.sum())(np.ones((0, 3))).shape == (0,)


def test_results_that_are_constant_or_empty(rng):
    x = rng.standard_normal(3)
    assert jacobian(lambda x: x[:0])(x).shape == (0, 3)
    assert jacobian(lambda x: x)(2.0).shape == ()
    for derivative in (jvp(lambda x: 3.0, (x,), (x,))[1], vjp(lambda x: 3.0, x)[1](1.0)[0], jacobian(lambda x: 3.0)(x)):
        np.testing.assert_array_equal(derivative.array, np.zeros(derivative.shape))
