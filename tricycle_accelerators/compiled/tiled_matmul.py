"""Large float32 matrix products by Numba register tiles, with columns or rows of the result divided among threads."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from tricycle_accelerators import blas, buffers, matmul_plan, threads
from tricycle_accelerators.compiled.loader import load_loops
from tricycle_accelerators.providers import decline_when

MANY = 8  # panels for each thread, of which it does not matter that one takes one more


# Cache: valid for the life of the process: depends on the processor and on NumPy's BLAS.
@cache
def _loops() -> Any:
    """Return the module of compiled loops, or None where BLAS is as fast (`InstructionSet.slower_blas`)."""
    features = frozenset(load_loops("registers").INSTRUCTION_SET.names)  # which Numba compiles for
    why = matmul_plan.tile_processor_decline_reason(matmul_plan.this_machine()._replace(features=features))
    return load_loops("matrix_loops") if why is None else None


def _matmul_decline_reason(
    a: np.ndarray, b: np.ndarray, bias: Any = None, out: Any = None, dtype: Any = None, *_: Any, **__: Any
) -> str | None:
    """Return why tiles cannot run (small, in a worker, not float32, strides, processor, shape), or None."""
    shape = *a.shape, b.shape[1]
    why = matmul_plan.tiled_decline_reason(shape, "rows" if a.strides[1] == a.itemsize else "columns")
    if why is not None:
        return why
    if threads.in_worker():
        return "a call by one of several threads at work"
    if not _is_float32(a, b, bias, out) or not (dtype is None or np.dtype(dtype) == np.float32):
        return f"float32 alone, aligned and not read-only, got {a.dtype} and {b.dtype}"
    if 4 not in b.strides or (out is not None and out.strides[1] != 4):
        return "a right matrix with contiguous rows or columns, and an out with contiguous rows"
    loops = _loops()
    if loops is None:
        return matmul_plan.NO_TILED_MATMUL
    return matmul_plan.tile_shape_decline_reason(shape[2], loops.LANES)


@decline_when(_matmul_decline_reason)
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    bias: np.ndarray | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    precision: str = "float32",
) -> np.ndarray:
    """Return a @ b + bias, in `out` if given, by Numba tiles in threads; NotImplemented if small or not float32.

    The left matrix has contiguous rows: BLAS computes products with a transposed left matrix.
    """
    n_rows, n_columns = len(a), b.shape[1]
    loops = _loops()
    product = buffers.empty((n_rows, n_columns), np.float32) if out is None else out
    shifts = np.empty(0, np.float32) if bias is None else np.ascontiguousarray(bias)

    def work(part: tuple[slice, slice]) -> None:
        rows, columns = part
        loops.multiply_large(a[rows], b[:, columns], shifts[columns], product[rows, columns])

    threads.parallel_for(work, _parts((n_rows, n_columns), loops.ROWS, loops.PANEL), calls_blas=False)
    return product


def multiply_in_this_thread(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Write a @ b into `out`, by tiles if they are faster, else by BLAS, which the caller limits to one thread."""
    loops = _loops()
    left = "rows" if a.strides[1] == a.itemsize else "columns"
    if (
        loops is None
        or matmul_plan.tiled_decline_reason((*a.shape, b.shape[1]), left) is not None
        or matmul_plan.tile_shape_decline_reason(b.shape[1], loops.LANES) is not None
        or not _is_float32(a, b, out)
    ):
        blas.multiply(a, b, out)
    else:
        loops.multiply_large(a, b, np.empty(0, np.float32), out)


def _is_float32(*arrays: np.ndarray | None) -> bool:
    """Return whether all arrays that are given are float32, aligned and writable."""
    return all(array is None or (array.dtype == np.float32 and array.flags.behaved) for array in arrays)


def _parts(shape: tuple[int, int], row_step: int, panel: int) -> list[tuple[slice, slice]]:
    """Return (rows, columns) of parts of whole tiles and panels, largest first, so that all threads stay busy."""
    n_threads, n_panels = threads.n_threads(), -(-shape[1] // panel)
    if n_panels >= MANY * n_threads:
        across, down = 2 * n_threads, 1
    else:
        across = math.gcd(n_threads, n_panels)
        down = n_threads // across
    rows = even_slices(shape[0], row_step, down)
    columns = even_slices(shape[1], panel, across)
    columns.sort(key=lambda some: some.start - some.stop)
    return [(some, others) for others in columns for some in rows]


def even_slices(size: int, step: int, n_parts: int) -> list[slice]:
    """Divide `size` into about `n_parts` equal slices of whole steps; fewer if there are fewer steps."""
    n_steps = -(-size // step)
    n_parts = min(n_parts, n_steps)
    ends = [min(size, n_steps * i // n_parts * step) for i in range(n_parts + 1)]
    return [slice(*part) for part in pairwise(ends)]
