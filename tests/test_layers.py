"""Layers: traversal of parameters, training, state, printing, and the gradient of each layer."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tables import bad_input

from tricycle.activation import GeLU, ReLU
from tricycle.gradcheck import gradcheck
from tricycle.layers import Dense, Dropout, Embedding, Layer, LayerNorm, RMSNorm, Sequential
from tricycle.optimisers import AdamW, StochasticGradientDescent
from tricycle.parameter import Parameter
from tricycle.tensor import Tensor, to_tensor
from tricycle.transforms import functional_call


def check_layer_gradients(layer: Layer, *inputs: Any, **forward_options: Any) -> None:
    """Compare the gradients of all parameters and inputs with finite differences, in float64.

    The parameters take random values, for the first ones (biases of 0, gains of 1) would hide mistakes.
    """
    generator = np.random.default_rng(7)
    names = [name for name, _ in layer.named_parameters()]
    values = [0.3 * generator.standard_normal(p.shape) + (p.ndim == 1) for p in layer.parameters()]

    def fn(*tensors: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, tensors)), *tensors[len(names) :], **forward_options)

    gradcheck(fn, *values, *inputs, elementwise_up_to=16)


class Zoo(Layer):
    """Have a parameter in every kind of container, and one Dense layer under two names."""

    def __init__(self) -> None:
        shared = Dense(2, 2, generator=0)
        self.alone = to_tensor(np.ones(3))
        self.layer = shared
        self.in_list = [Dense(2, 3, bias=False, generator=1), to_tensor([1.0])]
        self.in_tuple = (shared, to_tensor([2.0, 3.0]))
        self.in_dict = {"a": to_tensor([[4.0]]), "b": {"deep": [Embedding(3, 2, generator=2)]}}
        self.again = shared.weights
        self.no_parameter = "text", 3, None, np.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


LAYERS: dict[str, Callable[[], Layer]] = {
    "Dense": lambda: Dense(5, 3, generator=0),
    "Dense without bias": lambda: Dense(5, 3, bias=False, generator=0),
    "LayerNorm": lambda: LayerNorm(5),
    "RMSNorm": lambda: RMSNorm(5),
    "Dropout of nothing": lambda: Dropout(0.0),
    "Sequential": lambda: Sequential(Dense(5, 4, generator=0), GeLU(), LayerNorm(4), Dense(4, 2, generator=1)),
}


# -------------------------------------------------------------------- traversal
def test_parameters_in_containers_are_found_and_shared_ones_listed_once() -> None:
    zoo = Zoo()
    assert [(name, p.shape) for name, p in zoo.named_parameters()] == [
        ("alone", (3,)),
        ("layer.weights", (2, 2)),
        ("layer.bias", (2,)),
        ("in_list.0.weights", (2, 3)),
        ("in_list.1", (1,)),
        ("in_tuple.1", (2,)),
        ("in_dict.a", (1, 1)),
        ("in_dict.b.deep.0.weights", (3, 2)),
    ]
    assert [id(p) for p in zoo.parameters()] == [id(p) for _, p in zoo.named_parameters()]
    assert zoo.n_parameters == 3 + 4 + 2 + 6 + 1 + 2 + 1 + 6
    assert len(list(zoo.layers())) == 4


def test_named_layers_lists_each_layer_under_its_first_name() -> None:
    zoo = Zoo()
    named = list(zoo.named_layers())
    assert [name for name, _ in named] == ["", "layer", "in_list.0", "in_dict.b.deep.0"]
    assert [layer for _, layer in named] == [zoo, zoo.layer, zoo.in_list[0], zoo.in_dict["b"]["deep"][0]]
    assert list(zoo.layers()) == [layer for _, layer in named]
    outer = Sequential(Sequential(zoo, zoo.layer), zoo)
    names = [name for name, _ in outer.named_layers()]
    assert names == ["", "steps.0", "steps.0.steps.0", *(f"steps.0.steps.0.{name}" for name, _ in named[1:])]


def test_train_and_eval_reach_every_sublayer() -> None:
    inner = Dropout(0.5)
    model = Sequential(Dense(2, 2), Sequential(inner))
    assert model.training and inner.training
    assert model.eval() is model
    assert not any(layer.training for layer in model.layers())
    assert model.train() is model
    assert all(layer.training for layer in model.layers())


def test_zero_grad_clears_every_gradient(rng: np.random.Generator) -> None:
    model = Sequential(Dense(2, 3), LayerNorm(3))
    model(rng.standard_normal((4, 2))).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "optimiser", [StochasticGradientDescent(0.5), AdamW(0.5, weight_decay=0.1)], ids=lambda o: type(o).__name__
)
def test_update_changes_a_shared_parameter_once(optimiser: Any) -> None:
    shared = Dense(2, 2, generator=0)
    alone = copy.deepcopy(shared)
    model = Sequential(shared, shared)
    for layer in (shared, alone):
        layer.weights.grad = to_tensor(np.ones((2, 2)))
    model.update(optimiser)
    alone.update(copy.deepcopy(optimiser))
    assert np.array_equal(shared.weights.array, alone.weights.array)
    assert shared.weights.grad is None
    assert not np.array_equal(shared.weights.array, Dense(2, 2, generator=0).weights.array)


# -------------------------------------------------------------------- modes
def test_evaluating_restores_the_mode_of_each_layer() -> None:
    dropped, kept = Dropout(0.5), Dropout(0.5)
    model = Sequential(dropped, Sequential(kept))
    kept.eval()
    with pytest.raises(KeyError), model.evaluating():
        assert not any(layer.training for layer in model.layers())
        raise KeyError
    assert model.training and dropped.training and model.steps[1].training
    assert not kept.training


# -------------------------------------------------------------------- cyclic layers
def cyclic_layers() -> tuple[Sequential, Dense]:
    """Return a layer and its child, which refers back to its parent."""
    child = Dense(2, 3, generator=0)
    parent = Sequential(child)
    child.owner = parent
    return parent, child


def test_cyclic_layers_list_each_parameter_once() -> None:
    parent, child = cyclic_layers()
    assert [name for name, _ in parent.named_parameters()] == ["steps.0.weights", "steps.0.bias"]
    assert [name for name, _ in child.named_parameters()] == ["weights", "bias"]
    assert parent.n_parameters == child.n_parameters == 9
    assert set(parent.state_dict()) == {"steps.0.weights", "steps.0.bias"}


def test_cyclic_layers_can_be_printed() -> None:
    parent, child = cyclic_layers()
    assert repr(parent).splitlines() == [
        "Sequential: 9 parameters",
        "  steps.0 Dense: 9 parameters",
        "    weights (2, 3)",
        "    bias (3,)",
        "    owner Sequential: see above",
    ]
    assert repr(child).splitlines()[-2:] == ["  owner Sequential: 9 parameters", "    steps.0 Dense: see above"]


def test_cyclic_layers_train_and_can_be_copied() -> None:
    parent, child = cyclic_layers()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(parent)))
    assert twin.steps[0].owner is twin
    for parameter in parent.parameters():
        parameter.grad = to_tensor(np.ones(parameter.shape))
    parent.update(StochasticGradientDescent(1.0))
    np.testing.assert_allclose(child.bias.array, -1)
    np.testing.assert_allclose(twin.steps[0].bias.array, 0)


# -------------------------------------------------------------------- freezing
def test_frozen_layer_is_unchanged_and_propagates_gradients(rng: np.random.Generator) -> None:
    first, frozen, last = Dense(3, 3), Dense(3, 3), Dense(3, 2)
    assert frozen.freeze() is frozen
    model = Sequential(first, frozen, last)
    before = {name: array.tobytes() for name, array in model.state_dict().items()}
    optimiser = AdamW(0.1, weight_decay=0.5)
    for _ in range(3):
        model(rng.standard_normal((4, 3))).backward()
        assert frozen.weights.grad is None and frozen.bias.grad is None
        model.update(optimiser)
    changed = {name for name, array in model.state_dict().items() if array.tobytes() != before[name]}
    assert changed == {"steps.0.weights", "steps.0.bias", "steps.2.weights", "steps.2.bias"}

    assert model.unfreeze() is model
    model(rng.standard_normal((4, 3))).backward()
    model.update(optimiser)
    assert frozen.weights.array.tobytes() != before["steps.1.weights"]


def test_freezing_clears_the_gradient(rng: np.random.Generator) -> None:
    layer = Dense(3, 2)
    layer(rng.standard_normal((4, 3))).backward()
    layer.freeze()
    assert layer.weights.grad is None and layer.bias.grad is None
    before = layer.weights.array.copy()
    layer.update(StochasticGradientDescent(1.0))
    assert np.array_equal(layer.weights.array, before)
    assert not layer(rng.standard_normal((4, 3))).requires_grad


# -------------------------------------------------------------------- state
def test_state_dict_transfers_to_another_model(rng: np.random.Generator) -> None:
    make = LAYERS["Sequential"]
    model, other = make(), make()
    for p in model.parameters():
        p.array += rng.standard_normal(p.shape).astype(np.float32)
    arrays = [p.array for p in other.parameters()]
    other.load_state_dict(model.state_dict())
    for p, q, array in zip(model.parameters(), other.parameters(), arrays, strict=True):
        assert np.array_equal(p.array, q.array)
        assert q.array is array and not np.shares_memory(p.array, q.array)


def test_load_state_dict_keeps_the_dtype() -> None:
    layer = Dense(2, 1)
    layer.load_state_dict({"weights": np.ones((2, 1)), "bias": np.array([3.0])})
    assert layer.weights.dtype == layer.bias.dtype == np.float32
    assert layer.bias.item() == 3


def test_load_state_dict_reports_every_problem_and_changes_nothing() -> None:
    model = Sequential(Dense(2, 3), Dense(3, 1))
    before = {name: array.copy() for name, array in model.state_dict().items()}
    bad = {
        "steps.0.weights": np.ones((2, 3)),  # right
        "steps.0.bias": np.ones((3, 1)),
        "steps.1.weights": np.array([["x"], ["y"], ["z"]]),
        "steps.7.weights": np.ones(1),
        "head": np.ones(1),
    }
    with pytest.raises(ValueError) as caught:
        model.load_state_dict(bad)
    message = str(caught.value)
    assert message.startswith("Sequential.load_state_dict: ") and "steps.0.weights" not in message
    for problem in ("missing steps.1.bias", "unexpected steps.7.weights", "unexpected head"):
        assert problem in message
    assert re.search(r"steps\.0\.bias: .*\(3,\), got \(3, 1\).*steps\.1\.weights: .*float32, got <U1", message)
    for name, array in model.state_dict().items():
        assert np.array_equal(array, before[name])


BAD_ARRAYS = [[1.0], None, to_tensor([1.0]), np.array([1j]), np.array([None]), np.array([1]), np.array([True])]


@pytest.mark.parametrize("value", BAD_ARRAYS, ids=repr)
def test_load_state_dict_accepts_only_arrays_of_floats(value: Any) -> None:
    layer = Dense(1, 1, generator=0)
    weights = layer.weights.array.copy()
    with pytest.raises(ValueError, match=r"Dense.load_state_dict: bias: .*float32"):
        layer.load_state_dict({"weights": np.zeros((1, 1)), "bias": value})
    assert np.array_equal(layer.weights.array, weights)


# -------------------------------------------------------------------- printing, copies
def test_printed_tree_shows_names_and_sizes() -> None:
    model = Sequential(Dense(1000, 3), ReLU(), Sequential(RMSNorm(3)))
    assert repr(model).splitlines() == [
        "Sequential: 3,006 parameters",
        "  steps.0 Dense: 3,003 parameters",
        "    weights (1000, 3)",
        "    bias (3,)",
        "  steps.2 Sequential: 3 parameters",
        "    steps.0 RMSNorm: 3 parameters",
        "      gain (3,)",
    ]
    assert str(model) == repr(model)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
}
each_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


@each_copy
@pytest.mark.parametrize("name", LAYERS)
def test_copy_computes_the_same_and_is_independent(name: str, duplicate: Callable, rng: np.random.Generator) -> None:
    layer, x = LAYERS[name](), rng.standard_normal((4, 5))
    layer(x)  # a graph is alive, and gradients are there
    (layer(to_tensor(x)) * 2.0).backward()
    twin = duplicate(layer)
    assert np.array_equal(twin(x).array, layer(x).array)
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        assert q.grad is None and q.args == () and q.requires_grad
        assert not np.shares_memory(p.array, q.array)


@each_copy
def test_copy_keeps_sharing_frozen_flags_and_mode(duplicate: Callable) -> None:
    zoo = Zoo()
    zoo.in_list[0].freeze()
    zoo.eval()
    twin = duplicate(zoo)
    assert twin.layer is twin.in_tuple[0] and twin.again is twin.layer.weights
    assert twin.n_parameters == zoo.n_parameters
    assert not twin.in_list[0].weights.requires_grad and twin.layer.weights.requires_grad
    assert not twin.in_list[0].training


@each_copy
def test_copies_drop_the_graph(duplicate: Callable, rng: np.random.Generator) -> None:
    layer = Sequential(Dense(3, 3))
    layer.result = layer(rng.standard_normal((2, 3)))  # a user's own attribute
    twin = duplicate(layer)
    assert layer.result.args and twin.result.args == () and twin.result.back_fns == ()


# -------------------------------------------------------------------- single layers
def test_dense_initial_weights_follow_the_generator() -> None:
    a, b, c = (Dense(6, 6, generator=g).weights.array for g in (3, np.random.default_rng(3), 4))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert not np.array_equal(Dense(6, 6).weights.array, Dense(6, 6).weights.array)
    assert not Dense(3, 2).bias.array.any() and Dense(3, 2, bias=False).bias is None


def test_layers_accept_lists_and_arrays_and_keep_is_batched() -> None:
    layer = Dense(2, 2)
    assert layer([1, 2]).shape == (2,)
    assert layer(np.ones((3, 2))).dtype == np.float32
    for module in (layer, LayerNorm(2), RMSNorm(2), Dropout(0.5), Sequential(layer, ReLU())):
        assert module(to_tensor(np.ones((3, 2)), is_batched=True)).is_batched
        assert not module(to_tensor(np.ones((3, 2)))).is_batched


@pytest.mark.parametrize("scale", [1, 1e-3, 1e3])
@pytest.mark.parametrize(
    "layer", [LayerNorm(6, eps=1e-3), RMSNorm(6, eps=1e-3)], ids=lambda layer: type(layer).__name__
)
def test_norms_use_their_eps(layer: Any, scale: float, rng: np.random.Generator) -> None:
    x = scale * rng.standard_normal((2, 3, 6))
    expected = x - x.mean(-1, keepdims=True) if type(layer) is LayerNorm else x
    expected = expected / np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(layer(x).array, expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_with_gain_offset(rng: np.random.Generator) -> None:
    layer, x = RMSNorm(6, unit_offset=True), rng.standard_normal((2, 3, 6))
    np.testing.assert_allclose(layer(x).array, RMSNorm(6)(x).array, rtol=1e-6)
    layer.gain.array[...] = gain = rng.standard_normal(6)
    np.testing.assert_allclose(layer(x).array, RMSNorm(6)(x).array * (1 + gain), rtol=1e-5)


@pytest.mark.parametrize("layer", [LayerNorm(4), RMSNorm(4)], ids=lambda layer: type(layer).__name__)
def test_norms_of_a_constant_row_are_finite(layer: Layer) -> None:
    x = to_tensor(np.zeros((2, 4)))
    y = layer(x)
    y.backward()
    assert not y.array.any() and np.isfinite(x.grad.array).all()


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_the_given_fraction(probability: float) -> None:
    x = to_tensor(np.ones((200, 500)))
    y = Dropout(probability, generator=1)(x)
    kept = y.array != 0
    deviation = np.sqrt(probability * (1 - probability) / kept.size)
    assert abs(kept.mean() - (1 - probability)) < 5 * deviation
    np.testing.assert_allclose(y.array[kept], 1 / (1 - probability), rtol=1e-6)
    y.backward()
    assert np.array_equal(x.grad.array, y.array)  # the gradient goes where the value went
    # no row or column is dropped as a whole
    assert kept.mean(0).min() > 0 and 0 < kept.mean(1).min() < 1


def test_dropout_follows_its_seed_and_differs_between_calls() -> None:
    x = np.ones((20, 20))
    a, b, c = (Dropout(0.5, generator=seed) for seed in (1, 1, 2))
    first, second = a(x).array, a(x).array
    assert np.array_equal(first, b(x).array) and np.array_equal(second, b(x).array)
    assert not np.array_equal(first, second) and not np.array_equal(first, c(x).array)


def test_dropout_backward_uses_the_mask_of_its_call() -> None:
    layer, x, y = Dropout(0.5, generator=0), to_tensor(np.ones(100)), to_tensor(np.ones(100))
    first, second = layer(x), layer(y)
    (first + second).backward()
    assert np.array_equal(x.grad.array, first.array) and np.array_equal(y.grad.array, second.array)


def test_dropout_in_eval_is_identity_and_draws_nothing() -> None:
    layer = Dropout(0.5, generator=3)
    state = layer.generator.bit_generator.state
    x = to_tensor(np.ones((4, 4)))
    assert np.array_equal(layer.eval()(x).array, x.array)
    assert layer.generator.bit_generator.state == state
    assert not np.array_equal(layer.train()(x).array, x.array)


def test_sequential_applies_layers_ops_and_functions_in_order() -> None:
    double, minus_one = (lambda x: x * 2), (lambda x: x - 1)
    assert Sequential(double, ReLU(), minus_one)(to_tensor([-1.0, 3.0])).array.tolist() == [-1, 5]
    assert Sequential()([1.0]).array.tolist() == [1]


# -------------------------------------------------------------------- bad input
BAD = {
    "Dense size 0": (lambda: Dense(0, 3), "Dense: .*from_size.*got 0"),
    "Dense negative": (lambda: Dense(3, -1), "Dense: .*to_size.*got -1"),
    "Dense fraction": (lambda: Dense(2.5, 3), "Dense: .*from_size.*got 2.5"),
    "Dense bool": (lambda: Dense(True, 3), "Dense: .*from_size.*got True"),
    "Dense shape": (lambda: Dense(3, 2)(np.ones((4, 2))), r"Dense\(from_size=3\): .*last axis.*\(4, 2\)"),
    "Dense scalar": (lambda: Dense(3, 2)(1.0), r"Dense\(from_size=3\): .*last axis.*shape \(\)"),
    "Embedding size": (lambda: Embedding(3, 0), "Embedding: .*to_size.*got 0"),
    "Embedding above": (lambda: Embedding(3, 2)([0, 3]), r"Embedding\(from_size=3\): .*0 to 2.*got 3"),
    "Embedding below": (lambda: Embedding(3, 2)([0, -1]), r"Embedding\(from_size=3\): .*0 to 2.*got -1"),
    "Embedding floats": (lambda: Embedding(3, 2)([0.0, 1.0]), "Embedding: .*whole numbers.*float"),
    "Embedding booleans": (lambda: Embedding(3, 2)([True]), "Embedding: .*whole numbers.*bool"),
    "LayerNorm size": (lambda: LayerNorm(0), "LayerNorm: .*size.*got 0"),
    "LayerNorm eps": (lambda: LayerNorm(3, eps=-1), "LayerNorm: .*eps.*got -1"),
    "LayerNorm shape": (lambda: LayerNorm(3)(np.ones((3, 1))), r"LayerNorm\(size=3\): .*last axis"),
    "RMSNorm size": (lambda: RMSNorm(-2), "RMSNorm: .*size.*got -2"),
    "RMSNorm eps": (lambda: RMSNorm(3, eps=0), "RMSNorm: .*eps.*got 0"),
    "RMSNorm shape": (lambda: RMSNorm(3)(1.0), r"RMSNorm\(size=3\): .*last axis.*shape \(\)"),
    "Dropout 1": (lambda: Dropout(1), "Dropout: .*probability.*got 1"),
    "Dropout negative": (lambda: Dropout(-0.1), "Dropout: .*probability.*got -0.1"),
    "Dropout nan": (lambda: Dropout(np.nan), "Dropout: .*probability.*got nan"),
}


test_bad_input = bad_input(BAD)


def test_layer_without_forward_raises() -> None:
    class Empty(Layer):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty.*forward"):
        Empty()(1)


@pytest.mark.parametrize("first", ["embedding", "head"])
@pytest.mark.parametrize("n_rows", [5, 200])
def test_embedding_table_used_twice_gets_both_gradients(first, n_rows, rng):
    """With more rows than ids, only the rows that were looked up are added to the existing gradient."""
    embedding = Embedding(n_rows, 4)
    ids = rng.integers(0, n_rows, (6, 7))
    factors = rng.standard_normal((n_rows, 4)).astype(np.float32)
    embedded = (embedding(ids) * 2).sum()
    used = (embedding.weights * factors).sum()
    shared = used + (embedding.weights * 3).sum() if n_rows > 5 else used  # gradients that one array holds, and a sum
    loss = embedded + shared if first == "head" else shared + embedded
    loss.backward()
    expected = factors + 2 * np.bincount(ids.ravel(), minlength=n_rows)[:, None] + (3 if n_rows > 5 else 0)
    np.testing.assert_allclose(embedding.weights.grad.array, expected, 1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int64"])
def test_embedding_takes_ids_of_any_integer_dtype(dtype):
    layer = Embedding(300, 2)
    layer(np.array([[1, 2], [1, 100]], dtype)).sum().backward()
    assert layer.weights.grad.array.sum(axis=1)[[0, 1, 2, 100, 299]].tolist() == [0, 4, 2, 2, 0]


def test_embedding_gradient_does_not_modify_a_shared_gradient(rng):
    table = Parameter(rng.standard_normal((50, 4)).astype(np.float32))
    other = Parameter(rng.standard_normal((50, 4)).astype(np.float32))
    embedding = Embedding(50, 4)
    embedding.weights = table
    both = (table + other) * 3  # one array is the gradient of both
    (both.sum() + embedding([[1, 2, 2]]).sum()).backward()
    assert (other.grad.array == 3).all()
    assert table.grad.array[[0, 1, 2], 0].tolist() == [3, 4, 5]
