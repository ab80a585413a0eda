"""Blocks of few bits, as llama.cpp's files have them: what lies where in a block, and numbers to blocks and back.

A row of values is cut into blocks of 32 or 256, and a block has a scale or several, in 16 bits or fewer, beside its
numbers of 4 to 8 bits. Rows stay rows: those of a matrix may be taken or put in another order as blocks.
(ggml's `ggml-common.h` declares the blocks, `ggml-quants.c` says what they mean.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_AT_ONCE = 2**17  # values: what is made of them on the way stays in a processor's cache

# Blocks (N, bytes of one) of uint8, and an array (N, values of one) of float32 to fill.
Unpack = Callable[[np.ndarray, np.ndarray], None]
Pack = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Blocks:
    """A way to store numbers in blocks.

    Attributes:
        n_values: numbers in a block.
        n_bytes: of a block.
        unpack: blocks to float32.
        pack: float32 to blocks; None where we do not write it.
    """

    n_values: int
    n_bytes: int
    unpack: Unpack
    pack: Pack | None = None


# -------------------------------------------------------------------- to float32
def _halves(blocks: np.ndarray, start: int, n: int = 1) -> np.ndarray:
    """(N, n) float32 from float16 that begin at a byte of each block."""
    return np.ascontiguousarray(blocks[:, start : start + 2 * n]).view("<f2").astype(np.float32)


def _nibbles(blocks: np.ndarray, start: int) -> np.ndarray:
    """(N, 32) uint8 below 16 from 16 bytes: all low halves of a byte, then all high ones."""
    numbers = np.empty((len(blocks), 32), np.uint8)
    pairs = blocks[:, start : start + 16]
    np.bitwise_and(pairs, 15, out=numbers[:, :16])
    np.right_shift(pairs, 4, out=numbers[:, 16:])
    return numbers


def _from_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale, 32 signed bytes."""
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0), out=out)


def _from_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale, 32 halves of a byte of which 8 is taken."""
    np.subtract(_nibbles(blocks, 2), np.float32(8), out=out)
    out *= _halves(blocks, 0)


def _from_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale, smallest value, 32 halves of a byte."""
    scale, smallest = _halves(blocks, 0, 2).T[:, :, None]
    np.multiply(_nibbles(blocks, 4), scale, out=out)
    out += smallest


def _with_fifth_bits(numbers: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """(N, 32) uint8 below 32: bit i % 8 of byte i // 8, of four bytes, is the fifth bit of number i."""
    return numbers | np.unpackbits(packed, axis=1, bitorder="little") << 4


def _from_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale, 4 bytes of fifth bits, 32 halves of a byte; 16 is taken of each number."""
    np.subtract(_with_fifth_bits(_nibbles(blocks, 6), blocks[:, 2:6]), np.float32(16), out=out)
    out *= _halves(blocks, 0)


def _from_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale, smallest value, 4 bytes of fifth bits, 32 halves of a byte."""
    scale, smallest = _halves(blocks, 0, 2).T[:, :, None]
    np.multiply(_with_fifth_bits(_nibbles(blocks, 8), blocks[:, 4:8]), scale, out=out)
    out += smallest


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, 8) scales and (N, 8) offsets, all below 64, from 12 bytes.

    The first four of each are the low 6 bits of a byte of their own; the others have their low 4 bits in the last four
    bytes and their high 2 bits in what the first eight leave free.
    """
    first, second, last = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    offsets = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    return scales, offsets


def _from_sub_blocks(blocks: np.ndarray, numbers: np.ndarray, out: np.ndarray) -> None:
    """Of Q4_K and Q5_K: 8 sub-blocks of 32 numbers (N, 8, 32), each with a scale and an offset of 6 bits."""
    scales, offsets = _six_bits(blocks[:, 4:16])
    by = _halves(blocks, 0, 2)
    result = out.reshape(-1, 8, 32)
    np.multiply(numbers, (by[:, :1] * scales)[:, :, None], out=result)
    result -= (by[:, 1:] * offsets)[:, :, None]


def _numbers_of_k(blocks: np.ndarray, start: int) -> np.ndarray:
    """(N, 8, 32) uint8 below 16 from 128 bytes: 32 of them have two sub-blocks, first the low halves, then the high."""
    pairs = blocks[:, start : start + 128].reshape(-1, 4, 1, 32)
    shifts = np.array([0, 4], np.uint8).reshape(2, 1)
    return (pairs >> shifts & 15).reshape(-1, 8, 32)


def _from_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scale of scales, scale of offsets, 12 bytes of these, 128 bytes of numbers."""
    _from_sub_blocks(blocks, _numbers_of_k(blocks, 16), out)


def _from_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K, with the numbers' fifth bits in 32 bytes before: bit j of byte i for number i of sub-block j."""
    shifts = np.arange(8, dtype=np.uint8).reshape(8, 1)
    fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> shifts & 1
    _from_sub_blocks(blocks, _numbers_of_k(blocks, 48) | fifth << 4, out)


def _from_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """128 bytes of low 4 bits, 64 of high 2 bits, a signed scale for every 16 numbers, the scale of scales.

    Each half of a block is four groups of 32: their low bits are the low halves of two runs of 32 bytes, then the high
    halves of the same; their high bits are pairs of bits of one run of 32 bytes.
    """
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    numbers = (low.reshape(-1, 2, 4, 32) | high << 4).view(np.int8) - np.int8(32)
    scales = _halves(blocks, 208) * blocks[:, 192:208].view(np.int8)
    np.multiply(numbers.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


# -------------------------------------------------------------------- from float32
def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _rounded(values: np.ndarray) -> np.ndarray:
    """To whole numbers, halves away from zero (as C's roundf; np.round takes the even one)."""
    whole = np.trunc(values)
    return whole + np.trunc(2 * (values - whole))


def _to_q8_0(values: np.ndarray, blocks: np.ndarray) -> None:
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    blocks[:, :2] = scale.astype("<f2").view(np.uint8)
    blocks[:, 2:] = _rounded(values * _inverse(scale)).astype(np.int8).view(np.uint8)


BLOCKS: dict[str, Blocks] = {
    "Q8_0": Blocks(32, 34, _from_q8_0, _to_q8_0),
    "Q4_0": Blocks(32, 18, _from_q4_0),
    "Q4_1": Blocks(32, 20, _from_q4_1),
    "Q5_0": Blocks(32, 22, _from_q5_0),
    "Q5_1": Blocks(32, 24, _from_q5_1),
    "Q4_K": Blocks(256, 144, _from_q4_k),
    "Q5_K": Blocks(256, 176, _from_q5_k),
    "Q6_K": Blocks(256, 210, _from_q6_k),
}


# -------------------------------------------------------------------- whole arrays
def dequantise(packed: np.ndarray, kind: str) -> np.ndarray:
    """The numbers that blocks stand for.

    Args:
        packed: rows of blocks, (..., bytes of a row) of uint8.
        kind: a name in BLOCKS.

    Returns:
        (..., values of a row) of float32.

    Raises:
        ValueError: a kind that is not in BLOCKS, rows that are no whole number of blocks.
    """
    layout = _layout(kind)
    n_blocks, rest = divmod(packed.shape[-1], layout.n_bytes)
    if rest:
        raise ValueError(
            f"dequantise: expected rows of whole {kind} blocks of {layout.n_bytes} bytes, got {packed.shape}"
        )
    blocks = packed.reshape(-1, layout.n_bytes)
    values = np.empty((len(blocks), layout.n_values), np.float32)
    _in_pieces(layout.unpack, blocks, values, layout.n_values)
    return values.reshape(*packed.shape[:-1], n_blocks * layout.n_values)


def split_q8_0(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The int8 (N, K) and the float16 scales (N, K / 32) of rows of Q8_0 blocks (N, bytes of a row)."""
    n_bytes = BLOCKS["Q8_0"].n_bytes
    blocks = packed.reshape(len(packed), -1, n_bytes)
    values = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(packed), -1)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    return values, scales


def quantise(values: np.ndarray, kind: str) -> np.ndarray:
    """Blocks that stand for numbers, as nearly as the kind can.

    Args:
        values: (..., values of a row), finite.
        kind: a name in BLOCKS whose `pack` is there.

    Returns:
        (..., bytes of a row) of uint8.

    Raises:
        ValueError: a kind that cannot be written, rows that are no whole number of blocks, numbers that are not finite
            or too large for a scale of 16 bits.
    """
    layout = _layout(kind)
    if layout.pack is None:
        writable = ", ".join(name for name, blocks in BLOCKS.items() if blocks.pack)
        raise ValueError(f"quantise: expected a kind that can be written ({writable}), got {kind}")
    n_blocks, rest = divmod(values.shape[-1], layout.n_values)
    if rest:
        raise ValueError(f"quantise: expected rows of whole {kind} blocks of {layout.n_values}, got {values.shape}")
    largest = np.abs(values).max(initial=0)
    if not largest <= 127 * float(np.finfo(np.float16).max):
        raise ValueError(f"quantise: expected finite numbers that {kind} can hold, got one of size {largest}")
    rows = np.asarray(values, np.float32).reshape(-1, layout.n_values)
    blocks = np.empty((len(rows), layout.n_bytes), np.uint8)
    _in_pieces(layout.pack, rows, blocks, layout.n_values)
    return blocks.reshape(*values.shape[:-1], n_blocks * layout.n_bytes)


def _layout(kind: str) -> Blocks:
    if kind not in BLOCKS:
        raise ValueError(f"quantised blocks: expected one of {', '.join(BLOCKS)}, got {kind}")
    return BLOCKS[kind]


def _in_pieces(convert: Callable[[np.ndarray, np.ndarray], None], rows: np.ndarray, out: np.ndarray, n: int) -> None:
    """So many blocks at once that they stay in the cache."""
    stride = _AT_ONCE // n
    # a scale of a stranger's file may be infinite, and infinity by 0 is no number: so be it, and no warning
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), stride):
            convert(rows[start : start + stride], out[start : start + stride])
