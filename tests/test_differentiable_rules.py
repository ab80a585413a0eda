"""Gradients of gradients of every op of the registry, against finite differences of its gradients."""

import numpy as np
import pytest
from op_properties import Sample
from test_registry import ALL, import_all_modules

from tricycle import extra_ops, ops
from tricycle.activation_checkpointing import enable_grad
from tricycle.autograd import LARGE
from tricycle.create_graph import gradients
from tricycle.functions import add_residual, linear
from tricycle.gradcheck import gradcheck
from tricycle.layers import Dropout, RMSNorm
from tricycle.tensor import Tensor
from tricycle.transforms import hvp


def at_a_kink(name: str, sample: Sample) -> bool:
    """Whether two operands of a maximum or minimum are equal, where the gradient jumps."""
    return (
        name.startswith(("maximum-", "minimum-")) and len(sample.inputs) == 2 and bool(np.any(np.equal(*sample.inputs)))
    )


DIFFERENTIABLE = {name: sample for name, sample in ALL.items() if not at_a_kink(name, sample)}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def objective(sample: Sample, tensors: list[Tensor]) -> Tensor:
    """A scalar whose gradient depends on the values of the output, so that its gradient does on all inputs."""
    output = sample.call(*tensors)
    weights = np.random.default_rng(1).standard_normal(output.shape)
    return (output * (output + output.xp.asarray(weights))).sum()


def joined_gradients(sample: Sample, tensors: list[Tensor]) -> Tensor:
    """The gradients of all inputs in one vector, with a graph."""
    with enable_grad():
        y = objective(sample, tensors)
        inputs = [x for x in tensors if x.requires_grad]
        grads = gradients([y], [Tensor(np.ones(()), False)], inputs)
    zeros = [Tensor(np.zeros(x.size), False) for x in inputs]
    return extra_ops.concatenate([z if g is None else g.reshape(-1) for g, z in zip(grads, zeros)])


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("sample", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_second_derivatives_match_finite_differences_of_first(sample):
    tensors = sample.tensors()
    first = joined_gradients(sample, tensors)
    objective(sample, tensors).backward()
    expected = [np.zeros(x.size) if x.grad is None else x.grad.array.ravel() for x in tensors if x.requires_grad]
    np.testing.assert_allclose(first.array, np.concatenate(expected), 1e-9, 1e-11)
    if first.size and first.requires_grad:
        options = {"n_directions": 1, "elementwise_up_to": 0, "rtol": 1e-4, "atol": 1e-4}
        gradcheck(lambda *xs: joined_gradients(sample, list(xs)), *sample.tensors(), **options)


def cubes_of_parts(x: Tensor) -> Tensor:
    first, second = x.split(2, axis=1)
    return first * first * second


UNREGISTERED = {
    "split": Sample(cubes_of_parts, (normal(3, 4),), None),
    "dropout": Sample(lambda x: Dropout(0.5, generator=0)(x), (normal(3, 4),), None),
    "transposed linear": Sample(lambda x, w: linear(x, w, transposed=True), (normal(2, 3), normal(4, 3)), None),
    "norm without gain": Sample(RMSNorm(4, gain=False), (normal(3, 4),), None),
    "norm with unit offset": Sample(RMSNorm(4, unit_offset=True), (normal(3, 4),), None),
}


@pytest.mark.parametrize("sample", UNREGISTERED.values(), ids=UNREGISTERED)
def test_second_derivatives_beside_the_registry(sample):
    gradcheck(lambda *xs: joined_gradients(sample, list(xs)), *sample.tensors())


def test_large_residual_addition():
    """From this size on, it is a separate operation."""
    x = Tensor(np.linspace(1, 2, LARGE))
    (product,) = hvp(lambda x: (add_residual(x, x) ** 3).sum(), (x,), (x,))
    np.testing.assert_allclose(product.array, 48 * x.array**2)


def test_every_op_is_checked():
    import_all_modules()
    assert set(ops.OPS) - {name.rsplit("-", 1)[0] for name in DIFFERENTIABLE} == set()
