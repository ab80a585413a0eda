"""Every op of the registry on its samples: gradients, PyTorch's opinion, dtypes, memory, state."""

import importlib
import itertools
import pkgutil
from functools import partial

import numpy as np
import pytest
from samples import SAMPLES, Sample
from test_kernels import strided

import tricycle
from tricycle import ops
from tricycle.gradcheck import gradcheck
from tricycle.tensor import Tensor

ALL = [sample for samples in SAMPLES.values() for sample in samples]
every_sample = pytest.mark.parametrize("sample", ALL, ids=[f"{s}-{i}" for i, s in enumerate(ALL)])


def import_all_modules() -> None:
    for module in pkgutil.walk_packages(tricycle.__path__, "tricycle."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # an optional library
            if error.name is None or error.name.startswith("tricycle"):
                raise


def unsampled() -> set[str]:
    import_all_modules()
    return set(ops.OPS) - set(SAMPLES)


def weights_for(output: Tensor) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(output.shape)


def gradients(tensors: list[Tensor]) -> list[np.ndarray | None]:
    return [None if t.grad is None else t.grad.numpy() for t in tensors]


def differentiate(output: Tensor, tensors: list[Tensor]) -> list[np.ndarray | None]:
    """The gradients of a random weighting of the output."""
    (output * weights_for(output)).sum().backward()
    return gradients(tensors)


def run(sample: Sample, tensors: list[Tensor]) -> tuple[np.ndarray, list[np.ndarray | None]]:
    output = sample.call(*tensors)
    return output.array, differentiate(output, tensors)


def assert_same(actual, expected, rtol=1e-10, atol=1e-12) -> None:
    """Two results of `run`."""
    np.testing.assert_allclose(actual[0], expected[0], rtol, atol)
    assert [g is None for g in actual[1]] == [g is None for g in expected[1]]
    for result, reference in zip(actual[1], expected[1]):
        if result is not None:
            assert result.shape == reference.shape
            np.testing.assert_allclose(result, reference, rtol, atol)


# -------------------------------------------------------------------- the registry
def test_samples_and_ops_correspond():
    assert unsampled() == set()
    assert set(SAMPLES) <= set(ops.OPS)
    assert all(sample.call is not None and sample.inputs for sample in ALL)


def test_missing_samples_are_detected(monkeypatch):
    import_all_modules()
    monkeypatch.setattr(ops, "OPS", dict(ops.OPS))
    ops.register(lambda x: x)
    ops.unary_op("newcomer", lambda xp, x: x, lambda xp, g, x, y: g)
    ops.binary_op("pair", "?", lambda x, y: x, lambda g, x, y, z: g, lambda g, x, y, z: g)
    type("Newcomer", (ops.Op,), {"__module__": "tricycle.somewhere"})
    assert unsampled() == {"<lambda>", "newcomer", "pair", "Newcomer"}


def test_registry_excludes_user_ops_and_private_bases():
    type("Mine", (ops.Op,), {"__module__": "my_project"})
    type("_Base", (ops.Op,), {"__module__": "tricycle.somewhere"})
    assert not {"Mine", "_Base"} & set(ops.OPS)


def test_op_without_forward_raises():
    with pytest.raises(NotImplementedError, match=r"Empty.*forward"):
        type("Empty", (ops.Op,), {"__module__": "my_project"})()(1)


# -------------------------------------------------------------------- every op
@every_sample
def test_gradient_matches_finite_differences(sample):
    gradcheck(sample.call, *sample.tensors())


@every_sample
def test_matches_pytorch(sample):
    torch = pytest.importorskip("torch")
    if sample.torch is None:
        pytest.skip("PyTorch has no such call")
    inputs = [torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in sample.inputs]
    output = sample.torch(torch, *inputs)
    grads = [None] * len(inputs)
    if output.requires_grad and any(x.requires_grad for x in inputs):
        output.backward(torch.tensor(np.random.default_rng(1).standard_normal(tuple(output.shape))))
        grads = [
            x.grad.numpy() if x.grad is not None else np.zeros(x.shape) if x.requires_grad else None for x in inputs
        ]
    assert_same(run(sample, sample.tensors()), (output.detach().numpy(), grads), rtol=1e-9, atol=1e-11)


@every_sample
def test_result_keeps_the_dtype(sample):
    narrow, wide = run(sample, sample.tensors(np.float32)), run(sample, sample.tensors(np.float64))
    for dtype, (output, grads) in ((np.float32, narrow), (np.float64, wide)):
        assert output.dtype == dtype
        assert {g.dtype for g in grads if g is not None} == {np.dtype(dtype)}
    # a sum of terms that nearly cancel is as exact as its terms, so sizes decide
    arrays = [wide[0], *(g for g in wide[1] if g is not None)]
    largest = max(float(np.abs(a).max(initial=0, where=np.isfinite(a))) for a in arrays)
    assert_same(narrow, wide, rtol=1e-4, atol=3e-6 * max(1, largest))


@every_sample
def test_result_does_not_depend_on_memory_layout(sample):
    expected = run(sample, sample.tensors())
    for layout in (strided, partial(np.array, order="F")):
        assert_same(run(sample, sample.tensors(change=layout)), expected)


@every_sample
def test_gradients_share_no_memory_and_inputs_are_unchanged(sample):
    tensors = sample.tensors(change=np.copy)
    before = [t.array.copy() for t in tensors]
    output = sample.call(*tensors)
    kept = output.array.copy()
    output.backward()
    grads = [t.grad.array for t in tensors if t.grad is not None]
    for one, other in itertools.combinations([*grads, output.array], 2):
        assert not np.shares_memory(one, other)
    for grad, tensor in itertools.product(grads, tensors):
        assert not np.shares_memory(grad, tensor.array)
        grad[...] = np.nan  # whatever a user does to a gradient
    for array, original in zip([*(t.array for t in tensors), output.array], [*before, kept]):
        np.testing.assert_array_equal(array, original)


@every_sample
def test_second_backward_over_retained_graph_doubles_gradients(sample):
    tensors = sample.tensors()
    output = sample.call(*tensors)
    output.backward(retain_graph=True)
    doubled = [None if grad is None else 2 * grad for grad in gradients(tensors)]
    output.backward()
    assert_same((output.array, gradients(tensors)), (output.array, doubled))


@every_sample
def test_input_without_requires_grad_gets_no_gradient(sample):
    _, all_grads = run(sample, sample.tensors())
    as_floating = [i for i, a in enumerate(sample.inputs) if a.dtype.kind == "f"]
    for i in as_floating:
        tensors = sample.tensors()
        tensors[i].requires_grad = False
        output = sample.call(*tensors)
        assert output.requires_grad == (len(as_floating) > 1)
        if output.requires_grad:
            expected = [None if j == i else g for j, g in enumerate(all_grads)]
            assert_same((output.array, differentiate(output, tensors)), (output.array, expected))


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_before_backward_are_independent(name):
    """An op object called on several inputs and shapes, then backward through all, last call first."""
    calls = [(sample, sample.tensors()) for sample in SAMPLES[name]]
    outputs = [sample.call(*tensors) for sample, tensors in calls]
    for (sample, tensors), output in reversed(list(zip(calls, outputs))):
        array = output.array
        assert_same((array, differentiate(output, tensors)), run(sample, sample.tensors()))


@pytest.mark.parametrize("name", [name for name, op in ops.OPS.items() if name in SAMPLES and isinstance(op, type)])
def test_op_objects_store_no_call_state(name):
    for sample in SAMPLES[name]:
        if isinstance(sample.call, ops.Op):
            before = dict(vars(sample.call))
            run(sample, sample.tensors())
            assert vars(sample.call) == before
            assert repr(sample.call).startswith(f"{name}(")


@pytest.mark.gpu
@every_sample
def test_gpu_matches_cpu(sample):
    tensors = [t.to_gpu() for t in sample.tensors()]
    output = sample.call(*tensors)
    assert output.on_gpu
    output.backward()
    on_host = sample.tensors()
    expected = sample.call(*on_host)
    expected.backward()
    rtol = 1e-9 if output.dtype.itemsize > 2 else 1e-2  # only on a GPU are activations rounded to 16 bits
    assert_same((output.numpy(), gradients(tensors)), (expected.array, gradients(on_host)), rtol, 1e-2 * rtol)
