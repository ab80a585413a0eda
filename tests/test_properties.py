"""Every op of the registry, and layers, on calls that Hypothesis draws: any shape, memory layout, dtype and aliasing.

Two opinions: PyTorch in float64; where there is none, NumPy, the plain kernels on fresh arrays, and finite differences,
in float64. The same cases come every time. A longer form, from a seed of one's own:

    TRICYCLE_EXAMPLES=2000 TRICYCLE_SEED=7 python -m pytest -m slow -s tests/test_properties.py
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from op_properties import LAYERS, PROPERTIES, Sample

from tricycle import extra_ops
from tricycle.debug import use_reference
from tricycle.gradcheck import gradcheck
from tricycle.tensor import Tensor, to_tensor

try:
    import torch
except ModuleNotFoundError:
    torch = None

EXAMPLES, SEED = (int(os.environ.get(f"TRICYCLE_{name}", n)) for name, n in [("EXAMPLES", 300), ("SEED", 0)])
pytestmark = pytest.mark.usefixtures("one_torch_thread")
EVERYTHING = PROPERTIES | LAYERS


# -------------------------------------------------------------------- memory
def gaps(array: np.ndarray) -> np.ndarray:
    """The same values at every second place, with nonsense between."""
    memory = np.full((*array.shape[:-1], 2 * array.shape[-1]), 99, array.dtype)
    memory[..., ::2] = array
    return memory[..., ::2]


def turned_round(array: np.ndarray) -> np.ndarray:
    """Steps in memory below 0 along all axes."""
    back = (slice(None, None, -1),) * array.ndim
    return np.ascontiguousarray(array[back])[back]


def other_order(array: np.ndarray) -> np.ndarray:
    """Axes in memory that follow each other in neither order."""
    order = (*range(1, array.ndim), 0)
    return np.ascontiguousarray(array.transpose(np.argsort(order))).transpose(order)


def unaligned(array: np.ndarray) -> np.ndarray:
    """At an address that is no multiple of the element's size."""
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    view = memory.view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def repeated(array: np.ndarray) -> np.ndarray:
    """Of the first item alone, at steps of 0: other values than came."""
    return np.broadcast_to(array[:1].copy(), array.shape)


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": np.copy,
    "F": lambda array: np.array(array, order="F"),
    "gaps": gaps,
    "turned round": turned_round,
    "other order": other_order,
    "unaligned": unaligned,
    "read-only": read_only,
    "repeated": repeated,
}


# -------------------------------------------------------------------- how a call is made
class How(NamedTuple):
    """What is the same for every op.

    Attributes:
        dtypes: of each input; those of labels stay.
        layouts: of each input, names in LAYOUTS.
        requires_grad: which inputs require a gradient.
        alias: None; or "tensor": two inputs are one Tensor; or "array": two Tensors on one array.
        then: what is done with the result: "weights", "transposed" or "sum"; so its gradient has other steps in memory.
    """

    dtypes: list[str]
    layouts: list[str]
    requires_grad: list[bool]
    alias: str | None
    then: str


def draw_how(draw: Callable, sample: Sample) -> How:
    n = len(sample.inputs)
    dtypes = ["float32", "float64"] + ["float16"] * sample.accepts_float16
    one = draw(st.sampled_from(dtypes))
    mixed = draw(st.sampled_from([False, False, True]))
    if sample.accepts_integers and draw(st.sampled_from([False, False, False, True])):
        one = draw(st.sampled_from(["int32", "uint8", "bool"]))
    return How(
        [draw(st.sampled_from(dtypes)) if mixed else one for _ in range(n)],
        [draw(st.sampled_from(list(LAYOUTS))) for _ in range(n)],
        draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        draw(st.sampled_from([None, None, "tensor", "array"])),
        draw(st.sampled_from(["weights", "transposed", "sum"])),
    )


def tensors_of(sample: Sample, how: How) -> list[Tensor]:
    """The inputs; two of one shape are one where aliasing is asked for."""
    tensors: list[Tensor] = []
    flags = sample.batched or (False,) * len(sample.inputs)
    for array, dtype, layout, requires_grad, flag in zip(
        sample.inputs, how.dtypes, how.layouts, how.requires_grad, flags
    ):
        is_label = array.dtype.kind != "f"
        array = array if is_label else np.abs(array).astype(dtype) if dtype == "uint8" else array.astype(dtype)
        if array.size and array.ndim and not (is_label and layout == "repeated"):
            array = LAYOUTS[layout](array)
        tensors.append(to_tensor(array, dtype=array.dtype, requires_grad=requires_grad, is_batched=flag))
    twins = ((i, j) for i, j in itertools.combinations(range(len(tensors)), 2) if _alike(tensors[i], tensors[j]))
    i, j = next(twins, (0, 0))
    if how.alias == "tensor":
        tensors[j] = tensors[i]
    elif how.alias == "array":
        tensors[j].array = tensors[i].array
    return tensors


def _alike(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.dtype.kind == "f" and x.is_batched == y.is_batched


def upstream(shape: tuple[int, ...], then: str) -> np.ndarray:
    """The gradient of the result that `finish` brings about."""
    return np.ones(shape) if then == "sum" else np.random.default_rng(1).standard_normal(shape)


def finish(output: Any, then: str) -> Any:
    """A number that depends on all elements of the result, from Tensors."""
    weights = upstream(output.shape, then).astype(output.dtype)
    if then == "sum":
        return output.sum()
    if then == "transposed":
        return (output.transpose() * weights.T).sum()
    return (output * weights).sum()


# -------------------------------------------------------------------- opinions
def by_torch(sample: Sample, tensors: list[Tensor], how: How) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """The result and the gradients by the identity of our Tensor, in float64."""
    twins: dict[int, Any] = {}
    for tensor in tensors:
        wide = tensor.array if tensor in _labels(sample, tensors) else tensor.array.astype(np.float64)
        twins.setdefault(id(tensor), torch.tensor(np.array(wide), requires_grad=tensor.requires_grad))
    output = sample.expected(torch, *(twins[id(tensor)] for tensor in tensors))
    if output.requires_grad:
        output.backward(torch.tensor(_rounded(upstream(tuple(output.shape), how.then), tensors)))
    grads = {key: x.grad.numpy() if x.grad is not None else np.zeros(x.shape) for key, x in twins.items()}
    return output.detach().numpy(), grads


def by_reference(sample: Sample, tensors: list[Tensor], how: How) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """The values by NumPy, the gradients from the plain kernels on fresh arrays, in float64."""
    twins: dict[int, Tensor] = {}
    for tensor in tensors:
        label = tensor in _labels(sample, tensors)
        fresh = np.array(tensor.array, dtype=tensor.dtype if label else np.float64, order="C")
        options = {"requires_grad": tensor.requires_grad, "is_batched": tensor.is_batched}
        twins.setdefault(id(tensor), to_tensor(fresh, dtype=fresh.dtype, **options))
    with use_reference():
        output = sample.call(*(twins[id(tensor)] for tensor in tensors))
        if output.requires_grad:
            (output * _rounded(upstream(output.shape, how.then), tensors)).sum().backward()
    grads = {key: np.zeros(x.shape) if x.grad is None else x.grad.array for key, x in twins.items()}
    if sample.needs_torch:
        return output.array, grads
    with np.errstate(divide="ignore"):  # the logarithm of an empty sum
        return np.asarray(sample.expected(np, *(twins[id(tensor)].array for tensor in tensors))), grads


def _labels(sample: Sample, tensors: list[Tensor]) -> set[Tensor]:
    """Inputs that stay whole numbers whatever dtype the floats have."""
    return {tensor for tensor, array in zip(tensors, sample.inputs) if array.dtype.kind != "f"}


def _rounded(weights: np.ndarray, tensors: list[Tensor]) -> np.ndarray:
    """As `finish` has them in the dtype of the result."""
    floats = [tensor.dtype for tensor in tensors if tensor.dtype.kind == "f"] or [np.float32]
    return weights.astype(np.result_type(*floats)).astype(np.float64)


UNITS = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-2}


def assert_near(actual: np.ndarray, expected: np.ndarray, unit: float, scale: float) -> None:
    """Within a few units of the last place of the narrowest dtype, of a value or of the largest there is."""
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual.astype(np.float64), expected, unit, unit * scale)


# -------------------------------------------------------------------- one case
def check(sample: Sample, how: How) -> None:
    tensors = tensors_of(sample, how)
    before = [tensor.array.copy() for tensor in tensors]
    output = sample.call(*tensors)
    floats = {t.dtype.name for t in tensors if t.dtype.kind == "f"} or {"float32"}
    unit = max(UNITS[dtype] for dtype in floats)
    if floats <= {"float32", "float64"}:
        deciding = {t.dtype.name for t in tensors[: sample.n_dtype_inputs] if t.dtype.kind == "f"} or {"float32"}
        assert output.dtype == np.result_type(*deciding)
    assert output.requires_grad == any(tensor.requires_grad for tensor in tensors)
    if output.requires_grad:
        finish(output, how.then).backward()
    expected, grads = by_torch(sample, tensors, how) if torch else by_reference(sample, tensors, how)
    largest = max([np.abs(a).max(initial=1) for a in (expected, *grads.values())])
    assert_near(output.array, expected, unit, largest)
    for tensor in tensors:
        if not tensor.requires_grad:
            assert tensor.grad is None
        else:
            grad = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.array
            assert grad.dtype == tensor.dtype or tensor.grad is None
            assert_near(grad, grads[id(tensor)], unit, largest)
    for tensor, array in zip(tensors, before):
        np.testing.assert_array_equal(tensor.array, array)
    assert_apart(tensors, output)


def assert_apart(tensors: list[Tensor], output: Tensor) -> None:
    """A gradient is the user's: it shares memory with no other, nor with an input or the output."""
    leaves = {id(tensor): tensor for tensor in tensors}.values()
    grads = [tensor.grad.array for tensor in leaves if tensor.grad is not None]
    for one, other in itertools.combinations(grads, 2):
        assert not np.shares_memory(one, other)
    for grad, tensor in itertools.product(grads, [*tensors, output]):
        assert not np.shares_memory(grad, tensor.array)


def check_differences(sample: Sample) -> None:
    """Without PyTorch: the plain kernels' gradient against finite differences."""
    with use_reference():
        gradcheck(sample.call, *sample.tensors(), n_directions=1, elementwise_up_to=0, rtol=1e-4, atol=1e-5)


def run_property(name: str, data: Any) -> None:
    sample = EVERYTHING[name](data.draw)
    check(sample, draw_how(data.draw, sample))
    if torch is None:
        check_differences(sample)


# -------------------------------------------------------------------- tests
QUICK = settings(max_examples=25, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=EXAMPLES, derandomize=False)


@pytest.mark.parametrize("name", EVERYTHING)
@QUICK
@given(data=st.data())
def test_op_matches_reference(name, data):
    run_property(name, data)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERYTHING)
@seed(SEED)
@LONG
@given(data=st.data())
def test_op_matches_reference_with_many_examples(name, data):
    run_property(name, data)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_wrong_gradients_and_values_are_detected(dtype):
    pytest.importorskip("torch")
    how = How([dtype], ["C"], [True], None, "weights")
    for wrong in (lambda torch, x: x.exp() + 0.1 * (x - x.detach()), lambda torch, x: x.exp() + 0.1):
        with pytest.raises(AssertionError):
            check(Sample(extra_ops.exp, (np.ones(3),), wrong), how)
