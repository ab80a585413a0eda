"""Quantization of float arrays to the blocks of GGUF files, computed by the package `gguf`."""

from __future__ import annotations

import numpy as np

from tricycle.kernels.quantized_blocks import block_format, convert_blocks

WRITABLE_FORMATS = ("Q8_0",)


def quantize_blocks(values: np.ndarray, format_name: str) -> np.ndarray:
    """Quantize finite values (..., values per row) to ggml blocks, uint8 (..., bytes per row); ValueError if not Q8_0.

    Raises:
        ValueError: a format that cannot be written, rows that are not a whole number of blocks, or values that are not
            finite or too large for a 16-bit scale.
    """
    block = block_format(format_name)
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
    convert_blocks("quantize", format_name, np.asarray(values, np.float32).reshape(-1, block.n_values), blocks)
    return blocks.reshape(*values.shape[:-1], n_blocks * block.n_bytes)
