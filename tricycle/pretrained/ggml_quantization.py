"""Quantization of float arrays to the blocks of GGUF files, without or with the importance of each input channel.

Without importances, the package `gguf` computes the formats with blocks of 32. All other blocks have scales from a
search for the smallest weighted error, with the weights that llama.cpp uses (`ggml-quants.c`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tricycle.kernels.quantized_blocks import BLOCK_FORMATS, BlockRows, block_format, convert_blocks
from tricycle.pretrained.scale_search import search_common_scale, search_scale_and_minimum, search_signed_scale

WRITABLE_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_CHUNK_SIZE = 2**15  # values that are quantized at once: the temporary arrays then fit into a processor's cache
_MAX_SUB_SCALE = 63  # of Q4_K and Q5_K: their 8 scales and minima have 6 bits

# From values in a unit, the weights of their errors, both (N, values), and the unit to blocks (N, bytes).
Quantizer = Callable[[np.ndarray, np.ndarray, float], np.ndarray]


def quantize_blocks(values: np.ndarray, format_name: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Quantize values (..., values per row) to ggml blocks, uint8 (..., bytes per row); ValueError if impossible.

    Args:
        values: of a matrix, whose rows are the outputs of a linear layer.
        format_name: one of WRITABLE_FORMATS.
        importance: (values per row,), the mean square of each input of the layer: the weight of the squared errors of a
            column. Q8_0 does not use it.

    Raises:
        ValueError: a format that cannot be written, rows that are not a whole number of blocks, values that are not
            finite or too large for 16-bit scales, or importances of another shape, negative or not finite.
    """
    block = block_format(format_name)
    if format_name not in WRITABLE_FORMATS:
        writable = ", ".join(WRITABLE_FORMATS)
        raise ValueError(f"quantize_blocks: expected a format that can be written ({writable}), got {format_name}")
    row_size = values.shape[-1]
    if row_size % block.n_values:
        whole = f"rows of whole {format_name} blocks of {block.n_values}"
        raise ValueError(f"quantize_blocks: expected {whole}, got {values.shape}")
    if importance is not None:
        _check_importance(importance, row_size)
    largest = float(np.abs(values).max(initial=0))
    blocks = np.zeros((values.size // block.n_values, block.n_bytes), np.uint8)
    if math.isfinite(largest):
        rows = np.asarray(values, np.float32).reshape(-1, row_size)
        if format_name == "Q8_0" or (importance is None and not format_name.endswith("_K")):
            convert_blocks("quantize", format_name, rows.reshape(-1, block.n_values), blocks)
        elif largest > 0:
            _quantize_weighted(rows, format_name, importance, largest, blocks)
    if not (math.isfinite(largest) and BlockRows(blocks, format_name).has_finite_scales()):
        raise ValueError(f"quantize_blocks: expected finite values in the range of {format_name}, got one of {largest}")
    return blocks.reshape(*values.shape[:-1], row_size // block.n_values * block.n_bytes)


def _check_importance(importance: np.ndarray, row_size: int) -> None:
    """Raise a ValueError unless importances have shape (row_size,) and are finite and 0 or more."""
    if importance.shape != (row_size,):
        raise ValueError(f"quantize_blocks: expected importances of shape ({row_size},), got {importance.shape}")
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise ValueError("quantize_blocks: expected finite importances of at least 0, got others")


def _quantize_weighted(
    rows: np.ndarray, format_name: str, importance: np.ndarray | None, largest: float, out: np.ndarray
) -> None:
    """Fill `out` with the blocks of rows (R, values per row) of magnitudes up to `largest`, in chunks of rows."""
    n_values, n_bytes, _ = BLOCK_FORMATS[format_name]
    out = out.reshape(len(rows), -1, n_bytes)
    step = max(1, _CHUNK_SIZE // rows.shape[1])
    for start in range(0, len(rows), step):
        x = rows[start : start + step] / np.float32(largest)  # so that squares do not leave the range of float32
        weights = _weights(x, format_name) if importance is None else _weight_by(importance, x, format_name)
        with np.errstate(over="ignore", invalid="ignore"):  # `quantize_blocks` rejects infinite scales
            blocks = _QUANTIZERS[format_name](x.reshape(-1, n_values), weights.reshape(-1, n_values), largest)
        out[start : start + step] = blocks.reshape(len(x), -1, n_bytes)


# -------------------------------------------------------------------- weights of squared errors
def _weights(x: np.ndarray, format_name: str) -> np.ndarray:
    """Return weights (R, values) of squared errors without importances: x^2 for Q6_K, else |x| + a part's RMS."""
    if format_name == "Q6_K":
        return x * x
    parts = x.reshape(-1, 32)
    return (np.abs(parts) + np.sqrt((parts * parts).mean(axis=1, keepdims=True))).reshape(x.shape)


def _weight_by(importance: np.ndarray, x: np.ndarray, format_name: str) -> np.ndarray:
    """Return weights (R, values) of squared errors: each column's importance, but for Q6_K times sqrt(mean + x^2)."""
    n_values = BLOCK_FORMATS[format_name].n_values
    # Only ratios within a block matter. They are computed in float64, and values that float32 cannot represent are 0.
    parts = importance.astype(np.float64).reshape(-1, n_values)
    largest = parts.max(axis=1, keepdims=True)
    columns = np.divide(parts, largest, out=np.ones_like(parts), where=largest > 0).astype(np.float32).reshape(-1)
    if format_name == "Q6_K":
        return np.broadcast_to(columns, x.shape)
    mean_square = (x * x).mean(axis=1, keepdims=True)
    if n_values == 256:
        blocks = x.reshape(len(x), -1, n_values)
        mean_square = 2 * np.repeat((blocks * blocks).mean(axis=2), n_values, axis=1)
    return columns * np.sqrt(mean_square + x * x)


# -------------------------------------------------------------------- blocks of 32
def _quantize_signed(n_bits: int) -> Quantizer:
    """Return f(x, weights, unit) -> Q4_0 or Q5_0 blocks (N, bytes) of x (N, 32) times unit: scale, signed integers."""

    def quantize(x: np.ndarray, weights: np.ndarray, unit: float) -> np.ndarray:
        half = 2 ** (n_bits - 1)
        scale = _to_float16(search_signed_scale(_columns(x, 32), _columns(weights, 32), half), unit)
        q = _round(x, scale[:, None], -half, half - 1, unit) + half
        return np.concatenate([_bytes(scale), *_pack_32(q.astype(np.uint8), n_bits)], axis=1)

    return quantize


def _quantize_unsigned(n_bits: int) -> Quantizer:
    """Return f(x, weights, unit) -> Q4_1, Q5_1 blocks (N, bytes) of x (N, 32) times unit: scale, minimum, integers."""

    def quantize(x: np.ndarray, weights: np.ndarray, unit: float) -> np.ndarray:
        largest = 2**n_bits - 1
        fit = search_scale_and_minimum(_columns(x, 32), _columns(weights, 32), largest)
        scale, minimum = (_to_float16(each, unit) for each in fit)
        q = _round(x - minimum[:, None] / np.float32(unit), scale[:, None], 0, largest, unit)
        return np.concatenate([_bytes(scale), _bytes(minimum), *_pack_32(q.astype(np.uint8), n_bits)], axis=1)

    return quantize


def _pack_32(q: np.ndarray, n_bits: int) -> list[np.ndarray]:
    """Pack integers (N, 32): with 5 bits first the highest bits, 4 bytes; then 16 bytes of the lower 4 bits."""
    high = [np.packbits(q >> 4, axis=1, bitorder="little")] if n_bits == 5 else []
    return [*high, (q[:, :16] & 15) | (q[:, 16:] << 4)]


# -------------------------------------------------------------------- blocks of 256
def _quantize_8_parts(n_bits: int) -> Quantizer:
    """Return f(x, weights, unit) -> Q4_K or Q5_K blocks (N, bytes) of x (N, 256) times unit: 8 parts, 6-bit scales."""

    def quantize(x: np.ndarray, weights: np.ndarray, unit: float) -> np.ndarray:
        largest = 2**n_bits - 1
        x_columns, weights_columns = _columns(x, 32), _columns(weights, 32)
        scales, minima = search_scale_and_minimum(x_columns, weights_columns, largest)
        part_weights = weights_columns.sum(axis=0).reshape(-1, 8)
        scale, scale_integers = _quantize_scales(scales.reshape(-1, 8), part_weights, unit)
        minimum, minimum_integers = _quantize_scales(-minima.reshape(-1, 8), part_weights, unit)
        part_scales, part_minima = scale[:, None] * scale_integers, minimum[:, None] * minimum_integers
        parts = x.reshape(-1, 8, 32) + part_minima[:, :, None] / np.float32(unit)
        q = _round(parts, part_scales[:, :, None], 0, largest, unit).astype(np.uint8)
        high = [np.packbits(q >> 4, axis=1, bitorder="little")] if n_bits == 5 else []
        low = (q[:, ::2] & 15) | (q[:, 1::2] << 4)
        packed = [_bytes(scale), _bytes(minimum), _pack_6_bits(scale_integers, minimum_integers), *high, low]
        return np.concatenate([part.reshape(len(x), -1) for part in packed], axis=1)

    return quantize


def _quantize_scales(scales: np.ndarray, weights: np.ndarray, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """Quantize scales >= 0 of parts (N, 8) to 6 bits; return their common float16 scales (N,), and uint8 (N, 8)."""
    common = _to_float16(search_common_scale(_columns(scales, 8), _columns(weights, 8), _MAX_SUB_SCALE), unit)
    return common, _round(scales, common[:, None], 0, _MAX_SUB_SCALE, unit).astype(np.uint8)


def _pack_6_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Pack 8 scales and 8 minima (N, 8) into 12 bytes; the upper bits of four bytes belong to the last four numbers."""
    lower = [numbers[:, :4] | (numbers[:, 4:] >> 4 << 6) for numbers in (scales, minima)]
    return np.concatenate([*lower, (scales[:, 4:] & 15) | (minima[:, 4:] << 4)], axis=1)


def _quantize_16_parts(x: np.ndarray, weights: np.ndarray, unit: float) -> np.ndarray:
    """Return Q6_K blocks (N, bytes) of x (N, 256) times `unit`: 16 parts of 16 values, with int8 scales."""
    scales = search_signed_scale(_columns(x, 16), _columns(weights, 16), 32).reshape(-1, 16)
    extreme = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    scale = _to_float16(extreme[:, 0] / -128, unit)
    integers = _round(scales, scale[:, None], -128, 127, unit).astype(np.int8)
    part_scales = scale[:, None] * integers
    q = _round(x.reshape(-1, 16, 16), part_scales[:, :, None], -32, 31, unit) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    high = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    packed = [low[:, :, :2] | (low[:, :, 2:] << 4), high, integers.view(np.uint8), _bytes(scale)]
    return np.concatenate([part.reshape(len(x), -1) for part in packed], axis=1)


_QUANTIZERS: dict[str, Quantizer] = {
    "Q4_0": _quantize_signed(4),
    "Q4_1": _quantize_unsigned(4),
    "Q5_0": _quantize_signed(5),
    "Q5_1": _quantize_unsigned(5),
    "Q4_K": _quantize_8_parts(4),
    "Q5_K": _quantize_8_parts(5),
    "Q6_K": _quantize_16_parts,
}


# -------------------------------------------------------------------- scales
def _columns(x: np.ndarray, size: int) -> np.ndarray:
    """Return x, in groups of `size` values, as a contiguous float array (size, groups); perhaps a view."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def _to_float16(scales: np.ndarray, unit: float) -> np.ndarray:
    """Return scales times `unit`, rounded to values that float16 can represent, as float32."""
    return (scales * np.float32(unit)).astype(np.float16).astype(np.float32)


def _bytes(scales: np.ndarray) -> np.ndarray:
    """Return scales (N,), which float16 can represent, as bytes of float16, uint8 (N, 2)."""
    return scales.astype("<f2")[:, None].view(np.uint8)


def _round(x: np.ndarray, scale: np.ndarray, smallest: int, largest: int, unit: float) -> np.ndarray:
    """Return x * unit / scale rounded and clipped to smallest .. largest, as float32; 0 where the scale is 0."""
    q = np.rint(np.divide(x * np.float32(unit), scale, out=np.zeros_like(x), where=scale != 0))
    return np.clip(q, smallest, largest, out=q)
