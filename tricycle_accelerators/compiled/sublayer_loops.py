"""All sublayers of a model's blocks for one token. The import compiles or loads them.

Each is a sequence of the loops of the separate kernels, so results have the same bits. The threads that serve a mailbox
share the products; the rest takes less time than sharing it. A table has the addresses of parameters and caches.
Products are called by address, too, so that these loops do not depend on the format of the weights.

Shapes: C channels, H query heads, K key and value heads, D head size, S tokens of the cache, M hidden channels.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tricycle_accelerators.compiled import decode_loops
from tricycle_accelerators.compiled.jit import ONE, ZERO, compile_loop, copy_row, inner_function
from tricycle_accelerators.compiled.loops import gelu, layer_norm, rms_norm, rotate, swiglu
from tricycle_accelerators.compiled.vector_rows import FLOAT32, call_multiply, pointer_to

TOO_FEW = -1  # what jobs return if fewer threads took part than were asked for
LATE_PAUSES = 5_000  # pauses: a thread that is waited for longer was put aside by the system

# Columns of a table of sublayers: the kind; GAIN to SIZE of the norms of the input, the result, queries and keys, all 0
# if there is none; MULTIPLY to N_BIAS of the first and the last linear layer; and those of attention.
SWIGLU, GELU, GEGLU, ATTENTION = range(4)
# The addresses of gain and bias; whether there is a bias, the mean is subtracted, and 1 is added to the gain; the size.
GAIN, NORM_BIAS, HAS_NORM_BIAS, SUBTRACT_MEAN, UNIT_OFFSET, SIZE, N_NORM = range(7)
KIND, NORM = range(2)
POST_NORM, QUERY_NORM, KEY_NORM, FIRST = range(NORM + N_NORM, NORM + 5 * N_NORM, N_NORM)
# The address of `multiply_row_by_blocks` or `multiply_row_by_rows`; address and length of the table of a matrix for it,
# the address of a function for it; the number of columns; address and length of the bias.
MULTIPLY, MATRIX, N_PARTS, FUNCTION, N_COLUMNS, BIAS, N_BIAS, N_LINEAR = range(8)
LAST = FIRST + N_LINEAR
# Of attention: whether the softmax is softmax1; the window, or 0; addresses of cosines and sines (R / 2,), and R / 2;
# addresses of keys and values, and their shape (S, K, D).
OFF_BY_ONE, WINDOW, COS, SIN, N_ANGLES, KEYS, VALUES, N_TOKENS, N_KEY_HEADS, HEAD_SIZE, N_FIELDS = range(
    LAST + N_LINEAR, LAST + N_LINEAR + 11
)
# Columns of a table of float64: the factors of scores and of the result, and the eps of each norm.
SCORE_SCALE, SCALE, EPS, POST_EPS, QUERY_EPS, KEY_EPS, N_NUMBERS = range(7)


@numba.njit(inline="always")
def _vector(address: int, size: int) -> np.ndarray:
    """Return float32 (size,) at an address."""
    return numba.carray(pointer_to(address, ZERO), (size,))


@inner_function()
def _normalize(numbers: np.ndarray, norm: np.ndarray, eps: float) -> None:
    """Replace numbers by their layer norm or RMS norm, as rows of the norm's size."""
    size = norm[SIZE]
    x = numbers.reshape(len(numbers) // size, size)
    statistics, gain = np.empty((2, len(x)), np.float32), _vector(norm[GAIN], size)
    if norm[UNIT_OFFSET]:
        factors = np.empty(size, np.float32)
        for i in range(size):
            factors[i] = ONE + gain[i]
        gain = factors
    if norm[SUBTRACT_MEAN]:
        bias = _vector(norm[NORM_BIAS], size) if norm[HAS_NORM_BIAS] else np.zeros(size, np.float32)
        layer_norm(x, gain, bias, eps, x, statistics[0], statistics[1])
    else:
        rms_norm(x, gain, eps, x, statistics[0])


@inner_function()
def _rotate(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Apply RoPE to heads (1, H, R) in place, by cosines and sines (1, R / 2)."""
    rotated = np.empty(heads.shape, np.float32)
    rotate(heads, cos, sin, rotated)
    for h in range(heads.shape[1]):
        for i in range(heads.shape[2]):
            heads[0, h, i] = rotated[0, h, i]


@inner_function()
def _multiply(x: np.ndarray, linear: np.ndarray, box: np.ndarray, n_threads: int) -> Any:
    """Return a linear layer's output (1, M) for a row (1, C), and what the product returned (below -1: it failed)."""
    out = np.empty((1, linear[N_COLUMNS]), np.float32)
    waited = call_multiply(
        linear[MULTIPLY],
        x.ctypes.data,
        linear[MATRIX],
        linear[N_PARTS],
        out.ctypes.data,
        linear[FUNCTION],
        box.ctypes.data,
        n_threads,
    )
    bias = _vector(linear[BIAS], linear[N_BIAS])
    for j in range(len(bias)):
        out[0, j] += bias[j]
    return out, waited


@inner_function()
def _attend(
    product: np.ndarray, fields: np.ndarray, numbers: np.ndarray, function: int, box: np.ndarray, n_threads: int
) -> Any:
    """Return attention (1, H D) of queries, keys and values (1, (H + 2 K) D), and pauses waited; cache the last two."""
    n_tokens, n_key_heads, head_size = fields[N_TOKENS], fields[N_KEY_HEADS], fields[HEAD_SIZE]
    shape = n_tokens, n_key_heads, head_size
    first = max(0, n_tokens - fields[WINDOW]) if fields[WINDOW] else 0  # of the tokens in the window
    keys = numba.carray(pointer_to(fields[KEYS], ZERO), shape)
    values = numba.carray(pointer_to(fields[VALUES], ZERO), shape)
    heads = product.reshape(1, product.shape[1] // head_size, head_size)
    n_heads, n_angles = heads.shape[1] - 2 * n_key_heads, fields[N_ANGLES]
    q, k = product[0, : n_heads * head_size], product[0, n_heads * head_size : (n_heads + n_key_heads) * head_size]
    if fields[QUERY_NORM + SIZE]:
        _normalize(q, fields[QUERY_NORM:KEY_NORM], numbers[QUERY_EPS])
        _normalize(k, fields[KEY_NORM:FIRST], numbers[KEY_EPS])
    cos, sin = _vector(fields[COS], n_angles), _vector(fields[SIN], n_angles)
    _rotate(heads[:, : n_heads + n_key_heads, : 2 * n_angles], cos.reshape(1, n_angles), sin.reshape(1, n_angles))
    for h in range(n_key_heads):
        for i in range(head_size):
            keys[-1, h, i] = heads[0, n_heads + h, i]
            values[-1, h, i] = heads[0, n_heads + n_key_heads + h, i]
    table = np.zeros((1, decode_loops.N_COLUMNS), np.int64)
    table[0, decode_loops.QUERY], table[0, decode_loops.N_TOKENS] = heads.ctypes.data, n_tokens - first
    table[0, decode_loops.KEYS], table[0, decode_loops.VALUES] = keys[first:].ctypes.data, values[first:].ctypes.data
    attended, logsumexp = np.empty((1, n_heads, head_size), np.float32), np.empty((1, n_heads), np.float32)
    waited = decode_loops.decode_attention(
        table,
        n_key_heads,
        0,
        FLOAT32,
        np.float32(numbers[SCORE_SCALE]),
        fields[OFF_BY_ONE] != 0,
        attended,
        logsumexp,
        function,
        box,
        n_threads,
    )
    return attended.reshape(1, n_heads * head_size), waited


@inner_function()
def _activate(hidden: np.ndarray, kind: int) -> np.ndarray:
    """Return SwiGLU or GeGLU of a row (1, 2 M), or else GELU of a row (1, M)."""
    size = hidden.shape[1] // (1 if kind == GELU else 2)
    activated = np.empty((1, size), np.float32)
    if kind == SWIGLU:
        swiglu(hidden, activated)
        return activated
    gelu(hidden[0, hidden.shape[1] - size :], activated[0])
    if kind == GEGLU:
        for j in range(size):
            activated[0, j] *= hidden[0, j]
    return activated


@compile_loop("i8(f4[:, ::1], i8[:, ::1], f8[:, ::1], f4[:, ::1], i8, i8[::1], i8)")
def run_sublayers(
    x: np.ndarray, table: np.ndarray, numbers: np.ndarray, y: np.ndarray, function: int, box: np.ndarray, n_threads: int
) -> int:
    """Write a row x (1, C) after all sublayers of a table to y (1, C); write its keys and values to the caches.

    Args:
        table, numbers: (N, N_FIELDS) and (N, N_NUMBERS).
        function: the address of `decode_loops.attend_to_units`.

    Returns:
        The pauses of all jobs that waited for longer than LATE_PAUSES; TOO_FEW if in one of them fewer than `n_threads`
        took part; less if a product failed, and then y is of no use.
    """
    copy_row(x[0], y[0])
    late, all_took_part = 0, True
    normal = np.empty_like(x)
    for i in range(len(table)):
        fields = table[i]
        copy_row(y[0], normal[0])
        if fields[NORM + SIZE]:
            _normalize(normal[0], fields[NORM:POST_NORM], numbers[i, EPS])
        hidden, waited = _multiply(normal, fields[FIRST:LAST], box, n_threads)
        if waited < TOO_FEW:
            return waited
        waited_between = 0
        if fields[KIND] == ATTENTION:
            hidden, waited_between = _attend(hidden, fields, numbers[i], function, box, n_threads)
        else:
            hidden = _activate(hidden, fields[KIND])
        branch, waited_again = _multiply(hidden, fields[LAST : LAST + N_LINEAR], box, n_threads)
        if waited_again < TOO_FEW:
            return waited_again
        if fields[POST_NORM + SIZE]:
            _normalize(branch[0], fields[POST_NORM:QUERY_NORM], numbers[i, POST_EPS])
        if numbers[i, SCALE] != 1:  # a separate loop, so that LLVM rounds the products before it adds them
            for j in range(branch.shape[1]):
                branch[0, j] *= np.float32(numbers[i, SCALE])
        for j in range(x.shape[1]):
            y[0, j] += branch[0, j]
        for pauses in (waited, waited_between, waited_again):
            late += pauses if pauses > LATE_PAUSES else 0
            all_took_part = all_took_part and pauses != TOO_FEW
    return late if all_took_part else TOO_FEW
