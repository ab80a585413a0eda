"""backward(create_graph=True): the backward pass on Tensors, its linear maps, rules and errors."""

import gc
import weakref

import numpy as np
import pytest
from test_transforms import X, close, float64

from tricycle import ops, to_tensor
from tricycle.create_graph import RULES, broadcast, cast, copy, gradients, rule, scatter, unbroadcast
from tricycle.extra_ops import exp
from tricycle.gradcheck import gradcheck
from tricycle.layers import Dense
from tricycle.loss import MeanSquaredError
from tricycle.ops import tanh, unary_op
from tricycle.tensor import Tensor, record
from tricycle.transforms import grad

# -------------------------------------------------------------------- linear maps
MAPS = {
    "cast": lambda x: cast(cast(x, np.float32), np.float64),
    "copy": copy,
    "broadcast": lambda x: broadcast(x, (2, 3)),
    "unbroadcast": lambda x: unbroadcast(x, ()),
    "scatter": lambda x: scatter(x, np.array([1, 4, 1]), np.zeros(6)),  # an element twice
    "scattered slice": lambda x: scatter(x, (slice(1, 4),), np.zeros(6), unique=True),
}


@pytest.mark.parametrize("apply", MAPS.values(), ids=MAPS)
def test_linear_maps_and_their_transposes(apply):
    x = float64(X, requires_grad=True)
    y = apply(x)
    weights = float64(np.random.default_rng(0).standard_normal(y.shape), requires_grad=True)
    if apply is not MAPS["cast"]:
        gradcheck(apply, X)
    (transposed,) = gradients([y], [weights], [x])
    close((transposed * x).sum(), (weights * y).sum().array, 1e-6)
    (again,) = gradients([(transposed * x).sum()], [float64(1.0)], [weights])  # the map itself
    close(again, y.array, 1e-6)


# -------------------------------------------------------------------- backward
def test_backward_with_graph_and_penalty_on_gradient():
    x = float64(X, requires_grad=True)
    (x**3).sum().backward(create_graph=True)
    slope = x.grad
    close(slope, 3 * X**2)
    x.zero_grad()
    (slope * slope).sum().backward()
    close(x.grad, 36 * X**3)
    assert not x.grad.requires_grad


def test_backward_with_graph_adds_to_grad_and_calls_on_input():
    x, y = float64(X, requires_grad=True), float64(X, requires_grad=True)
    seen = []
    (x * y).sum().backward(create_graph=True, on_input=seen.append)
    assert {id(leaf) for leaf in seen} == {id(x), id(y)}
    (x + y).sum().backward(create_graph=True)
    close(x.grad, X + 1)
    assert x.grad.array is not y.grad.array and not np.shares_memory(x.grad.array, y.grad.array)


def test_gradient_keeps_batch_flag_dtype_and_shape(rng):
    x = to_tensor(rng.standard_normal((4, 3))).to_batched()
    weights = to_tensor(rng.standard_normal((3, 2)))
    y = (x.einsum("i->i") @ weights).sum()
    y.backward(create_graph=True)
    assert x.grad.is_batched and not weights.grad.is_batched
    assert x.grad.dtype == weights.grad.dtype == np.float32


@pytest.mark.parametrize("n_uses", [1, 3])
def test_first_gradients_equal_those_of_backward(n_uses, rng):
    layer = Dense(3, 3, generator=0)
    x = to_tensor(rng.standard_normal((5, 3)))
    for _ in range(n_uses):
        x = tanh(layer(x))
    loss = MeanSquaredError()(np.ones((5, 3), np.float32), x)
    loss.backward(retain_graph=True)
    expected = [p.grad.array for p in layer.parameters()]
    layer.zero_grad()
    loss.backward(create_graph=True)
    for p, reference in zip(layer.parameters(), expected):
        close(p.grad, reference, 1e-5)


def test_freed_graph_is_detected():
    x = float64(X, requires_grad=True)
    y = (x * x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="freed"):
        y.backward(create_graph=True)


def cube(x: Tensor) -> Tensor:
    return record(x.array**3, (x,), lambda grad, needs_grad: (3 * grad * x.array**2,), "cube")


def test_own_operation_needs_a_rule(monkeypatch):
    with pytest.raises(NotImplementedError, match=r"test_create_graph.cube .*differentiated"):
        grad(grad(cube))(2.0)
    monkeypatch.setattr("tricycle.create_graph.RULES", dict(RULES))
    rule("test_create_graph.cube")(lambda node, grad, variables: [3 * grad * node.args[0] ** 2])
    assert grad(grad(cube))(2.0).item() == 12.0
    monkeypatch.setattr(ops, "OPS", dict(ops.OPS))
    own = unary_op("own_square", lambda xp, x: x * x, lambda xp, g, x, y: 2 * g * xp.where(True, x, x))
    with pytest.raises(NotImplementedError, match="TENSOR_FORMS"):
        grad(grad(own))(2.0)


def test_graph_of_backward_is_freed_with_the_gradient():
    x = float64(X, requires_grad=True)
    y = exp(x)
    node = weakref.ref(y)
    y.sum().backward(create_graph=True)
    del y
    assert node() is not None
    x.zero_grad()
    gc.collect()
    assert node() is None
