"""Kernels with 16-bit floats: near the reference, and near the reference in float64."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from test_kernels import CASES, contiguous, draw, outputs, strided

from tricycle import kernels
from tricycle.debug import use_reference
from tricycle.kernels import KERNELS

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # of the last place, relative
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def narrow(arguments: list, dtype: np.dtype, layout) -> list:
    """Return arguments with floats rounded to 16 bits."""
    is_float = lambda a: isinstance(a, np.ndarray) and a.dtype == np.float64
    return [layout(a.astype(dtype)) if is_float(a) else a for a in arguments]


def exact(arguments: list) -> list:
    """Return the same values in float64."""
    is_16_bit = lambda a: isinstance(a, np.ndarray) and a.dtype in DTYPES
    return [a.astype(np.float64) if is_16_bit(a) else a for a in arguments]


def assert_near(actual: list, expected: list, dtype: np.dtype, name: str = "") -> None:
    """Compare with a tolerance of one ulp of each result's dtype, relative and to the largest value."""
    for result, reference in zip(actual, expected, strict=True):
        if result is None:  # a derivative that is found again from x
            continue
        unit = UNIT.get(result.dtype.name, 1e-4)
        finite = np.abs(np.asarray(reference)[np.isfinite(reference)])
        scale = float(finite.max(initial=1e-3))
        np.testing.assert_allclose(result.astype(np.float64), reference, unit, unit * scale / 2, err_msg=name)


def check(name: str, arguments: Callable[[], list], dtype: np.dtype) -> list[np.ndarray]:
    """Compare the provider and the reference with the reference in float64; return the provider's results."""
    expected = outputs(name, KERNELS[name].reference, exact(arguments()))
    actual = outputs(name, KERNELS[name], arguments())
    with use_reference():
        plain = outputs(name, KERNELS[name], arguments())
    for result, reference in zip(actual, plain, strict=True):
        assert result is None or result.dtype == reference.dtype
    assert_near(plain, expected, dtype, name)
    if name == "attention":  # oneDNN's logs are of sums of weights with 16 bits
        actual[1] = actual[1].astype(dtype)
    assert_near(actual, expected, dtype, name)
    return actual


# What a bfloat16 product has lost shows in gradients: tests of oneDNN's attention say how much that may be.
NOT_HERE = {"attention_backward": ("bfloat16",)}


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (DTYPES[0], strided),
        (DTYPES[1], contiguous),
        pytest.param(DTYPES[0], contiguous, marks=pytest.mark.nightly),
        pytest.param(DTYPES[1], strided, marks=pytest.mark.nightly),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("name", CASES)
def test_providers_match_the_reference_in_16_bits(name, dtype, layout):
    sizes = CASES[name][1]
    if dtype.name in NOT_HERE.get(name, ()):
        return
    for size in [*sizes[:4], *sizes[4 :: max(1, len(sizes) // 8)]]:
        check(name, partial(narrow, draw(name, size, np.float64), dtype, layout), dtype)


@each_dtype
@pytest.mark.parametrize("asked_for", [np.float32, np.float64])
def test_attention_output_dtype(asked_for, dtype):
    arguments = narrow(draw("attention", CASES["attention"][1][0], np.float64), dtype, contiguous)[:5]
    results = [
        kernel(*arguments, None, np.dtype(asked_for)) for kernel in (kernels.attention, kernels.attention.reference)
    ]
    for out, logsumexp in results:
        assert out.dtype == asked_for and logsumexp.dtype == np.float32
    np.testing.assert_allclose(results[0][0], results[1][0], atol=2 * UNIT[dtype.name])


# -------------------------------------------------------------------- large values and long sums
N_ROWS = 70_001  # float16 ends at 65,504


def near_ones(rng, *shape: int) -> np.ndarray:
    return 1 + rng.standard_normal(shape) / 8


MANY_ROWS = {  # what a sum that is too large for float16 is made of
    "sum_rows": lambda rng: [near_ones(rng, N_ROWS, 3)],
    "matmul_operand_and_sums": lambda rng: [near_ones(rng, N_ROWS, 3), "float32"],
    "sum_squares": lambda rng: [near_ones(rng, N_ROWS, 3)],
    "embedding_backward": lambda rng: [near_ones(rng, N_ROWS, 3), np.zeros(N_ROWS, int), 2],
    "cross_entropy": lambda rng: [rng.standard_normal((N_ROWS, 5)), np.arange(N_ROWS) % 5, near_ones(rng, N_ROWS)],
    "cross_entropy of smoothed labels": lambda rng: [*MANY_ROWS["cross_entropy"](rng), 0.1],
    "cross_entropy without gradient": lambda rng: [*MANY_ROWS["cross_entropy"](rng), 0.0, False],
    "layer_norm_backward": lambda rng: [
        *(near_ones(rng, N_ROWS, 4) for _ in range(2)),
        *(np.ones(4), np.zeros((N_ROWS, 1)), np.ones((N_ROWS, 1))),
        False,
    ],
}


@each_dtype
@pytest.mark.parametrize("case", MANY_ROWS)
def test_sums_over_70000_rows_do_not_overflow(case, dtype, rng):
    arguments = MANY_ROWS[case](rng)
    results = check(case.split()[0], partial(narrow, arguments, dtype, contiguous), dtype)
    wide = [x for x in results if x is not None and x.dtype == np.float32]
    assert wide and max(x.max() for x in wide) > 2**16


@each_dtype
@pytest.mark.parametrize("subtract_mean", [True, False])
@pytest.mark.parametrize("size", [7, 384])
def test_norms_of_values_near_20000_do_not_overflow(subtract_mean, size, dtype, rng):
    x = (20_000 + 100 * rng.standard_normal((33, size))).astype(dtype)
    grad = rng.standard_normal((33, size)).astype(dtype)
    gain, bias = rng.standard_normal((2, size)).astype(dtype)
    y, mean, scale = kernels.layer_norm(x, gain, bias, 1e-5, subtract_mean)
    expected = kernels.layer_norm.reference(*exact([x, gain, bias]), 1e-5, subtract_mean)
    assert y.dtype == dtype and mean.dtype == scale.dtype == np.float32
    assert_near([y], [expected[0]], dtype)
    np.testing.assert_allclose(scale, expected[2], 1e-3)
    actual = kernels.layer_norm_backward(grad, x, gain, mean, scale, subtract_mean)
    slopes = kernels.layer_norm_backward.reference(*exact([grad, x, gain]), *expected[1:], subtract_mean)
    assert [a.dtype for a in actual] == [dtype, np.float32, np.float32]
    for result, reference in zip(actual, slopes):
        unit = max(UNIT.get(result.dtype.name, 0), 1e-3)
        np.testing.assert_allclose(result.astype(np.float64), reference, unit, unit * np.abs(reference).max())


# -------------------------------------------------------------------- mixed dtypes
@each_dtype
def test_mixed_16_bit_input_and_float32_gradient(dtype, rng):
    x, gain = rng.standard_normal((9, 40)).astype(dtype), rng.standard_normal(40).astype(np.float32)
    grad = rng.standard_normal((9, 40)).astype(np.float32)
    _, mean, scale = kernels.layer_norm(x, gain, None, 1e-5, True)
    calls = {
        "layer_norm_backward": (grad, x, gain, mean, scale, True),
        "gelu_backward": (grad, x, None),
        "multiply": (grad, x),
        "swiglu_backward": (grad[:, :20], x),
        "apply_rope": (grad.reshape(1, 9, 2, 20), x[:, :10], x[:, 10:20]),
        "softmax_backward": (grad, kernels.softmax(x)),
    }
    for name, arguments in calls.items():
        actual, plain = (kernel(*arguments) for kernel in (KERNELS[name], KERNELS[name].reference))
        expected = KERNELS[name].reference(*(a.astype(np.float64) if hasattr(a, "astype") else a for a in arguments))
        results = [list(a) if isinstance(a, tuple) else [a] for a in (actual, plain, expected)]
        for result, reference, wide in zip(*results, strict=True):
            assert result.dtype == reference.dtype, name
            unit = max(UNIT.get(result.dtype.name, 0), 2.0**-7 if name == "gelu_backward" else 1e-4)
            np.testing.assert_allclose(result.astype(np.float64), wide, unit, unit, err_msg=name)
