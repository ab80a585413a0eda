"""Quantized GGUF blocks against the gguf package, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tricycle.debug import use_reference
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS, dequantize_blocks
from tricycle.pretrained.ggml_quantization import WRITABLE_FORMATS, quantize_blocks

gguf = pytest.importorskip("gguf")  # the reference kernels read blocks with it
BLOCKS_OF_32 = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # without importances, the package gguf quantizes these
# The mean squared errors of llama.cpp's quantizer (llama-cpp-python 0.3.36) for `normal_values`: without importances;
# and with them, weighted by them.
LLAMA_CPP_ERRORS = {
    "Q4_0": (7.357e-03, 1.6586e-03),
    "Q4_1": (6.021e-03, 9.912e-04),
    "Q5_0": (1.8127e-03, 3.9841e-04),
    "Q5_1": (1.4288e-03, 2.3905e-04),
    "Q4_K": (5.0326e-03, 1.03587e-03),
    "Q5_K": (1.29813e-03, 2.85187e-04),
    "Q6_K": (3.14059e-04, 6.8902e-05),
}
each_searched_format = pytest.mark.parametrize("kind", LLAMA_CPP_ERRORS)


def normal_values() -> tuple[np.ndarray, np.ndarray]:
    """Return values (64, 512) from a normal distribution, and importances (512,), most of which are small."""
    rng = np.random.default_rng(5)
    return rng.standard_normal((64, 512)).astype(np.float32), rng.gamma(0.3, 1, 512).astype(np.float32)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0, scales: str = "any") -> np.ndarray:
    """Return blocks (*shape, bytes per row) of random bytes, with finite scales if asked for."""
    blocks = BLOCK_FORMATS[kind]
    packed = np.random.default_rng(seed).integers(0, 256, (*shape, blocks.n_bytes), np.uint8)
    if scales == "finite":
        halves = np.random.default_rng(seed).standard_normal((*shape, 2)).astype("<f2").view(np.uint8)
        for i, offset in enumerate(blocks.scales):
            packed[..., offset : offset + 2] = halves[..., 2 * i : 2 * i + 2]
        if kind == "MXFP4":
            packed[..., 0] = 120 + packed[..., 0] % 8
    return packed.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_block_sizes_equal_gguf(kind):
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (BLOCK_FORMATS[kind].n_values, BLOCK_FORMATS[kind].n_bytes) == sizes


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 3, 2), (1300, 5)])
@pytest.mark.parametrize("scales", ["any", "finite"])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_dequantize_blocks_equals_gguf(kind, scales, shape):
    packed = random_blocks(kind, shape, scales=scales)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(packed, gguf.GGMLQuantizationType[kind])
    values = dequantize_blocks(packed, kind)
    with use_reference():
        assert dequantize_blocks(packed, kind).tobytes() == expected.tobytes()
    assert values.dtype == np.float32 and values.shape == (*shape[:-1], shape[-1] * BLOCK_FORMATS[kind].n_values)
    unequal = values.view(np.uint32) != expected.view(np.uint32)
    assert not (unequal & ~(np.isnan(values) & np.isnan(expected))).any()
    assert scales == "any" or np.isfinite(values).all()


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_permuted_rows_dequantize_to_permuted_values(kind):
    """Rows can be permuted before they are dequantized."""
    packed = random_blocks(kind, (9, 2), scales="finite")
    order = np.random.default_rng(1).permutation(9)
    np.testing.assert_array_equal(dequantize_blocks(packed[order], kind), dequantize_blocks(packed, kind)[order])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BLOCKS_OF_32), st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([1e-9, 1e-3, 1.0, 1e4]))
def test_quantize_blocks_equals_gguf(kind, seed, n_rows, scale):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((n_rows, 2 * BLOCK_FORMATS[kind].n_values)) * scale).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = 0
    values[0, : BLOCK_FORMATS[kind].n_values] = 0
    np.testing.assert_array_equal(quantize_blocks(values, kind), gguf.quantize(values, gguf.GGMLQuantizationType[kind]))


def test_halves_are_rounded_away_from_zero():
    values = np.zeros((1, 32), np.float32)
    values[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -2.5, np.nextafter(np.float32(0.5), np.float32(0))]
    packed = quantize_blocks(values, "Q8_0")
    assert packed[0, 2:].view(np.int8)[:7].tolist() == [127, 1, 2, 3, -1, -3, 0]


def test_q8_0_error_is_bounded_and_requantization_is_exact():
    values = np.random.default_rng(3).standard_normal((64, 96)).astype(np.float32)
    again = dequantize_blocks(quantize_blocks(values, "Q8_0"), "Q8_0")
    largest = np.abs(values.reshape(64, 3, 32)).max(-1, keepdims=True)
    # half a step of 1/127 of the largest, and as much again where the scale itself was rounded to 16 bits
    assert (np.abs(again - values).reshape(64, 3, 32) <= largest * (0.5 / 127 + 2**-11)).all()
    np.testing.assert_array_equal(
        quantize_blocks(again, "Q8_0").reshape(-1, 34)[:, 2:], quantize_blocks(values, "Q8_0").reshape(-1, 34)[:, 2:]
    )


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match=r"Q8_0, .*got IQ2_XS"):
        dequantize_blocks(np.zeros((1, 34), np.uint8), "IQ2_XS")
    with pytest.raises(ValueError, match=r"Q8_0.*34 bytes.*\(1, 35\)"):
        dequantize_blocks(np.zeros((1, 35), np.uint8), "Q8_0")
    with pytest.raises(ValueError, match=r"Q8_0 blocks of 32.*\(1, 33\)"):
        quantize_blocks(np.zeros((1, 33), np.float32), "Q8_0")
    with pytest.raises(ValueError, match=r"Q8_0.*got MXFP4"):
        quantize_blocks(np.zeros((1, 32), np.float32), "MXFP4")


@pytest.mark.parametrize("kind", WRITABLE_FORMATS)
def test_values_that_are_not_finite_or_too_large_are_rejected(kind):
    for bad in (np.nan, np.inf, -np.inf, 1e10, 3e38):
        for importance in (None, np.ones(256)):
            values = np.ones((2, 256), np.float32)
            values[1, 7] = bad
            with pytest.raises(ValueError, match=rf"finite .*{kind}"):
                quantize_blocks(values, kind, importance)


# -------------------------------------------------------------------- searched scales
def squared_error(values: np.ndarray, kind: str, importance: np.ndarray | None = None, weights=1.0) -> float:
    again = dequantize_blocks(quantize_blocks(values, kind, importance), kind)
    return float(((again - values.astype(np.float64)) ** 2 * weights).mean())


@each_searched_format
def test_error_is_at_most_that_of_llama_cpp(kind):
    values, importance = normal_values()
    plain, weighted = LLAMA_CPP_ERRORS[kind]
    assert 0.8 * plain < squared_error(values, kind) <= 1.001 * plain
    assert 0.8 * weighted < squared_error(values, kind, importance, importance) <= 1.001 * weighted


@each_searched_format
def test_importance_reduces_the_weighted_error(kind):
    values, importance = normal_values()
    assert squared_error(values, kind, importance, importance) < 0.8 * squared_error(values, kind, None, importance)


@each_searched_format
def test_importance_of_a_column_applies_to_all_rows(kind):
    """The blocks of a row do not depend on other rows of equal magnitude, nor on the unit of the importances."""
    values, importance = normal_values()
    values[:, 0] = 5  # the magnitude of all rows
    packed = quantize_blocks(values, kind, importance)
    for row in (0, 63):
        alone = quantize_blocks(values[row], kind, importance.astype(np.float64) * 1e-60)
        assert (alone != packed[row]).mean() < 0.02  # because of rounding errors in the sums of the search


@each_searched_format
@pytest.mark.parametrize("weighted", [False, True])
def test_multiples_of_a_scale_are_exact(kind, weighted):
    """Values that a block can represent with a scale of 1/8 are found again, wherever they are in the block."""
    n_levels = {"4": 16, "5": 32, "6": 64}[kind[1]]
    rng = np.random.default_rng(1)
    lowest = 0 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else -n_levels // 2
    part = 32 if kind != "Q6_K" else 16
    integers = rng.integers(lowest, lowest + n_levels, (512, 256 // part, part))
    integers[..., :2] = [lowest, lowest + n_levels - 1]
    values = rng.permuted(integers, axis=-1).reshape(512, 256).astype(np.float32) / 8
    importance = np.linspace(1, 2, 256) if weighted else None
    again = dequantize_blocks(quantize_blocks(values, kind, importance), kind)
    tolerance = 6e-4 if "K" in kind else 1e-5 if kind.endswith("_1") else 0  # scales of 16 bits; minima near 0
    np.testing.assert_allclose(again, values, rtol=0, atol=tolerance * np.abs(values).max())


@pytest.mark.parametrize("kind", WRITABLE_FORMATS)
@pytest.mark.parametrize("weighted", [False, True])
def test_degenerate_blocks(kind, weighted):
    """Zeros, constants, one large value, values that float16 scales cannot represent: `gguf` reads them all."""
    rng = np.random.default_rng(2)
    importance = np.where(np.arange(256) % 3, rng.gamma(0.1, 1, 256), 0.0) if weighted else None
    # The relative error of a value, compared with the largest magnitude of the row.
    tolerance = {"8": 0.006, "6": 0.035, "5": 0.07, "4": 0.14}[kind[1]]
    rows = {
        "zeros": np.zeros(256),
        "constant": np.full(256, 3.7),
        "negative constant": np.full(256, -3.7),
        "one large value": np.where(np.arange(256) == 77, 30_000.0, 0.01),
        "one large negative value": np.where(np.arange(256) == 77, -30_000.0, 0.01),
        "alternating signs": np.where(np.arange(256) % 2, 1.0, -1.0),
    }
    for name, row in rows.items():
        values = row.astype(np.float32)
        packed = quantize_blocks(values, kind, importance)
        again = gguf.dequantize(packed, gguf.GGMLQuantizationType[kind])
        assert again.tobytes() == dequantize_blocks(packed, kind).tobytes() or not again.any(), name
        error = np.abs(again - values) * (1 if importance is None else importance > 0)
        assert error.max() <= tolerance * np.abs(values).max(), name
    for tiny in (1e-7, 1e-12, 1e-40):  # smaller than the smallest float16, or than the smallest normal float32
        values = (rng.standard_normal((3, 256)) * tiny).astype(np.float32)
        again = dequantize_blocks(quantize_blocks(values, kind, importance), kind)
        assert np.abs(again).max() <= 4 * np.abs(values).max() + 2e-6


def test_rows_of_different_magnitudes_have_equal_relative_errors():
    """The search does not depend on the magnitude of other rows of the matrix."""
    values, _ = normal_values()
    scales = np.geomspace(1e-2, 1e5, 64)[:, None].astype(np.float32)
    again = dequantize_blocks(quantize_blocks(values * scales, "Q4_K"), "Q4_K") / scales
    errors = ((again - values) ** 2).mean(axis=1)
    assert errors.max() < 2 * errors.min()


@pytest.mark.parametrize("shape", [(256,), (1, 512), (3, 2, 768), (300, 256)])
def test_leading_axes_and_chunks_do_not_change_blocks(shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    flat = np.clip(values, -3, 3)
    flat[..., 0] = 3
    packed = quantize_blocks(flat, "Q5_K")
    assert packed.shape == (*shape[:-1], shape[-1] // 256 * 176)
    some = flat.reshape(-1, shape[-1])[-8:]
    rows = np.array([quantize_blocks(row, "Q5_K") for row in some])
    # NumPy adds up chunks of another size in another order, so that the best of two almost equal scales may change.
    assert (packed.reshape(-1, rows.shape[1])[-8:] != rows).mean() < 0.02


def test_invalid_importances_are_rejected():
    values = np.ones((2, 64), np.float32)
    with pytest.raises(ValueError, match=r"shape \(64,\), got \(32,\)"):
        quantize_blocks(values, "Q4_0", np.ones(32))
    for bad in (np.nan, np.inf, -1.0):
        with pytest.raises(ValueError, match="finite importances"):
            quantize_blocks(values, "Q4_0", np.full(64, bad))
