"""Quantized blocks of GGUF files: conversion to and from numbers, computed by the package `gguf`.

A row of values is divided into blocks of 32 or 256. A block stores values of 4 to 8 bits and one or more scales of at
most 16 bits. No block extends over two rows, so the rows of a quantized matrix can be selected or permuted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

_CHUNK_SIZE = 2**15  # values that are converted at once: the temporary arrays then fit into a processor's cache


class BlockFormat(NamedTuple):
    """The number of values and of bytes of a block."""

    n_values: int
    n_bytes: int


BLOCK_FORMATS = {
    "Q8_0": BlockFormat(32, 34),
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q5_0": BlockFormat(32, 22),
    "Q5_1": BlockFormat(32, 24),
    "Q4_K": BlockFormat(256, 144),
    "Q5_K": BlockFormat(256, 176),
    "Q6_K": BlockFormat(256, 210),
}
WRITABLE_FORMATS = ("Q8_0",)


def dequantize_blocks(packed: np.ndarray, format_name: str) -> np.ndarray:
    """Dequantize ggml blocks, uint8 (..., bytes per row), to float32 (..., values per row); ValueError if not whole.

    Raises:
        ValueError: an unknown format, or rows that are not a whole number of blocks.
    """
    block = _block_format(format_name)
    n_blocks, remainder = divmod(packed.shape[-1], block.n_bytes)
    if remainder:
        rows = f"rows of whole {format_name} blocks of {block.n_bytes} bytes"
        raise ValueError(f"dequantize_blocks: expected {rows}, got {packed.shape}")
    values = np.empty((packed.size // block.n_bytes, block.n_values), np.float32)
    _convert("dequantize", format_name, packed.reshape(-1, block.n_bytes), values)
    return values.reshape(*packed.shape[:-1], n_blocks * block.n_values)


def split_q8_0(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the int8 values (N, K) and float16 scales (N, K / 32) of rows of Q8_0 blocks, (N, bytes per row)."""
    blocks = packed.reshape(len(packed), -1, BLOCK_FORMATS["Q8_0"].n_bytes)
    values = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(packed), -1)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    return values, scales


def quantize_blocks(values: np.ndarray, format_name: str) -> np.ndarray:
    """Quantize finite values (..., values per row) to ggml blocks, uint8 (..., bytes per row); ValueError if not Q8_0.

    Raises:
        ValueError: a format that cannot be written, rows that are not a whole number of blocks, or values that are not
            finite or too large for a 16-bit scale.
    """
    block = _block_format(format_name)
    if format_name not in WRITABLE_FORMATS:
        writable = ", ".join(WRITABLE_FORMATS)
        raise ValueError(f"quantize_blocks: expected a format that can be written ({writable}), got {format_name}")
    n_blocks, remainder = divmod(values.shape[-1], block.n_values)
    if remainder:
        rows = f"rows of whole {format_name} blocks of {block.n_values}"
        raise ValueError(f"quantize_blocks: expected {rows}, got {values.shape}")
    largest = np.abs(values).max(initial=0)
    if not largest <= 127 * float(np.finfo(np.float16).max):
        raise ValueError(f"quantize_blocks: expected finite values in the range of {format_name}, got one of {largest}")
    blocks = np.empty((values.size // block.n_values, block.n_bytes), np.uint8)
    _convert("quantize", format_name, np.asarray(values, np.float32).reshape(-1, block.n_values), blocks)
    return blocks.reshape(*values.shape[:-1], n_blocks * block.n_bytes)


def _block_format(format_name: str) -> BlockFormat:
    if format_name not in BLOCK_FORMATS:
        raise ValueError(f"quantized blocks: expected one of {', '.join(BLOCK_FORMATS)}, got {format_name}")
    return BLOCK_FORMATS[format_name]


def _convert(function: str, format_name: str, rows: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` with the results of a function of `gguf`, in chunks of rows that limit its temporary arrays."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'quantized blocks of GGUF files need gguf: pip install "tricycle-gpt[pretrained]"'
        ) from None
    convert: Any = getattr(gguf, function)
    n_rows = _CHUNK_SIZE // BLOCK_FORMATS[format_name].n_values
    # A scale of an untrusted file may be infinite, and infinity times 0 is NaN: that needs no warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), n_rows):
            chunk = rows[start : start + n_rows].reshape(1, -1)  # gguf splits longer arrays into groups of 16 rows
            converted = convert(chunk, gguf.GGMLQuantizationType[format_name])
            out[start : start + n_rows] = converted.reshape(-1, out.shape[1])
