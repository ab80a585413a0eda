"""Products of rows and a matrix in the quantized blocks of a GGUF file, and the dequantization of blocks."""

from __future__ import annotations

from functools import partial
from types import NotImplementedType

import numpy as np

from tricycle.devices import Array
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.kernels.quantized_blocks import BLOCK_FORMATS, BlockMatrix, count_blocks
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.compiled.vector_matmul import spin_team
from tricycle_accelerators.matmul_plan import multiplies_bfloat16, this_machine
from tricycle_accelerators.providers import decline_when

AMX_ROWS = 24  # with more, AMX multiplies dequantized blocks; at which number it begins to be faster was not measured


def _matmul_decline_reason(
    x: Array, matrix: QuantizedMatrix, bias: Array | None = None, precision: str = "float32"
) -> str | None:
    """Return why the loops cannot run: no blocks, exact, no AVX2, no float32 rows, many and AMX; else None."""
    if (why := matrix_decline_reason(matrix)) is not None:
        return why
    if len(x) > AMX_ROWS and "amx_bf16" in this_machine().features and multiplies_bfloat16():
        return f"at most {AMX_ROWS} rows on a processor with AMX, got {len(x)}"
    if x.dtype != np.float32 or not x.flags.carray or not x.size:
        return f"rows of float32 in one piece, aligned and not read-only, got {x.dtype} {x.shape}"
    return None


def matrix_decline_reason(matrix: QuantizedMatrix) -> str | None:
    """Return why the loops cannot multiply a matrix: no or empty blocks, exact products, no AVX2; else None."""
    if not isinstance(matrix, BlockMatrix) or not matrix.size:
        return "a matrix in the blocks of a GGUF file"
    if matrix.exact or not matrix.transposed:
        return "a transposed matrix whose products may round x to 8 bits"
    return None if load_loops("block_rows").HAS_BLOCKS else "a processor with AVX2 or ARM's dot products"


@decline_when(_matmul_decline_reason)
def quantized_matmul(
    x: Array, matrix: BlockMatrix, bias: Array | None = None, precision: str = "float32"
) -> Array | NotImplementedType:
    """Return rows, rounded to 8 bits, times blocks, plus bias, by spinning threads; NotImplemented for inf or NaN."""
    loops = load_loops("block_loops")
    matrix.parts[0].check()  # all are of one file
    table = describe_parts(matrix)
    product = np.empty((len(x), matrix.shape[1]), np.float32)
    job = partial(loops.multiply_blocks, x, table, product, loops.FUNCTIONS.ctypes.data)
    if spin_team().run(job, is_long=len(x) >= loops.TILE_ROWS) == loops.NOT_FINITE:
        return NotImplemented
    if bias is not None:
        product += bias
    return product


def describe_parts(matrix: BlockMatrix) -> np.ndarray:
    """Return the table of a matrix's parts for `block_loops.multiply_blocks`, cached in the matrix."""
    table: np.ndarray | None = matrix.prepared.get("table")
    if table is not None:
        return table
    loops = load_loops("block_loops")
    rows, group, start = [], 0, 0
    for packed, name, _ in matrix.parts:
        form, number = loops.FORMATS[name], loops.NUMBERS[name]
        end, n_blocks = group - len(packed) // -loops.LANES, packed.shape[1] // form.n_bytes
        place = group, end, start, len(packed), packed.ctypes.data, packed.strides[0]
        kind = loops.KIND_OF_FORMAT[number], form.n_scales
        rows.append((number, form.offset, *place, n_blocks, form.n_bytes, form.n_values, *kind))
        group, start = end, start + len(packed)
    matrix.prepared["table"] = table = np.array(rows, np.int64)
    return table


def _dequantize_decline_reason(packed: np.ndarray, format_name: str) -> str | None:
    """Return why blocks are declined: an unknown format, none, or no AVX2 or ARM dot products; else None."""
    if format_name not in BLOCK_FORMATS or not packed.size:
        return f"blocks of one of {', '.join(BLOCK_FORMATS)}, got {format_name}"
    return None if load_loops("block_rows").HAS_BLOCKS else "a processor with AVX2 or ARM's dot products"


@decline_when(_dequantize_decline_reason)
def dequantize_blocks(packed: np.ndarray, format_name: str) -> np.ndarray:
    """Return the float32 values of ggml blocks, uint8 (..., bytes per row), by Numba; ValueError if not whole."""
    n_blocks, block = count_blocks(packed, format_name), BLOCK_FORMATS[format_name]
    packed = np.ascontiguousarray(packed)
    values = np.empty((*packed.shape[:-1], n_blocks * block.n_values), np.float32)
    loops = load_loops("block_loops")
    loops.dequantize(loops.NUMBERS[format_name], packed.ctypes.data, packed.size // block.n_bytes, values.reshape(-1))
    return values
