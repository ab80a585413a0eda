"""Products with matrices of few bits.

The matrix lies once in the layout that oneDNN likes best. A float32 row is made two rows of 8 or 16 bits, of what is
large in its numbers and of what is left: both are multiplied with a weight when that has come from memory, which is
what takes the time. So what is rounded is the weights alone. (With one row of 8 bits SmolLM2's perplexity rises by 4%,
with two by what the weights' own rounding costs.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from types import NotImplementedType

import numpy as np

from tricycle.devices import Array
from tricycle.kernels import FewBits
from tricycle_accelerators import pieces, threads
from tricycle_accelerators.onednn import library

FEW_ROWS = 16  # products of at most so many rows have buffers of their own
SHARED = 2**22  # bytes of a matrix from which on threads have parts of it: to wake one takes as long as to read 300 KB
LARGEST, STEP = 32512.0, 256.0  # a number is whole steps of a row's largest / LARGEST; 127 * 256 of them at most
OFFSET = 128 * STEP + 128 + 0.5  # makes steps positive: then what is behind the point is cut off
SMALLEST = 1e-30  # of a row's largest: below that they are zeros

_Part = tuple[slice, library.LaidMatrix]  # some columns, and what multiplies them
_one_at_a_time = threading.Lock()


class _Ready:
    """A matrix in oneDNN's layout.

    Attributes:
        parts: that threads take one each of; one where it is small.
        n_columns: of all parts.
        is_int8: else it is bfloat16.
        whole: where it has one part, this.
    """

    def __init__(self, matrix: FewBits) -> None:
        rows = matrix.by_row()
        self.is_int8 = rows.scales is not None
        n_parts = threads.n_threads() if matrix.values.nbytes >= SHARED else 1
        step = -(-len(rows.values) // n_parts // 64) * 64
        self.parts: list[_Part] = []
        self.n_columns = len(rows.values)
        for start in range(0, len(rows.values), step):
            part = slice(start, start + step)
            factors = None if rows.scales is None else rows.scales[part, 0]
            self.parts.append((part, library.LaidMatrix(rows.values[part].T, factors)))
        self.whole = self.parts[0][1] if len(self.parts) == 1 else None


def _ready(matrix: FewBits) -> _Ready | None:
    """None for what is left to NumPy."""
    if matrix.dtype.name not in ("int8", "bfloat16") or not matrix.size:
        return None
    with _one_at_a_time:
        ready = matrix.ready.get("onednn") or _Ready(matrix)
        matrix.ready["onednn"] = ready
    return ready


def few_bits_matmul(
    x: Array, matrix: FewBits, bias: Array | None = None, precision: str = "float32"
) -> Array | NotImplementedType:
    if not matrix.turned or x.dtype.itemsize > 4 or not x.size:
        return NotImplemented
    ready: _Ready | None = matrix.ready.get("onednn") or _ready(matrix)
    if ready is None:
        return NotImplemented
    rows: np.ndarray = x.astype(np.float32, copy=False)
    product = _by_int8(rows, ready) if ready.is_int8 else _by_bfloat16(rows, ready, precision != "bfloat16")
    if product is None:
        return NotImplemented
    if bias is not None:
        product += bias
    return product.astype(x.dtype, copy=False)


# -------------------------------------------------------------------- int8
def _by_int8(x: np.ndarray, ready: _Ready) -> np.ndarray | None:
    """None where there is infinity or NaN in x, which whole numbers have not."""
    n_rows = len(x)
    if n_rows == 1 and ready.whole is not None:
        return _one_by_int8(x, ready.whole)
    sizes = np.abs(x)
    largest = np.maximum.reduce(sizes, axis=1, keepdims=True)
    if not np.maximum.reduce(largest, axis=None) < np.inf:
        return None
    np.maximum(largest, SMALLEST, out=largest)
    product = np.empty((n_rows, ready.n_columns), np.float32)
    if n_rows > FEW_ROWS:
        work = partial(_many_by_int8, x, largest, product)
        _share_rows(ready, work, n_rows)
        return product
    numbers = _bytes(x, largest, out=sizes)
    largest /= LARGEST  # to the last bit as for a row alone
    if len(ready.parts) == 1:
        _few_by_int8(numbers, largest, product, ready.parts[0])
    else:
        threads.parallel(partial(_few_by_int8, numbers, largest, product), ready.parts)
    return product


def _one_by_int8(x: np.ndarray, matrix: library.LaidMatrix) -> np.ndarray | None:
    """One row (1, K): most of all calls, so it is written with as few calls of NumPy as can be."""
    few = matrix.few(2)
    if not few.scratch:
        whole = np.empty(x.shape, "<u2")
        few.scratch = np.empty(x.shape, np.float32), whole, whole.view(np.uint8).reshape(-1, 2).T, few.x.view(np.uint8)
    steps, whole, halves, target = few.scratch
    np.abs(x, out=steps)
    largest = max(float(np.maximum.reduce(steps, axis=None)), SMALLEST)
    if not largest < math.inf:
        return None
    np.multiply(x, LARGEST / largest, out=steps)
    np.add(steps, OFFSET, out=steps)
    np.copyto(whole, steps, casting="unsafe")
    np.bitwise_xor(halves, 128, out=target)
    few.run()
    rest, large = few.out[:1], few.out[1:]
    np.multiply(large, STEP, out=large)
    np.add(large, rest, out=large)
    return large * np.float32(largest / LARGEST)


def _bytes(x: np.ndarray, largest: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Rows (N, K) as uint8 (2, N, K): what is left and what is large, in units of 256; of both 128 is to be taken.

    Args:
        out: float32 like x, for numbers on the way.
    """
    np.multiply(x, LARGEST / largest, out=out)
    out += OFFSET
    return out.astype("<u2").view(np.uint8).reshape(*x.shape, 2).transpose(2, 0, 1)


def _few_by_int8(numbers: np.ndarray, scale: np.ndarray, product: np.ndarray, part: _Part) -> None:
    columns, matrix = part
    n_rows = numbers.shape[1]
    few = matrix.few(2 * n_rows)
    np.bitwise_xor(numbers, 128, out=few.x.view(np.uint8).reshape(numbers.shape))
    few.run()
    rest, large = few.out[:n_rows], few.out[n_rows:]
    large *= STEP
    large += rest
    np.multiply(large, scale, out=product[:, columns])


def _many_by_int8(x: np.ndarray, largest: np.ndarray, product: np.ndarray, task: tuple[_Part, slice]) -> None:
    (columns, matrix), rows = task
    out = np.empty(
        (rows.stop - rows.start, matrix.shape[1]), np.float32
    )  # a part of `product` takes 10,000 times as long
    numbers = _bytes(x[rows], largest[rows], np.empty(x[rows].shape, np.float32))
    rest, large = np.bitwise_xor(numbers, 128, order="C").view(np.int8)
    matrix.product(large, out)
    out *= STEP
    matrix.product(rest, out, add=True)
    np.multiply(out, largest[rows] * (1 / LARGEST), out=product[rows, columns])


# -------------------------------------------------------------------- bfloat16
def _by_bfloat16(x: np.ndarray, ready: _Ready, exact: bool) -> np.ndarray:
    """
    Args:
        exact: x is not rounded, though it has many rows.
    """
    n_rows = len(x)
    product = np.empty((n_rows, ready.n_columns), np.float32)
    exact = (exact or n_rows <= FEW_ROWS) and bool(np.isfinite(x).all())
    halves = np.empty((2 if exact else 1, *x.shape), library.bfloat16())
    halves[0] = x
    if exact:
        halves[1] = x - halves[0].astype(np.float32)
    if n_rows > FEW_ROWS or not exact:
        _share_rows(ready, partial(_many_by_bfloat16, halves, product), n_rows)
    elif len(ready.parts) == 1:
        _few_by_bfloat16(halves, product, ready.parts[0])
    else:
        threads.parallel(partial(_few_by_bfloat16, halves, product), ready.parts)
    return product


def _few_by_bfloat16(halves: np.ndarray, product: np.ndarray, part: _Part) -> None:
    columns, matrix = part
    n_rows = halves.shape[1]
    few = matrix.few(2 * n_rows)
    few.x[...] = halves.reshape(few.x.shape)
    few.run()
    np.add(few.out[:n_rows], few.out[n_rows:], out=product[:, columns])


def _many_by_bfloat16(halves: np.ndarray, product: np.ndarray, task: tuple[_Part, slice]) -> None:
    (columns, matrix), rows = task
    out = np.empty((rows.stop - rows.start, matrix.shape[1]), np.float32)
    for i, half in enumerate(halves):
        matrix.product(half[rows], out, add=i > 0)
    product[rows, columns] = out


# -------------------------------------------------------------------- threads
def _share_rows(ready: _Ready, work: Callable[[tuple[_Part, slice]], None], n_rows: int) -> None:
    """Some rows with a part of the matrix each."""
    some = [slice(part.start, min(part.stop, n_rows)) for part in pieces.parts(n_rows, 64)]
    threads.parallel(work, [(part, rows) for part in ready.parts for rows in some])
