"""Whole sublayers of a transformer block for one token. The import compiles or loads them.

Each is a sequence of the loops of the separate kernels, so results have the same bits. The threads that serve a mailbox
share the products; the rest takes less time than sharing it. Products are called by address, so that these loops do not
depend on the format of the weights.

Shapes: C channels, H query heads, K key and value heads, D head size, S tokens of the cache, M hidden channels.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from tricycle_accelerators.compiled.decode_loops import (
    FLOAT32,
    KEYS,
    N_COLUMNS,
    N_TOKENS,
    QUERY,
    VALUES,
    decode_attention,
)
from tricycle_accelerators.compiled.jit import OPTIONS, compile_loop
from tricycle_accelerators.compiled.loops import gelu, layer_norm, rms_norm, rotate, swiglu
from tricycle_accelerators.compiled.vector_rows import call_multiply

TOO_FEW = -1  # what jobs return if fewer threads took part than were asked for
ROW, VECTOR, TABLE = types.float32[:, ::1], types.float32[::1], types.int64[:, ::1]
NORM = types.Tuple((VECTOR, VECTOR, types.float64, types.boolean))  # gain, bias, eps, subtract_mean
# The address of `multiply_row_by_blocks` or `multiply_row_by_rows`, that of a function for it, the matrix as a table
# for it, the number of columns M, and the bias, (0,) for none.
LINEAR = types.Tuple((types.int64, types.int64, TABLE, types.int64, VECTOR))
TEAM = types.int64[::1], types.int64  # a mailbox and the number of threads
CACHE = types.float32[:, :, ::1]
OPTIONS_OF_SCORES = types.Tuple((types.float32, types.boolean, types.int64, types.boolean))


@numba.njit(**OPTIONS)
def _normalize(x: np.ndarray, norm: Any) -> np.ndarray:
    """Return the layer norm or RMS norm of a row (1, C)."""
    gain, bias, eps, subtract_mean = norm
    y, statistics = np.empty_like(x), np.empty((2, 1), np.float32)
    if subtract_mean:
        layer_norm(x, gain, bias, eps, y, statistics[0], statistics[1])
    else:
        rms_norm(x, gain, eps, y, statistics[0])
    return y


@numba.njit(**OPTIONS)
def _rotate(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Apply RoPE to heads (1, H, R) in place, by cosines and sines (1, R / 2)."""
    rotated = np.empty(heads.shape, np.float32)
    rotate(heads, cos, sin, rotated)
    for h in range(heads.shape[1]):
        for i in range(heads.shape[2]):
            heads[0, h, i] = rotated[0, h, i]


@numba.njit(**OPTIONS)
def _multiply(x: np.ndarray, linear: Any, box: np.ndarray, n_threads: int) -> Any:
    """Return a linear layer's output (1, M) for a row (1, C), and what the product returned (below -1: it failed)."""
    multiply, function, table, n_columns, bias = linear
    out = np.empty((1, n_columns), np.float32)
    waited = call_multiply(
        multiply,
        x.ctypes.data,
        table.ctypes.data,
        len(table),
        out.ctypes.data,
        function,
        box.ctypes.data,
        n_threads,
    )
    for j in range(len(bias)):
        out[0, j] += bias[j]
    return out, waited


@numba.njit(**OPTIONS)
def _add_waits(a: int, b: int) -> int:
    """Return what a sequence of two jobs returns: the most pauses, or the lowest of negative results."""
    return max(a, b) if min(a, b) >= 0 else min(a, b)


@compile_loop(types.int64(ROW, NORM, LINEAR, LINEAR, types.boolean, ROW, *TEAM))
def mlp_sublayer(
    x: np.ndarray, norm: Any, up: Any, down: Any, is_gated: bool, y: np.ndarray, box: np.ndarray, n_threads: int
) -> int:
    """Write x + down(activation(up(norm(x)))) of a row x (1, C) to y, with SwiGLU if `is_gated`, else GELU.

    Returns:
        As `vector_loops.multiply_vector`; below -1 if a product failed, and then y is not written.
    """
    hidden, waited = _multiply(_normalize(x, norm), up, box, n_threads)
    if waited < TOO_FEW:
        return waited
    activated = np.empty((1, hidden.shape[1] // (2 if is_gated else 1)), np.float32)
    if is_gated:
        swiglu(hidden, activated)
    else:
        gelu(hidden[0], activated[0])
    branch, waited_again = _multiply(activated, down, box, n_threads)
    for j in range(x.shape[1]):
        y[0, j] = x[0, j] + branch[0, j]
    return _add_waits(waited, waited_again)


@compile_loop(
    types.int64(ROW, NORM, LINEAR, LINEAR, ROW, ROW, CACHE, CACHE, OPTIONS_OF_SCORES, ROW, types.int64, *TEAM)
)
def attention_sublayer(
    x: np.ndarray,
    norm: Any,
    qkv: Any,
    projection: Any,
    cos: np.ndarray,
    sin: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    options: Any,
    y: np.ndarray,
    function: int,
    box: np.ndarray,
    n_threads: int,
) -> int:
    """Write x + projection(attention of norm(x)) of a row x (1, C) to y; write its key and value to the cache.

    Args:
        cos, sin: (1, R / 2), of the angles by which the first R channels of queries and keys are rotated.
        keys, values: (S, K, D); the last token's are written.
        options: the scale of scores, whether the softmax is softmax1, the first token that is seen, and whether
            threads share the attention.
        function: the address of `decode_loops.attend_to_units`.

    Returns:
        As `mlp_sublayer`.
    """
    scale, off_by_one, first, is_shared = options
    last, n_key_heads, head_size = len(keys) - 1, keys.shape[1], keys.shape[2]
    product, waited = _multiply(_normalize(x, norm), qkv, box, n_threads)
    if waited < TOO_FEW:
        return waited
    heads = product.reshape(1, product.shape[1] // head_size, head_size)
    n_heads = heads.shape[1] - 2 * n_key_heads
    _rotate(heads[:, : n_heads + n_key_heads, : 2 * cos.shape[1]], cos, sin)
    for h in range(n_key_heads):
        for i in range(head_size):
            keys[last, h, i] = heads[0, n_heads + h, i]
            values[last, h, i] = heads[0, n_heads + n_key_heads + h, i]
    table = np.zeros((1, N_COLUMNS), np.int64)
    table[0, QUERY], table[0, N_TOKENS] = heads.ctypes.data, len(keys) - first
    table[0, KEYS], table[0, VALUES] = keys[first:].ctypes.data, values[first:].ctypes.data
    attended, logsumexp = np.empty((1, n_heads, head_size), np.float32), np.empty((1, n_heads), np.float32)
    n_sharing = n_threads if is_shared else 1
    waited_for_attention = decode_attention(
        table, n_key_heads, 0, FLOAT32, scale, off_by_one, attended, logsumexp, function, box, n_sharing
    )
    if len(heads) == 0:  # named here, or its memory would be free by now
        return waited
    branch, waited_again = _multiply(attended.reshape(1, n_heads * head_size), projection, box, n_threads)
    for j in range(x.shape[1]):
        y[0, j] = x[0, j] + branch[0, j]
    return _add_waits(_add_waits(waited, waited_again), waited_for_attention)
