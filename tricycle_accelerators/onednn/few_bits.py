"""Products with matrices of few bits.

The matrix lies once in the layout that oneDNN likes best. A float32 row is made two rows of 8 or 16 bits, of what is
large in its numbers and of what is left: both are multiplied with a weight when that has come from memory, which is
what takes the time. So what is rounded is the weights alone. (With one row of 8 bits SmolLM2's perplexity rises by 4%,
with two by what the weights' own rounding costs.)
"""

from __future__ import annotations

import threading
from types import NotImplementedType
from typing import Any

import numpy as np

from tricycle.devices import Array
from tricycle.kernels import FewBits
from tricycle_accelerators import pieces, threads
from tricycle_accelerators.onednn import library

FEW_ROWS = 16  # products of at most so many rows have buffers of their own
SHARED = 2**22  # bytes of a matrix from which on threads have parts of it: to wake one takes as long as to read 300 KB
LARGEST, STEP = 32512.0, 256.0  # a number is whole steps of a row's largest / LARGEST; 127 * 256 of them at most
SMALLEST = 1e-30  # of a row's largest: below that they are zeros

_one_at_a_time = threading.Lock()


class _Ready:
    """A matrix in oneDNN's layout.

    Attributes:
        parts: columns, and what multiplies them.
    """

    def __init__(self, matrix: FewBits) -> None:
        rows = matrix.by_row()
        n_parts = threads.n_threads() if matrix.values.nbytes >= SHARED else 1
        step = -(-len(rows.values) // n_parts // 64) * 64
        self.parts: list[tuple[slice, library.LaidMatrix]] = []
        for start in range(0, len(rows.values), step):
            part = slice(start, start + step)
            factors = None if rows.scales is None else rows.scales[part, 0]
            self.parts.append((part, library.LaidMatrix(rows.values[part].T, factors)))


def _ready(matrix: FewBits) -> _Ready:
    ready = matrix.ready.get("onednn")
    if ready is None:
        with _one_at_a_time:
            ready = matrix.ready.get("onednn") or _Ready(matrix)
            matrix.ready["onednn"] = ready
    return ready


def few_bits_matmul(x: Array, matrix: FewBits, bias: Array | None = None) -> Array | NotImplementedType:
    takes = matrix.turned and matrix.dtype.name in ("int8", "bfloat16") and x.dtype.itemsize <= 4
    if not takes or not x.size or not matrix.size:
        return NotImplemented
    rows: np.ndarray = x.astype(np.float32, copy=False)
    multiply = _by_int8 if matrix.dtype == np.int8 else _by_bfloat16
    product = multiply(rows, _ready(matrix))
    if product is None:
        return NotImplemented
    if bias is not None:
        product += bias
    return product.astype(x.dtype, copy=False)


# -------------------------------------------------------------------- int8
def _by_int8(x: np.ndarray, ready: _Ready) -> np.ndarray | None:
    """None where there is infinity or NaN in x, which whole numbers have not."""
    n_rows = len(x)
    largest = np.abs(x).max(axis=1, keepdims=True)
    if not np.isfinite(largest).all():
        return None
    np.maximum(largest, SMALLEST, out=largest)
    product = np.empty((n_rows, sum(part.shape[1] for _, part in ready.parts)), np.float32)
    if n_rows <= FEW_ROWS:
        halves = _halves(x, LARGEST / largest)
        largest *= 1 / LARGEST
        _each(ready, lambda columns, part: _few_by_int8(halves, part, largest, product[:, columns]))
    else:
        _each(
            ready,
            lambda columns, part, rows: _many_by_int8(x[rows], part, largest[rows], product[rows, columns]),
            n_rows,
        )
    return product


def _halves(x: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Rows (N, K) as int8 (2, N, K): what is large, in units of 256, and what is left, from -128 to 127."""
    steps = x * inverse
    np.rint(steps, out=steps)
    steps += STEP / 2
    numbers = steps.astype("<i2").view(np.int8).reshape(*x.shape, 2)
    halves = np.empty((2, *x.shape), np.int8)
    halves[0] = numbers[..., 1]
    np.bitwise_xor(numbers[..., 0], -128, out=halves[1])
    return halves


def _few_by_int8(halves: np.ndarray, part: library.LaidMatrix, scale: np.ndarray, out: np.ndarray) -> None:
    n_rows = halves.shape[1]
    few = part.few(2 * n_rows)
    few.x[...] = halves.reshape(2 * n_rows, -1)
    few.run()
    np.multiply(few.out[:n_rows], scale * STEP, out=out)
    rest = few.out[n_rows:]
    rest *= scale
    out += rest


def _many_by_int8(x: np.ndarray, part: library.LaidMatrix, largest: np.ndarray, out: np.ndarray) -> None:
    large, rest = _halves(x, LARGEST / largest)
    part.product(large, out)
    out *= STEP
    part.product(rest, out, add=True)
    out *= largest / LARGEST


# -------------------------------------------------------------------- bfloat16
def _by_bfloat16(x: np.ndarray, ready: _Ready) -> np.ndarray:
    n_rows = len(x)
    product = np.empty((n_rows, sum(part.shape[1] for _, part in ready.parts)), np.float32)
    if n_rows <= FEW_ROWS and np.isfinite(x).all():
        large = x.astype(library.bfloat16())
        rest = (x - large.astype(np.float32)).astype(library.bfloat16())
        _each(ready, lambda columns, part: _few_by_bfloat16(large, rest, part, product[:, columns]))
        return product
    rounded = np.ascontiguousarray(x).astype(library.bfloat16())
    _each(ready, lambda columns, part, rows: part.product(rounded[rows], product[rows, columns]), n_rows)
    return product


def _few_by_bfloat16(large: np.ndarray, rest: np.ndarray, part: library.LaidMatrix, out: np.ndarray) -> None:
    n_rows = len(large)
    few = part.few(2 * n_rows)
    few.x[:n_rows] = large
    few.x[n_rows:] = rest
    few.run()
    np.add(few.out[:n_rows], few.out[n_rows:], out=out)


# -------------------------------------------------------------------- threads
def _each(ready: _Ready, work: Any, n_rows: int = 0) -> None:
    """Call `work` for each part of the matrix, and for some rows each where there are many."""
    if not n_rows and len(ready.parts) == 1:
        work(*ready.parts[0])
    elif not n_rows:
        threads.parallel(lambda part: work(*part), ready.parts)
    else:
        some = pieces.parts(n_rows, 64)
        tasks = [(*part, rows) for part in ready.parts for rows in some]
        threads.parallel(lambda task: work(*task), tasks)
