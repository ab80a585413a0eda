"""All sublayers of a model's blocks for a few tokens. The import compiles or loads them.

Each is a sequence of the loops of the separate kernels, so results have the same bits. The threads that serve a mailbox
share the products; the rest takes less time than sharing it. A table has the addresses of parameters and caches.
Products are called by address, too, so that these loops do not depend on the format of the weights.

Shapes: N tokens, C channels, H query heads, K key and value heads, D head size, S cached tokens, M hidden channels.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tricycle_accelerators.compiled import decode_loops
from tricycle_accelerators.compiled.jit import (
    ONE,
    ZERO,
    aligned_empty,
    compile_loop,
    copy_row,
    inner_function,
    pointer_to,
)
from tricycle_accelerators.compiled.loops import gelu, layer_norm, rms_norm, rotate, swiglu
from tricycle_accelerators.compiled.vector_matmul import LATE_PAUSES, TOO_FEW
from tricycle_accelerators.compiled.vector_rows import FLOAT32, call_multiply

# Columns of a table of sublayers: the kind; GAIN to SIZE of the norms of the input, the result, queries and keys, all 0
# if there is none; MULTIPLY to N_BIAS of the first and the last linear layer; and those of attention.
SWIGLU, GELU, GEGLU, ATTENTION = range(4)
# The addresses of gain and bias; whether there is a bias, the mean is subtracted, and 1 is added to the gain; the size.
GAIN, NORM_BIAS, HAS_NORM_BIAS, SUBTRACT_MEAN, UNIT_OFFSET, SIZE, N_NORM = range(7)
KIND, NORM = range(2)
POST_NORM, QUERY_NORM, KEY_NORM, FIRST = range(NORM + N_NORM, NORM + 5 * N_NORM, N_NORM)
# The address of `multiply_by_blocks` or `multiply_by_rows`; address and length of the table of a matrix for it, its
# argument `function`; the number of columns; address and length of the bias.
MULTIPLY, MATRIX, N_PARTS, FUNCTION, N_COLUMNS, BIAS, N_BIAS, N_LINEAR = range(8)
LAST = FIRST + N_LINEAR
# Of attention: whether the softmax is softmax1; the window, or 0; addresses of cosines and sines (N, R / 2), and R / 2;
# the heads of keys, and their size.
OFF_BY_ONE, WINDOW, COS, SIN, N_ANGLES, N_KEY_HEADS, HEAD_SIZE, N_FIELDS = range(LAST + N_LINEAR, LAST + N_LINEAR + 8)
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
    """Apply RoPE to heads (N, H, R) in place, by cosines and sines (N, R / 2)."""
    rotated = np.empty(heads.shape, np.float32)
    rotate(heads, cos, sin, rotated)
    for n in range(heads.shape[0]):
        for h in range(heads.shape[1]):
            for i in range(heads.shape[2]):
                heads[n, h, i] = rotated[n, h, i]


@inner_function()
def _multiply(x: np.ndarray, linear: np.ndarray, box: np.ndarray, n_threads: int) -> Any:
    """Return a linear layer's output (N, M) for rows (N, C), and what the product returned (below -1: it failed)."""
    out = aligned_empty(len(x), linear[N_COLUMNS])
    waited = call_multiply(
        linear[MULTIPLY],
        len(x),
        x.ctypes.data,
        linear[MATRIX],
        linear[N_PARTS],
        out.ctypes.data,
        linear[FUNCTION],
        box.ctypes.data,
        n_threads,
    )
    bias = _vector(linear[BIAS], linear[N_BIAS])
    for n in range(len(out)):
        for j in range(len(bias)):
            out[n, j] += bias[j]
    return out, waited


@inner_function()
def _attend(
    product: np.ndarray,
    fields: np.ndarray,
    numbers: np.ndarray,
    tokens: np.ndarray,
    function: int,
    box: np.ndarray,
    n_threads: int,
) -> Any:
    """Return attention (N, H D) of queries, keys and values (N, (H + 2 K) D), and pauses waited; cache the last two.

    Args:
        tokens: (N, decode_loops.N_COLUMNS), overwritten; see `run_sublayers`.
    """
    n_rows, n_key_heads, head_size = len(product), fields[N_KEY_HEADS], fields[HEAD_SIZE]
    heads = product.reshape(n_rows, product.shape[1] // head_size, head_size)
    n_heads, n_angles = heads.shape[1] - 2 * n_key_heads, fields[N_ANGLES]
    n_of_q, n_of_k = n_heads * head_size, n_key_heads * head_size
    if fields[QUERY_NORM + SIZE]:
        for n in range(n_rows):
            _normalize(product[n, :n_of_q], fields[QUERY_NORM:KEY_NORM], numbers[QUERY_EPS])
            _normalize(product[n, n_of_q : n_of_q + n_of_k], fields[KEY_NORM:FIRST], numbers[KEY_EPS])
    cos, sin = _vector(fields[COS], n_rows * n_angles), _vector(fields[SIN], n_rows * n_angles)
    angles = n_rows, n_angles
    _rotate(heads[:, : n_heads + n_key_heads, : 2 * n_angles], cos.reshape(angles), sin.reshape(angles))
    for n in range(n_rows):
        token, row = tokens[n], product[n]
        last = 4 * n_of_k * (token[decode_loops.N_TOKENS] - 1)
        copy_row(row[n_of_q : n_of_q + n_of_k], _vector(token[decode_loops.KEYS] + last, n_of_k))
        copy_row(row[n_of_q + n_of_k :], _vector(token[decode_loops.VALUES] + last, n_of_k))
        token[decode_loops.QUERY] = row.ctypes.data
        unseen = max(0, token[decode_loops.N_TOKENS] - fields[WINDOW]) if fields[WINDOW] else 0
        token[decode_loops.N_TOKENS] -= unseen
        token[decode_loops.KEYS] += 4 * n_of_k * unseen
        token[decode_loops.VALUES] += 4 * n_of_k * unseen
    attended, logsumexp = aligned_empty(n_rows, n_of_q), np.empty((n_rows, n_heads), np.float32)
    waited = decode_loops.decode_attention(
        tokens,
        n_key_heads,
        0,
        FLOAT32,
        np.float32(numbers[SCORE_SCALE]),
        fields[OFF_BY_ONE] != 0,
        attended.reshape(n_rows, n_heads, head_size),
        logsumexp,
        function,
        box,
        n_threads,
    )
    return attended, waited


@inner_function()
def _activate(hidden: np.ndarray, kind: int) -> np.ndarray:
    """Return SwiGLU or GeGLU of rows (N, 2 M), or else GELU of rows (N, M)."""
    size = hidden.shape[1] // (1 if kind == GELU else 2)
    activated = aligned_empty(len(hidden), size)
    if kind == SWIGLU:
        swiglu(hidden, activated)
        return activated
    for n in range(len(hidden)):
        gelu(hidden[n, hidden.shape[1] - size :], activated[n])
        if kind == GEGLU:
            for j in range(size):
                activated[n, j] *= hidden[n, j]
    return activated


@compile_loop("i8(f4[:, ::1], i8[:, ::1], f8[:, ::1], i8[:, :, ::1], f4[:, ::1], i8, i8[::1], i8)")
def run_sublayers(
    x: np.ndarray,
    table: np.ndarray,
    numbers: np.ndarray,
    tokens: np.ndarray,
    y: np.ndarray,
    function: int,
    box: np.ndarray,
    n_threads: int,
) -> int:
    """Write tokens x (N, C) after all sublayers of a table to y (N, C); write their keys and values to the caches.

    Args:
        table, numbers: (L, N_FIELDS) and (L, N_NUMBERS) of L sublayers.
        tokens: (A, N, decode_loops.N_COLUMNS) of A attention sublayers, overwritten: addresses of keys and of values,
            and how many of them each token attends to, itself the last.
        function: the address of `decode_loops.attend_to_units`.

    Returns:
        The pauses of all jobs that waited for longer than LATE_PAUSES; TOO_FEW if in one of them fewer than `n_threads`
        took part; less if a product failed, and then y is of no use.
    """
    result = y.reshape(-1)
    copy_row(x.reshape(-1), result)
    late, n_attention, all_took_part = 0, 0, True
    normal = aligned_empty(len(x), x.shape[1])
    for i in range(len(table)):
        fields = table[i]
        copy_row(result, normal.reshape(-1))
        if fields[NORM + SIZE]:
            _normalize(normal.reshape(-1), fields[NORM:POST_NORM], numbers[i, EPS])
        hidden, waited = _multiply(normal, fields[FIRST:LAST], box, n_threads)
        if waited < TOO_FEW:
            return waited
        waited_between = 0
        if fields[KIND] == ATTENTION:
            hidden, waited_between = _attend(hidden, fields, numbers[i], tokens[n_attention], function, box, n_threads)
            n_attention += 1
        else:
            hidden = _activate(hidden, fields[KIND])
        output, waited_again = _multiply(hidden, fields[LAST : LAST + N_LINEAR], box, n_threads)
        if waited_again < TOO_FEW:
            return waited_again
        branch = output.reshape(-1)
        if fields[POST_NORM + SIZE]:
            _normalize(branch, fields[POST_NORM:QUERY_NORM], numbers[i, POST_EPS])
        if numbers[i, SCALE] != 1:  # a separate loop, so that LLVM rounds the products before it adds them
            for j in range(len(branch)):
                branch[j] *= np.float32(numbers[i, SCALE])
        for j in range(len(result)):
            result[j] += branch[j]
        for pauses in (waited, waited_between, waited_again):
            late += pauses if pauses > LATE_PAUSES else 0
            all_took_part = all_took_part and pauses != TOO_FEW
    return late if all_took_part else TOO_FEW
