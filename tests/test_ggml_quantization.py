"""Quantized GGUF blocks against the gguf package, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tricycle.debug import use_reference
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS, dequantize_blocks
from tricycle.pretrained.ggml_quantization import WRITABLE_FORMATS, quantize_blocks


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


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_block_sizes_equal_gguf(kind, gguf):
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (BLOCK_FORMATS[kind].n_values, BLOCK_FORMATS[kind].n_bytes) == sizes


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 3, 2), (1300, 5)])
@pytest.mark.parametrize("scales", ["any", "finite"])
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_dequantize_blocks_equals_gguf(kind, scales, shape, gguf):
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
@given(
    st.sampled_from(WRITABLE_FORMATS), st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([1e-9, 1e-3, 1.0, 1e5])
)
def test_quantize_blocks_equals_gguf(kind, seed, n_rows, scale):
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((n_rows, 2 * BLOCK_FORMATS[kind].n_values)) * scale).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = 0
    values[0, : BLOCK_FORMATS[kind].n_values] = 0
    np.testing.assert_array_equal(quantize_blocks(values, kind), gguf.quantize(values, gguf.GGMLQuantizationType[kind]))


def test_halves_are_rounded_away_from_zero(gguf):
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
    with pytest.raises(ValueError, match=r"Q8_0.*got Q4_K"):
        quantize_blocks(np.zeros((1, 256), np.float32), "Q4_K")
    for bad in (np.nan, np.inf, 1e8):
        with pytest.raises(ValueError, match=r"finite .*Q8_0"):
            quantize_blocks(np.full((1, 32), bad, np.float32), "Q8_0")
