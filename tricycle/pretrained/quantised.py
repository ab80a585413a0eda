"""Blocks of few bits, as llama.cpp's files have them: numbers from blocks and back, computed by the package `gguf`.

A row of values is cut into blocks of 32 or 256, and a block has a scale or several, in 16 bits or fewer, beside its
numbers of 4 to 8 bits. Rows stay rows: those of a matrix may be taken or put in another order as blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

_AT_ONCE = 2**15  # values: their temporary arrays stay in a processor's cache


class Blocks(NamedTuple):
    """Numbers in a block, and its bytes."""

    n_values: int
    n_bytes: int


BLOCKS = {
    "Q8_0": Blocks(32, 34),
    "Q4_0": Blocks(32, 18),
    "Q4_1": Blocks(32, 20),
    "Q5_0": Blocks(32, 22),
    "Q5_1": Blocks(32, 24),
    "Q4_K": Blocks(256, 144),
    "Q5_K": Blocks(256, 176),
    "Q6_K": Blocks(256, 210),
}
WRITABLE = ("Q8_0",)


def dequantise(packed: np.ndarray, kind: str) -> np.ndarray:
    """Return the numbers that blocks stand for, (..., values of a row) of float32.

    Args:
        packed: rows of blocks, (..., bytes of a row) of uint8.
        kind: a name in BLOCKS.

    Raises:
        ValueError: a kind that is not in BLOCKS, rows that are no whole number of blocks.
    """
    layout = _layout(kind)
    n_blocks, rest = divmod(packed.shape[-1], layout.n_bytes)
    if rest:
        raise ValueError(
            f"dequantise: expected rows of whole {kind} blocks of {layout.n_bytes} bytes, got {packed.shape}"
        )
    values = np.empty((packed.size // layout.n_bytes, layout.n_values), np.float32)
    _convert("dequantize", kind, packed.reshape(-1, layout.n_bytes), values)
    return values.reshape(*packed.shape[:-1], n_blocks * layout.n_values)


def split_q8_0(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the int8 (N, K) and the float16 scales (N, K / 32) of rows of Q8_0 blocks (N, bytes of a row)."""
    blocks = packed.reshape(len(packed), -1, BLOCKS["Q8_0"].n_bytes)
    values = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(packed), -1)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    return values, scales


def quantise(values: np.ndarray, kind: str) -> np.ndarray:
    """Return blocks that stand for numbers, as nearly as the kind can: (..., bytes of a row) of uint8.

    Args:
        values: (..., values of a row), finite.
        kind: a name in WRITABLE.

    Raises:
        ValueError: a kind that cannot be written, rows that are no whole number of blocks, numbers that are not finite
            or too large for a scale of 16 bits.
    """
    layout = _layout(kind)
    if kind not in WRITABLE:
        raise ValueError(f"quantise: expected a kind that can be written ({', '.join(WRITABLE)}), got {kind}")
    n_blocks, rest = divmod(values.shape[-1], layout.n_values)
    if rest:
        raise ValueError(f"quantise: expected rows of whole {kind} blocks of {layout.n_values}, got {values.shape}")
    largest = np.abs(values).max(initial=0)
    if not largest <= 127 * float(np.finfo(np.float16).max):
        raise ValueError(f"quantise: expected finite numbers that {kind} can hold, got one of size {largest}")
    blocks = np.empty((values.size // layout.n_values, layout.n_bytes), np.uint8)
    _convert("quantize", kind, np.asarray(values, np.float32).reshape(-1, layout.n_values), blocks)
    return blocks.reshape(*values.shape[:-1], n_blocks * layout.n_bytes)


def _layout(kind: str) -> Blocks:
    if kind not in BLOCKS:
        raise ValueError(f"quantised blocks: expected one of {', '.join(BLOCKS)}, got {kind}")
    return BLOCKS[kind]


def _convert(function: str, kind: str, rows: np.ndarray, out: np.ndarray) -> None:
    """Fill an array by a function of `gguf`, some rows at a time, for it makes temporary arrays of all that it gets."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError('blocks of GGUF files need gguf: pip install "tricycle-gpt[pretrained]"') from None
    convert: Any = getattr(gguf, function)
    n_rows = _AT_ONCE // BLOCKS[kind].n_values
    # a scale of an untrusted file may be infinite, and infinity times 0 is no number: no warning
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), n_rows):
            some = rows[start : start + n_rows].reshape(1, -1)  # it cuts longer arrays into groups of 16 rows
            out[start : start + n_rows] = convert(some, gguf.GGMLQuantizationType[kind]).reshape(-1, out.shape[1])
