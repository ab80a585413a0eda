"""`BlockMatrix`: weights in the quantized blocks of GGUF files, multiplied without a copy of the file's bytes.

A row of values is divided into blocks of 32 or 256. A block stores values of 4 to 8 bits and one or more scales of at
most 16 bits. No block extends over two rows, so the rows of a quantized matrix can be selected or permuted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from tricycle.devices import ARRAY_MODULES
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.explanation import PLAIN, explain
from tricycle.kernels.quantized import QuantizedMatrix, chunks_in_cache

_MAX_EXPONENT = 252  # of MXFP4: with larger ones the largest values are infinite in float32
_CHUNK_SIZE = 2**15  # values that are converted at once: the temporary arrays then fit into a processor's cache


class BlockFormat(NamedTuple):
    """The number of values and of bytes of a block, and where its float16 scales begin."""

    n_values: int
    n_bytes: int
    scales: tuple[int, ...]


BLOCK_FORMATS = {
    "Q8_0": BlockFormat(32, 34, (0,)),
    "Q4_0": BlockFormat(32, 18, (0,)),
    "Q4_1": BlockFormat(32, 20, (0, 2)),
    "Q5_0": BlockFormat(32, 22, (0,)),
    "Q5_1": BlockFormat(32, 24, (0, 2)),
    "Q4_K": BlockFormat(256, 144, (0, 2)),
    "Q5_K": BlockFormat(256, 176, (0, 2)),
    "Q6_K": BlockFormat(256, 210, (208,)),
    "MXFP4": BlockFormat(32, 17, ()),  # its scale is an exponent
}


def never_changed() -> None:
    """Do nothing: the check of blocks that are not in a file."""


class BlockRows(NamedTuple):
    """Rows of quantized blocks, usually in a mapped file.

    Attributes:
        packed: uint8 (N, bytes per row).
        format_name: one of BLOCK_FORMATS.
        check: raises OSError if the file was changed after it was opened; called before the rows are read.
    """

    packed: np.ndarray
    format_name: str
    check: Callable[[], None] = never_changed

    @property
    def row_size(self) -> int:
        """The number of values of a row."""
        block = BLOCK_FORMATS[self.format_name]
        return int(self.packed.shape[1]) // block.n_bytes * block.n_values

    def has_finite_scales(self) -> bool:
        """Return whether all values are finite, by the scales of the blocks, without dequantizing them."""
        block = BLOCK_FORMATS[self.format_name]
        if self.format_name == "MXFP4":
            return bool((self.packed[:, :: block.n_bytes] <= _MAX_EXPONENT).all())
        for rows in chunks_in_cache(len(self.packed), self.row_size):
            blocks = self.packed[rows].reshape(-1, block.n_bytes)
            exponents = [blocks[:, offset + 1] & 0x7C for offset in block.scales]  # all bits are 1 if not finite
            if any((exponent == 0x7C).any() for exponent in exponents):
                return False
        return True


@Kernel
def dequantize_blocks(packed: np.ndarray, format_name: str) -> np.ndarray:
    """Dequantize ggml blocks, uint8 (..., bytes per row), to float32 (..., values per row); ValueError if not whole.

    Raises:
        ValueError: an unknown format, or rows that are not a whole number of blocks.
        ModuleNotFoundError: the package `gguf` is not installed, nor Numba, whose version of this kernel needs none.
    """
    block = block_format(format_name)
    values = np.empty((packed.size // block.n_bytes, block.n_values), np.float32)
    convert_blocks("dequantize", format_name, packed.reshape(-1, block.n_bytes), values)
    return values.reshape(*packed.shape[:-1], count_blocks(packed, format_name) * block.n_values)


def has_fast_products() -> bool:
    """Return whether a provider is installed that multiplies with blocks; the reference dequantizes them each time."""
    report = explain(dequantize_blocks, np.zeros((1, BLOCK_FORMATS["Q8_0"].n_bytes), np.uint8), "Q8_0")
    return report.provider != PLAIN


class BlockMatrix(QuantizedMatrix):
    """An immutable matrix in the quantized blocks of a GGUF file, usually in a mapping of that file.

    Args:
        parts: rows of blocks, all of the same number of values; the stored rows of the matrix are those of all parts.
        transposed: whether the stored rows are the columns of the matrix.
        exact: whether products use x as float32, and not rounded to 8 bits in blocks of 32 numbers.
        prepared: see `QuantizedMatrix`.
    """

    __slots__ = ("parts", "exact")

    def __init__(
        self,
        parts: tuple[BlockRows, ...],
        transposed: bool = False,
        exact: bool = False,
        prepared: dict[str, Any] | None = None,
    ) -> None:
        n_rows, row_size = sum(len(part.packed) for part in parts), parts[0].row_size
        self.parts, self.exact, self.transposed = parts, exact, transposed
        self.prepared = {} if prepared is None else prepared
        self.shape = (row_size, n_rows) if transposed else (n_rows, row_size)
        self.dtype = np.dtype(np.uint8)
        self.size = n_rows * row_size

    def __reduce__(self) -> tuple[Any, ...]:
        """Return (class, arguments) for pickling, without `prepared`, which may contain addresses of this process."""
        return BlockMatrix, (self.parts, self.transposed, self.exact)

    @property
    def format_name(self) -> str:
        """The formats of the blocks, such as "Q4_K" or "Q4_K and Q6_K"."""
        return " and ".join(dict.fromkeys(part.format_name for part in self.parts))

    @property
    def arrays(self) -> list[np.ndarray]:
        """The stored bytes of each part."""
        return [part.packed for part in self.parts]

    def transpose(self, order: tuple[int, ...] = (1, 0)) -> BlockMatrix:
        """Return the transposed matrix, sharing the blocks; the matrix itself for the order (0, 1)."""
        if tuple(order) == (0, 1):
            return self
        return BlockMatrix(self.parts, not self.transposed, self.exact, self.prepared)

    def dequantize_rows(self, rows: Any) -> np.ndarray:
        """Return stored rows as float32, by a slice within a part (else IndexError), or an index array if one part."""
        self.parts[0].check()
        if len(self.parts) == 1:
            return dequantize_blocks(self.parts[0].packed[rows], self.parts[0].format_name)
        for (packed, format_name, _), place in zip(self.parts, self.row_ranges()):
            if rows.start < place.stop:
                return dequantize_blocks(packed[rows.start - place.start : rows.stop - place.start], format_name)
        raise IndexError(f"dequantize_rows: expected rows of {self!r}, got {rows}")

    def row_ranges(self) -> list[slice]:
        """Return the ranges of rows from which slices for `dequantize_rows` may be taken: those of the parts."""
        ends = list(accumulate(len(part.packed) for part in self.parts))
        return [slice(start, end) for start, end in zip([0, *ends], ends)]


ARRAY_MODULES[BlockMatrix] = np  # as of QuantizedMatrix


# -------------------------------------------------------------------- conversion by the package gguf
def block_format(format_name: str) -> BlockFormat:
    """Return a format's `BlockFormat`, the sizes of its blocks; ValueError if the format is unknown."""
    if format_name not in BLOCK_FORMATS:
        raise ValueError(f"quantized blocks: expected one of {', '.join(BLOCK_FORMATS)}, got {format_name}")
    return BLOCK_FORMATS[format_name]


def count_blocks(packed: np.ndarray, format_name: str) -> int:
    """Return the number of blocks in a row of bytes; ValueError if it is not a whole number."""
    block = block_format(format_name)
    n_blocks, remainder = divmod(int(packed.shape[-1]), block.n_bytes)
    if remainder:
        rows = f"rows of whole {format_name} blocks of {block.n_bytes} bytes"
        raise ValueError(f"dequantize_blocks: expected {rows}, got {packed.shape}")
    return n_blocks


def convert_blocks(function: str, format_name: str, rows: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` by `gguf.quantize` or `gguf.dequantize` of rows, in chunks that limit temporary arrays.

    Raises:
        ModuleNotFoundError: the package `gguf` is not installed.
    """
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
