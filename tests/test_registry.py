"""Every op of the registry on samples: values, gradients, repeated backward passes, state; see test_properties.py."""

import importlib
import pkgutil

import numpy as np
import pytest
from op_properties import LAYERS, PROPERTIES, Sample, samples_of

import tricycle
from tricycle import kernels, ops
from tricycle.debug import use_reference
from tricycle.gradcheck import gradcheck
from tricycle.tensor import Tensor
from tricycle_accelerators import threads
from tricycle_accelerators.cpu import chunkwise

SAMPLES = {name: samples_of(name) for name in PROPERTIES | LAYERS}
ALL = {f"{name}-{i}": sample for name, samples in SAMPLES.items() for i, sample in enumerate(samples)}
every_sample = pytest.mark.parametrize("sample", ALL.values(), ids=ALL)


def import_all_modules() -> None:
    for module in pkgutil.walk_packages(tricycle.__path__, "tricycle."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # an optional library
            if error.name is None or error.name.startswith("tricycle"):
                raise


def without_property() -> set[str]:
    import_all_modules()
    return set(ops.OPS) - set(PROPERTIES)


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
def test_properties_and_ops_correspond():
    assert without_property() == set()
    assert set(PROPERTIES) <= set(ops.OPS)
    assert all(len(samples) >= 2 for samples in SAMPLES.values())


def test_missing_properties_are_detected(monkeypatch):
    import_all_modules()
    monkeypatch.setattr(ops, "OPS", dict(ops.OPS))
    ops.register(lambda x: x)
    ops.unary_op("newcomer", lambda xp, x: x, lambda xp, g, x, y: g)
    ops.binary_op("pair", "?", lambda x, y: x, lambda g, x, y, z: g, lambda g, x, y, z: g)
    type("Newcomer", (ops.Op,), {"__module__": "tricycle.somewhere"})
    assert without_property() == {"<lambda>", "newcomer", "pair", "Newcomer"}


def test_registry_excludes_user_ops_and_private_bases():
    type("Mine", (ops.Op,), {"__module__": "my_project"})
    type("_Base", (ops.Op,), {"__module__": "tricycle.somewhere"})
    assert not {"Mine", "_Base"} & set(ops.OPS)


def test_op_without_forward_raises():
    with pytest.raises(NotImplementedError, match=r"Empty.*forward"):
        type("Empty", (ops.Op,), {"__module__": "my_project"})()(1)


# -------------------------------------------------------------------- every op
@pytest.fixture
def tiny_chunks(monkeypatch):
    monkeypatch.setattr(kernels, "LARGE", 1)
    monkeypatch.setattr(chunkwise, "CHUNK_SIZE", 3)
    monkeypatch.setattr(chunkwise, "MIN_RUN", 2)
    monkeypatch.setattr(threads, "n_threads", lambda: 2)


@every_sample
def test_values_match_numpy(sample):
    if not sample.needs_torch:
        with np.errstate(divide="ignore"):  # the logarithm of an empty sum
            expected = sample.expected(np, *sample.inputs)
        np.testing.assert_allclose(sample.call(*sample.tensors()).array, expected, 1e-9, 1e-11)


@every_sample
def test_gradient_matches_finite_differences(sample):
    """Check the gradients of the kernels that run here, and those of the reference kernels."""
    options = {"n_directions": 2, "elementwise_up_to": 4, "rtol": 1e-4, "atol": 1e-5}
    gradcheck(sample.call, *sample.tensors(), **options)
    with use_reference():
        gradcheck(sample.call, *sample.tensors(), **options)


@every_sample
def test_chunks_give_the_results_of_the_reference(sample, tiny_chunks):
    actual = run(sample, sample.tensors())
    with use_reference():
        assert_same(actual, run(sample, sample.tensors()), 1e-9, 1e-11)


@every_sample
def test_gradients_of_some_inputs_equal_those_of_all(sample):
    """Each input alone needs a gradient, then each input but one: an op computes only what is needed."""
    _, expected = run(sample, sample.tensors())
    indices = [i for i, gradient in enumerate(expected) if gradient is not None]
    for needed in [[i] for i in indices] + [[j for j in indices if j != i] for i in indices if len(indices) > 2]:
        tensors = sample.tensors()
        for i in set(indices).difference(needed):
            tensors[i].requires_grad = False
        output, actual = run(sample, tensors)
        assert_same((output, actual), (output, [expected[i] if i in needed else None for i in range(len(expected))]))


@every_sample
def test_second_backward_over_retained_graph_doubles_gradients(sample):
    tensors = sample.tensors()
    output = sample.call(*tensors)
    output.backward(retain_graph=True)
    doubled = [None if grad is None else 2 * grad for grad in gradients(tensors)]
    output.backward()
    assert_same((output.array, gradients(tensors)), (output.array, doubled))


@pytest.mark.parametrize("name", SAMPLES)
def test_calls_before_backward_are_independent(name):
    """An op object called on several inputs and shapes, then backward through all, last call first."""
    calls = [(sample, sample.tensors()) for sample in SAMPLES[name]]
    outputs = [sample.call(*tensors) for sample, tensors in calls]
    for (sample, tensors), output in reversed(list(zip(calls, outputs))):
        array = output.array
        assert_same((array, differentiate(output, tensors)), run(sample, sample.tensors()))


@pytest.mark.parametrize("name", [name for name in SAMPLES if isinstance(ops.OPS.get(name), type)])
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
