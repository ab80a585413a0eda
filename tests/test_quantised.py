"""Blocks of few bits against the package of llama.cpp's authors, bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tricycle.pretrained.quantised import BLOCKS, WRITABLE, dequantise, quantise


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0, scales: str = "any") -> np.ndarray:
    """(*shape, bytes of a row) of any bytes at all, or with scales that are finite."""
    blocks = BLOCKS[kind]
    packed = np.random.default_rng(seed).integers(0, 256, (*shape, blocks.n_bytes), np.uint8)
    if scales == "finite":
        halves = np.random.default_rng(seed).standard_normal((*shape, 2)).astype("<f2").view(np.uint8)
        if kind == "Q6_K":
            packed[..., 208:] = halves[..., :2]
        else:
            n = 2 if kind in ("Q8_0", "Q4_0", "Q5_0") else 4
            packed[..., :n] = halves[..., :n]
    return packed.reshape(*shape[:-1], -1)


@pytest.fixture
def theirs():
    return pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", BLOCKS)
def test_sizes(kind, theirs):
    sizes = theirs.GGML_QUANT_SIZES[theirs.GGMLQuantizationType[kind]]
    assert (BLOCKS[kind].n_values, BLOCKS[kind].n_bytes) == sizes


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (2, 3, 2), (1300, 5)])
@pytest.mark.parametrize("scales", ["any", "finite"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_dequantise_is_theirs_bit_for_bit(kind, scales, shape, theirs):
    packed = random_blocks(kind, shape, scales=scales)
    with np.errstate(all="ignore"):
        expected = theirs.dequantize(packed, theirs.GGMLQuantizationType[kind])
    values = dequantise(packed, kind)
    assert values.dtype == np.float32 and values.shape == (*shape[:-1], shape[-1] * BLOCKS[kind].n_values)
    unequal = values.view(np.uint32) != expected.view(np.uint32)
    assert not (unequal & ~(np.isnan(values) & np.isnan(expected))).any()
    assert scales == "any" or np.isfinite(values).all()


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_of_blocks_are_rows_of_values(kind):
    """So that rows may be put in another order before they are read."""
    packed = random_blocks(kind, (9, 2), scales="finite")
    order = np.random.default_rng(1).permutation(9)
    np.testing.assert_array_equal(dequantise(packed[order], kind), dequantise(packed, kind)[order])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WRITABLE), st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([1e-9, 1e-3, 1.0, 1e5]))
def test_quantise_is_theirs_bit_for_bit(kind, seed, n_rows, scale):
    theirs = pytest.importorskip("gguf")
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((n_rows, 2 * BLOCKS[kind].n_values)) * scale).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = 0
    values[0, : BLOCKS[kind].n_values] = 0
    np.testing.assert_array_equal(quantise(values, kind), theirs.quantize(values, theirs.GGMLQuantizationType[kind]))


def test_halves_are_rounded_away_from_zero(theirs):
    values = np.zeros((1, 32), np.float32)
    values[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -2.5, np.nextafter(np.float32(0.5), np.float32(0))]
    packed = quantise(values, "Q8_0")
    assert packed[0, 2:].view(np.int8)[:7].tolist() == [127, 1, 2, 3, -1, -3, 0]


def test_q8_0_is_near():
    values = np.random.default_rng(3).standard_normal((64, 96)).astype(np.float32)
    again = dequantise(quantise(values, "Q8_0"), "Q8_0")
    largest = np.abs(values.reshape(64, 3, 32)).max(-1, keepdims=True)
    # half a step of 1/127 of the largest, and as much again where the scale itself was rounded to 16 bits
    assert (np.abs(again - values).reshape(64, 3, 32) <= largest * (0.5 / 127 + 2**-11)).all()
    np.testing.assert_array_equal(
        quantise(again, "Q8_0").reshape(-1, 34)[:, 2:], quantise(values, "Q8_0").reshape(-1, 34)[:, 2:]
    )


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"^quantised blocks: expected one of Q8_0, .*, got IQ2_XS$"):
        dequantise(np.zeros((1, 34), np.uint8), "IQ2_XS")
    with pytest.raises(
        ValueError, match=r"^dequantise: expected rows of whole Q8_0 blocks of 34 bytes, got \(1, 35\)$"
    ):
        dequantise(np.zeros((1, 35), np.uint8), "Q8_0")
    with pytest.raises(ValueError, match=r"^quantise: expected rows of whole Q8_0 blocks of 32, got \(1, 33\)$"):
        quantise(np.zeros((1, 33), np.float32), "Q8_0")
    with pytest.raises(ValueError, match=r"^quantise: expected a kind that can be written \(Q8_0.*\), got Q4_K$"):
        quantise(np.zeros((1, 256), np.float32), "Q4_K")
    for bad in (np.nan, np.inf, 1e8):
        with pytest.raises(ValueError, match=r"^quantise: expected finite numbers that Q8_0 can hold, got one of size"):
            quantise(np.full((1, 32), bad, np.float32), "Q8_0")
