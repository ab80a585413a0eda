"""vmap with one call of the function for all items, against a loop over the items, for every op of the registry."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from op_properties import Sample
from test_differentiable_rules import DIFFERENTIABLE, objective

from tricycle import to_tensor, transforms
from tricycle.activation_checkpointing import checkpoint_activations
from tricycle.batched_arrays import BatchedArray, NotVectorizedError
from tricycle.extra_ops import stack, where
from tricycle.layers import Dense, Dropout, Sequential
from tricycle.loss import CrossEntropy
from tricycle.ops import tanh
from tricycle.tensor import Tensor
from tricycle.transforms import functional_call, grad, hvp, jvp, tree_leaves, tree_map, vmap

# The ops that vmap calls for each item in some cases; add an op here if it cannot be computed for all items at once
LOOP = set(
    """
Attention Einsum Embedding cholesky det eigh fold inv recurrence slogdet solve svd unfold BlockSoftmax getitem
GatedDeltaRule StateSpaceScan
""".split()
)


def normal(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(0).standard_normal(shape), False)


def close(actual, expected) -> None:
    assert len(tree_leaves(actual)) == len(tree_leaves(expected))
    for x, y in zip(tree_leaves(actual), tree_leaves(expected)):
        np.testing.assert_allclose(x.array, y.array, 1e-8, 1e-10)


def refuse(*args: object) -> None:
    raise NotVectorizedError


def by_loop(function: Callable, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transforms, "_map_at_once", refuse)
        return function(*args)


def check(function: Callable, *args, at_once: bool = True) -> None:
    """Compare a function that calls vmap with the same function with loops; `at_once`: require no loop."""
    expected = by_loop(function, *args)
    with pytest.MonkeyPatch.context() as patch:
        if at_once:
            patch.setattr(transforms, "_item", refuse)
        close(function(*args), expected)


@pytest.fixture
def n_calls() -> list[int]:
    return [0]


# -------------------------------------------------------------------- every op
@pytest.mark.nightly_except(25)
@pytest.mark.parametrize(("name", "sample"), DIFFERENTIABLE.items(), ids=DIFFERENTIABLE)
def test_ops_on_all_items_equal_a_loop(name: str, sample: Sample):
    op, tensors = name.rsplit("-", 1)[0], sample.tensors()
    if any(x.is_batched for x in tensors):
        return
    floats = tuple(i for i, x in enumerate(tensors) if x.requires_grad)
    stacked = [
        Tensor(np.stack([x.array * f if i in floats else x.array for f in (1, 1.1, 0.9)]), i in floats)
        for i, x in enumerate(tensors)
    ]
    constants = [x.detach() for x in stacked]
    scalar = lambda *xs: objective(sample, list(xs))
    mapped = vmap(sample.call)
    options = {"at_once": op not in LOOP}
    check(mapped, *stacked, **options)
    for inputs in (constants, stacked):  # the gradients of the second have a graph
        check(vmap(grad(scalar, floats)), *inputs, **options)
        check(lambda *xs: grad(lambda *ys: (mapped(*ys) ** 2).sum(), floats)(*xs), *inputs, **options)
    primals = [constants[i] for i in floats]
    with_floats = lambda ys: [ys[floats.index(i)] if i in floats else x for i, x in enumerate(constants)]
    check(lambda *xs: jvp(lambda *ys: mapped(*with_floats(ys)), xs, xs)[1], *primals, **options)
    first = [0] + [None] * (len(tensors) - 1)  # only the first argument differs between items
    squares = lambda *ys: (vmap(sample.call, first)(*ys) ** 2).sum()
    for function in (vmap(grad(scalar, floats), first), lambda *xs: grad(squares, floats)(*xs)):
        check(function, stacked[0], *tensors[1:], at_once=False)


# -------------------------------------------------------------------- models
def test_gradients_of_examples_take_one_call(n_calls):
    model = Sequential(Dense(3, 4, generator=0), tanh, Dense(4, 2, generator=0))
    parameters = tree_map(lambda p: Tensor(p.array.astype(np.float64), False), dict(model.named_parameters()))
    x, labels = normal(5, 3), to_tensor([0, 1, 1, 0, 1], dtype=int)

    def loss(parameters, x, label):
        n_calls[0] += 1
        return CrossEntropy()(label, functional_call(model, parameters, x))

    each = vmap(grad(loss), (None, 0, 0))(parameters, x, labels)
    assert n_calls == [1]
    close(each, by_loop(vmap(grad(loss), (None, 0, 0)), parameters, x, labels))
    close(tree_map(lambda g: g.mean(axis=0), each), grad(loss)(parameters, x, labels))
    product = lambda p, v, x, y: hvp(lambda p: loss(p, x, y), (p,), (v,))[0]
    check(vmap(product, (None, None, 0, 0)), parameters, parameters, x, labels, at_once=False)
    directions = tree_map(lambda p: normal(5, *p.shape), parameters)
    check(vmap(product, (None, 0, 0, 0)), parameters, directions, x, labels)
    ensemble = tree_map(lambda p: Tensor(np.stack([p.array, 2 * p.array]), False), parameters)
    check(vmap(loss, (0, None, None)), ensemble, x, labels)


def test_parameters_outside_get_the_sum_of_the_gradients():
    weights = Tensor(np.array([1.0, 2.0, 3.0]))
    (vmap(lambda x: (weights * x).sum() ** 2)(normal(4, 3))).sum().backward()
    x = normal(4, 3).array
    np.testing.assert_allclose(weights.grad.array, 2 * (x @ [1.0, 2.0, 3.0]) @ x)
    weights.zero_grad()
    same, constant = vmap(lambda x: (weights, 2 * weights))(normal(4, 3))  # not dependent on x
    (same + constant).sum().backward()
    np.testing.assert_allclose(weights.grad.array, [12.0] * 3)
    for f in (
        lambda w: vmap(lambda x: grad(lambda v: (w * v * x).sum())(w))(normal(4, 3)).sum(),
        lambda w: vmap(lambda s: vmap(lambda x: (w * x).sum() ** 3 * s)(normal(4, 3)))(normal(2)).sum(),
    ):
        check(grad(f), weights)
        check(lambda w, f=f: jvp(grad(f), (w,), (w,))[1], weights)
        check(lambda w, f=f: hvp(f, (w,), (w,))[0], weights)


def test_changed_parameter_outside_is_detected():
    weights = Tensor(np.ones(3))
    y = vmap(lambda x: (weights * x).sum())(normal(4, 3)).sum()
    transforms.autograd.increment_versions([weights])
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


# -------------------------------------------------------------------- composition, axes, trees
def test_nested_calls_axes_and_trees():
    x, y = normal(2, 3, 4), normal(4, 3)
    check(vmap(vmap(lambda a, b: a @ b, (None, 0)), (0, None)), x, normal(5, 4))
    check(vmap(vmap(lambda a, b: (a * b).sum()), (0, None)), x, normal(3, 4))
    check(vmap(lambda a: vmap(lambda b: {"sum": [a * b, (b, 1.0)]})(y)), normal(2, 3))
    close(vmap(lambda a, b: a * b, (-1, 0))(x, y), Tensor(x.array.transpose(2, 0, 1) * y.array[:, None]))
    check(lambda y: jvp(vmap(lambda b: grad(lambda c: (tanh(c) ** 2).sum())(b)), (y,), (y,))[1], y)
    check(vmap(lambda b: jvp(grad(lambda c: (tanh(c) ** 2).sum()), (b,), (b,))[1]), y)
    assert not vmap(lambda b: b * 2)(y).is_batched


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: x[i],
        lambda x, i: x[i, 1],
        lambda x, i: x[1, 0] * i,
        lambda x, i: x[[0, 2], 1:],
        lambda x, i: x[..., [0, 2]],
        lambda x, i: x[None, 1:, ::-1] + x[:2, None],
        lambda x, i: x[np.arange(3) > 0],
        lambda x, i: where(x > i, x, 0.0),
    ],
)
def test_indices(f):
    x, i = normal(4, 3, 3), to_tensor([0, 2, 1, 1], dtype=int)
    check(vmap(f), x, i)
    check(vmap(grad(lambda x, i: (f(x, i) ** 2).sum())), x, i)
    check(lambda x, i: grad(lambda x: (vmap(f)(x, i) ** 2).sum())(x), x, i)


# -------------------------------------------------------------------- the loop
def test_control_flow_that_differs_between_items_takes_the_loop(n_calls):
    def f(x):
        n_calls[0] += 1
        return x * 2 if x.sum() > 0 else -x

    x = Tensor(np.array([[1.0, 2.0], [3.0, 1.0], [-1.0, 0.0]]), False)
    close(vmap(f)(x), Tensor(np.array([[2.0, 4.0], [6.0, 2.0], [1.0, 0.0]])))
    assert n_calls == [4]
    close(vmap(lambda x: f(x) if len(x) == 2 and x.shape == (2,) else x)(x[:2]), x[:2] * 2)
    assert n_calls == [5]  # the sums differ, their signs do not


def test_dropout_draws_a_mask_for_each_item():
    dropped = vmap(Dropout(0.5, generator=0))(Tensor(np.ones((8, 16)), False)).array
    assert len(np.unique(dropped, axis=0)) > 1


def test_operations_made_of_other_tensors_take_the_loop():
    layer = Dense(3, 3, generator=0)
    f = lambda x: (checkpoint_activations(layer, x) ** 3).sum()
    x = Tensor(normal(4, 3).array.astype(np.float32), False)
    second = []
    for call in (vmap(f), partial(by_loop, vmap(f))):
        call(x).sum().backward(create_graph=True)
        slope = layer.weights.grad
        layer.zero_grad()
        (slope * slope).sum().backward()
        second.append(layer.weights.grad.array)
        layer.zero_grad()
    np.testing.assert_allclose(*second, 1e-4)
    assert second[0].any()


def test_errors_are_those_of_one_item():
    with pytest.raises(ValueError, match=r"shapes \(3,\) and \(2,\) do not broadcast"):
        vmap(lambda x: x + np.ones(2))(normal(4, 3))
    with pytest.raises(ValueError, match="axis 7 is out of bounds"):
        vmap(lambda x: stack([x, x], axis=7))(normal(4, 3))
    with pytest.raises(ValueError, match="expected ids from 0 to 1, got 5"):
        vmap(lambda x, y: CrossEntropy()(y, x))(normal(2, 2), to_tensor([0, 5], dtype=int))


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        np.unique,
        np.add.reduce,
        np.linalg.inv,
        lambda x: np.zeros((2, 2)).__iadd__(x),
        lambda x: np.zeros(2)[x],
        lambda x: np.add(1.0, 2.0, where=x > 0),
        lambda x: x[[0], :, [1]],
        lambda x: x[x > 0],
        lambda x: x @ np.ones(2),
        np.modf,
        lambda x: float(x[0, 0]),
        lambda x: np.zeros((2, 2)).__setitem__(0, x[0]),
        lambda x: np.add.at(np.zeros((2, 2)), [0], x),
    ],
)
def test_unsupported_uses_raise(use):
    with pytest.raises((NotVectorizedError, IndexError)):
        use(BatchedArray(np.random.default_rng(0).standard_normal((3, 2, 2)), 1))


def test_numbers_equal_for_all_items_are_numbers():
    x = BatchedArray(np.full((3, 1), 2), 1)
    assert (int(x), float(x), x.item(), bool(x == 2), [10, 20, 30][x]) == (2, 2.0, 2, True, 30)
