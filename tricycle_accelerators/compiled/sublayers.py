"""Whole sublayers of a transformer block for one token, by spinning threads.

The products are those of `vector_matmul` and `block_matmul`, so results have the same bits as without this module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.kernels import ScoreOptions
from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle.kernels.sublayers import Linear, Norm
from tricycle_accelerators.compiled import block_matmul, vector_matmul
from tricycle_accelerators.compiled.attention import MASK_OR_CAP, MIN_SHARED_BYTES
from tricycle_accelerators.compiled.elementwise import CONTIGUOUS, FLOAT32
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.compiled.vector_matmul import NO_SCALES, TOO_FEW, spin_team
from tricycle_accelerators.providers import decline_when

NO_ANGLES = np.empty((1, 0), np.float32)


def _matrix_decline_reason(x: np.ndarray, matrix: Any) -> str | None:
    """Return why no loop multiplies a row with a matrix; else None."""
    if isinstance(matrix, np.ndarray):
        return vector_matmul.matmul_decline_reason(x, matrix)
    if isinstance(matrix, BlockMatrix):
        return block_matmul.matrix_decline_reason(matrix)
    return vector_matmul.matrix_decline_reason(matrix)


def _decline_reason(x: np.ndarray, norm: Norm, n_hidden: int, first: Linear, last: Linear) -> str | None:
    """Return why the loops, which check no bounds, cannot run: x, parameters or their shapes do not fit; else None.

    `n_hidden` is the number of channels that `last` gets.
    """
    linears, size = (first, last), x.shape[-1]
    if len(x) != 1 or x.dtype != FLOAT32 or not x.flags.carray:
        return f"one row of float32 {CONTIGUOUS}, got {x.dtype} {x.shape}"
    for array in (norm.gain, norm.bias, *(linear.bias for linear in linears)):
        if array is not None and not (array.dtype == FLOAT32 and array.flags.carray):
            return f"parameters of float32 {CONTIGUOUS}"
    shapes = norm.gain.shape, first.weights.shape[:1], last.weights.shape
    if shapes != ((size,), (size,), (n_hidden, size)) or (norm.bias is not None and norm.bias.shape != (size,)):
        return f"parameters for {size} and {n_hidden} channels, got shapes {shapes}"
    for matrix, bias in linears:
        if bias is not None and bias.shape != matrix.shape[1:]:
            return f"a bias for {matrix.shape[1]} channels, got {bias.shape}"
        if (why := _matrix_decline_reason(x, matrix)) is not None:
            return why
    return None


def _mlp_decline_reason(x: np.ndarray, norm: Norm, up: Linear, down: Linear, activation: str) -> str | None:
    """Return why the loop cannot run, or None."""
    return _decline_reason(x, norm, up.weights.shape[1] // (2 if activation == "swiglu" else 1), up, down)


# Cache: a pure function of numbers. Callers must not change the result.
@lru_cache(maxsize=2**14)
def _float32_table(address: int, n_rows: int, size: int) -> np.ndarray:
    """Return the table of a float32 matrix for `vector_loops.multiply_row_by_rows`."""
    return np.array([[load_loops("vector_loops").FLOAT32, address, 0, 0, n_rows, size]], np.int64)


def _described(linear: Linear) -> tuple[Any, ...]:
    """Return a linear layer as LINEAR of `sublayer_loops`."""
    matrix, bias = linear
    function, bias = 0, NO_SCALES if bias is None else bias
    if isinstance(matrix, BlockMatrix):
        loops, table = load_loops("block_loops"), block_matmul.describe_parts(matrix)
        matrix.parts[0].check()  # all are of one file
        return loops.multiply_row_by_blocks.address, loops.multiply_block_rows.address, table, matrix.shape[1], bias
    if isinstance(matrix, np.ndarray):
        table = _float32_table(matrix.__array_interface__["data"][0], *matrix.shape[::-1])
    else:
        table = vector_matmul.describe_rows(matrix)
    return load_loops("vector_loops").multiply_row_by_rows.address, function, table, matrix.shape[1], bias


def _described_norm(norm: Norm) -> tuple[Any, ...]:
    """Return a norm as NORM of `sublayer_loops`: without a bias, a layer norm gets one of 0."""
    bias = norm.bias
    if bias is None:
        bias = np.zeros_like(norm.gain) if norm.subtract_mean else NO_SCALES
    return norm.gain, bias, norm.eps, norm.subtract_mean


@decline_when(_mlp_decline_reason)
def mlp_sublayer(x: np.ndarray, norm: Norm, up: Linear, down: Linear, activation: str) -> Array | NotImplementedType:
    """Return x + down(activation(up(norm(x)))) of a row; NotImplemented for infinity or NaN in quantized blocks."""
    compute, y = load_loops("sublayer_loops").mlp_sublayer, np.empty_like(x)
    arguments = _described_norm(norm), _described(up), _described(down)
    return _run(partial(compute, x, *arguments, activation == "swiglu", y), y)


def _run(job: Callable[[np.ndarray, int], int], y: Array) -> Array | NotImplementedType:
    """Run a job by spinning threads and return y, or NotImplemented if a product failed."""
    return NotImplemented if spin_team().run(job) < TOO_FEW else y


def _attention_decline_reason(
    x: np.ndarray,
    norm: Norm,
    qkv: Linear,
    projection: Linear,
    rope: tuple[np.ndarray, np.ndarray] | None,
    cached: tuple[np.ndarray, np.ndarray],
    score_options: ScoreOptions,
    off_by_one: bool,
) -> str | None:
    """Return why the loop cannot run: as for an MLP, a soft-cap, or a cache or angles not of float32; else None."""
    if score_options.softcap is not None:
        return MASK_OR_CAP
    for array in (*cached, *(rope or ())):
        if array.dtype != FLOAT32 or not array[0].flags.carray:
            return f"a cache, cosines and sines of float32 {CONTIGUOUS}"
    if cached[0].shape != cached[1].shape or len(cached[0]) != 1:
        return "keys and values of one shape, of one text"
    n_key_heads, size = cached[0].shape[2:]
    n_heads = qkv.weights.shape[1] // size - 2 * n_key_heads
    fits = qkv.weights.shape[1] % size == 0 and n_heads > 0 and n_heads % n_key_heads == 0
    if not fits or (rope is not None and not rope[0].shape == rope[1].shape == (1, min(rope[0].shape[1], size // 2))):
        return f"queries and angles that fit keys {cached[0].shape}"
    return _decline_reason(x, norm, n_heads * size, qkv, projection)


@decline_when(_attention_decline_reason)
def attention_sublayer(
    x: np.ndarray,
    norm: Norm,
    qkv: Linear,
    projection: Linear,
    rope: tuple[np.ndarray, np.ndarray] | None,
    cached: tuple[np.ndarray, np.ndarray],
    score_options: ScoreOptions,
    off_by_one: bool,
) -> Array | NotImplementedType:
    """Return x + projection(attention of norm(x)) of a row, extending the cache; NotImplemented as `mlp_sublayer`."""
    compute, y = load_loops("sublayer_loops").attention_sublayer, np.empty_like(x)
    (keys,), (values,) = cached
    window = score_options.window
    first = 0 if window is None else max(0, len(keys) - window)
    is_shared = isinstance(qkv.weights, BlockMatrix) or keys.nbytes >= MIN_SHARED_BYTES
    options = score_options.scale, off_by_one, first, is_shared
    arguments = _described_norm(norm), _described(qkv), _described(projection)
    angles = (NO_ANGLES, NO_ANGLES) if rope is None else rope
    function = load_loops("decode_loops").attend_to_units.address
    return _run(partial(compute, x, *arguments, *angles, keys, values, options, y, function), y)
