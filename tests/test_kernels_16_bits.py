"""Kernels with 16-bit floats: near the reference, and near the reference in float64."""

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


def narrow(name: str, size: tuple, dtype: np.dtype, layout) -> list:
    """Return the arguments of a case, with floats rounded to 16 bits."""
    arguments = draw(name, size, np.float64)
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


def check(name: str, size: tuple, dtype: np.dtype, layout) -> None:
    expected = outputs(name, KERNELS[name].reference, exact(narrow(name, size, dtype, layout)))
    actual = outputs(name, KERNELS[name], narrow(name, size, dtype, layout))
    with use_reference():
        plain = outputs(name, KERNELS[name], narrow(name, size, dtype, layout))
    for result, reference in zip(actual, plain, strict=True):
        assert result is None or result.dtype == reference.dtype
    assert_near(plain, expected, dtype, name)
    if name == "attention":  # oneDNN's logs are of sums of weights with 16 bits
        actual[1] = actual[1].astype(dtype)
    assert_near(actual, expected, dtype, name)


# What a bfloat16 product has lost shows in gradients: tests of oneDNN's attention say how much that may be.
NOT_HERE = {"attention_backward"}


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (DTYPES[0], strided),
        (DTYPES[1], contiguous),
        pytest.param(DTYPES[0], contiguous, marks=pytest.mark.slow),
        pytest.param(DTYPES[1], strided, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("name", CASES)
def test_providers_match_the_reference_in_16_bits(name, dtype, layout):
    sizes = CASES[name][1]
    if name in NOT_HERE and dtype.name == "bfloat16":
        return
    for size in [*sizes[:4], *sizes[4 :: max(1, len(sizes) // 8)]]:
        check(name, size, dtype, layout)


@each_dtype
@pytest.mark.parametrize("asked_for", [np.float32, np.float64])
def test_attention_output_dtype(asked_for, dtype):
    arguments = narrow("attention", CASES["attention"][1][0], dtype, contiguous)[:5]
    results = [
        kernel(*arguments, None, np.dtype(asked_for)) for kernel in (kernels.attention, kernels.attention.reference)
    ]
    for out, logsumexp in results:
        assert out.dtype == asked_for and logsumexp.dtype == np.float32
    np.testing.assert_allclose(results[0][0], results[1][0], atol=2 * UNIT[dtype.name])


# -------------------------------------------------------------------- large values and long sums
N_ROWS = 70_001  # float16 ends at 65,504


@each_dtype
@pytest.mark.parametrize("subtract_mean", [True, False])
@pytest.mark.parametrize("size", [7, 384])
def test_norms_of_values_near_20000_do_not_overflow(subtract_mean, size, dtype, rng):
    x = (20_000 + 100 * rng.standard_normal((33, size))).astype(dtype)
    gain, bias = (rng.standard_normal(size).astype(dtype) for _ in range(2))
    wide = [a.astype(np.float64) for a in (x, gain, bias)]
    y, mean, scale = kernels.layer_norm(x, gain, bias, 1e-5, subtract_mean)
    expected = kernels.layer_norm.reference(*wide, 1e-5, subtract_mean)
    assert y.dtype == dtype and mean.dtype == scale.dtype == np.float32
    assert_near([y], [expected[0]], dtype)
    np.testing.assert_allclose(scale, expected[2], 1e-3)
    grad = rng.standard_normal(x.shape).astype(dtype)
    actual = kernels.layer_norm_backward(grad, x, gain, mean, scale, subtract_mean)
    slopes = kernels.layer_norm_backward.reference(
        grad.astype(np.float64), wide[0], wide[1], *expected[1:], subtract_mean
    )
    assert [a.dtype for a in actual] == [dtype, np.float32, np.float32]
    for result, reference in zip(actual, slopes):
        unit = max(UNIT.get(result.dtype.name, 0), 1e-3)
        np.testing.assert_allclose(result.astype(np.float64), reference, unit, unit * np.abs(reference).max())


def near_ones(rng, *shape: int) -> np.ndarray:
    return 1 + rng.standard_normal(shape) / 8


@each_dtype
def test_sums_of_70000_rows_do_not_overflow(dtype, rng):
    x = near_ones(rng, N_ROWS, 3).astype(dtype)
    wide = x.astype(np.float64)
    for sums in (kernels.sum_rows(x), kernels.matmul_operand_and_sums(x, "float32")[1]):
        assert sums.dtype == np.float32
        np.testing.assert_allclose(sums, wide.sum(axis=0), 1e-5)
    squares = kernels.sum_squares(x)
    assert squares.dtype == np.float32 and squares.shape == ()
    np.testing.assert_allclose(squares, (wide * wide).sum(), 5e-5)
    table = kernels.embedding_backward(x, np.zeros(N_ROWS, int), 2)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, [wide.sum(axis=0), np.zeros(3)], 1e-5)


@each_dtype
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_70000_rows_do_not_overflow(dtype, smoothing, rng):
    logits, labels = rng.standard_normal((N_ROWS, 5)).astype(dtype), rng.integers(0, 5, N_ROWS)
    weights = near_ones(rng, N_ROWS).astype(dtype)
    wide = logits.astype(np.float64), labels, weights.astype(np.float64), smoothing
    expected, slopes = kernels.cross_entropy.reference(*wide)
    loss, slope = kernels.cross_entropy(logits, labels, weights, smoothing)
    assert expected > 2**16
    assert loss.dtype == np.float32 and slope.dtype == dtype
    alone, _ = kernels.cross_entropy(logits, labels, weights, smoothing, False)
    np.testing.assert_allclose([loss, alone], expected, 1e-5)
    assert_near([slope], [slopes], dtype)


@each_dtype
def test_norm_gradients_over_70000_rows_do_not_overflow(dtype, rng):
    x, grad = (near_ones(rng, N_ROWS, 4).astype(dtype) for _ in range(2))
    gain = np.ones(4, dtype)
    _, mean, scale = kernels.layer_norm(x, gain, None, 1e-5, False)
    wide = [a.astype(np.float64) for a in (grad, x, gain, mean, scale)]
    expected = kernels.layer_norm_backward.reference(*wide, False)
    actual = kernels.layer_norm_backward(grad, x, gain, mean, scale, False)
    assert expected[2].min() > 2**16
    assert_near(list(actual), list(expected), dtype)


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
